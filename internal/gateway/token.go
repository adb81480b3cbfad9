package gateway

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Sealer converts a grant to the lock token that a client keeps, and back. All replicas of a gateway have the same
// keys, so that each of them can open the tokens of the others. All methods are safe for concurrent use.
type Sealer struct {
	keys atomic.Pointer[[]sealingKey] // the first key seals; every key opens
	ids  []byte                       // the key for request ids, which never changes
}

// sealingKey has the keys that are derived from one secret.
type sealingKey struct {
	aead cipher.AEAD
	mac  []byte // the key for nonces
}

// NewSealer returns a Sealer. identity and the keys are secrets of at least MinKeyBytes each. The Sealer derives the
// ids of requests from identity. Without keys, identity seals lock tokens too. identity must stay the same when the
// keys change: with another identity, the retry of a request is a new request.
func NewSealer(identity []byte, keys ...[]byte) (*Sealer, error) {
	if len(keys) == 0 {
		keys = [][]byte{identity}
	}
	if err := checkKey(identity); err != nil {
		return nil, err
	}
	s := &Sealer{ids: derive(identity, "fencelock gateway: request id")}
	return s, s.SetKeys(keys...)
}

// SetKeys replaces the keys: the first key seals; every key opens.
func (s *Sealer) SetKeys(keys ...[]byte) error {
	all := make([]sealingKey, len(keys))
	for i, key := range keys {
		if err := checkKey(key); err != nil {
			return err
		}
		block, err := aes.NewCipher(derive(key, "fencelock gateway: lock token"))
		if err != nil {
			return err
		}
		aead, err := cipher.NewGCM(block)
		if err != nil {
			return err
		}
		all[i] = sealingKey{aead, derive(key, "fencelock gateway: nonce")}
	}
	s.keys.Store(&all)
	return nil
}

func checkKey(key []byte) error {
	if len(key) >= MinKeyBytes {
		return nil
	}
	return &backend.InvalidError{
		Kind: backend.ErrInvalidOption, What: "key", Value: "of so many bytes", Why: "it needs 16 bytes or more",
	}
}

func derive(key []byte, purpose string) []byte { return macOf(key, []byte(purpose)) }

// MinKeyBytes is the minimum length of a gateway's key, in bytes.
const MinKeyBytes = 16

func macOf(key []byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, p := range parts {
		h.Write(binary.AppendUvarint(nil, uint64(len(p))))
		h.Write(p)
	}
	return h.Sum(nil)
}

// sealed is the content of a lock token. It has no instants: those of two processes cannot be compared.
type sealed struct {
	Name         string        `json:"n"`
	Owner        string        `json:"o"`
	RequestID    string        `json:"r"`
	Kind         backend.Kind  `json:"k,omitempty"`
	Permits      int           `json:"p,omitempty"`
	Limit        int           `json:"l,omitempty"`
	Hierarchical bool          `json:"h,omitempty"`
	Token        uint64        `json:"t,omitempty"`
	TTL          time.Duration `json:"d"`
	Incarnation  string        `json:"i,omitempty"`
	MinHold      time.Duration `json:"m,omitempty"`
	Of           string        `json:"c,omitempty"`
}

// tokenVersion is the first byte of a lock token.
const tokenVersion = 1

// Seal returns the lock token of a grant. All replicas with the same first key return the same token for the same hold.
// Only the principal of may use the token; if of is empty, anybody with the token may.
func (s *Sealer) Seal(g *backend.Grant, minHold time.Duration, of string) string {
	plain, err := json.Marshal(sealed{
		g.Name, g.Owner, g.RequestID, g.Kind, g.Permits, g.Limit, g.Hierarchical, uint64(g.Token), g.TTL, g.Incarnation,
		minHold, of,
	})
	if err != nil {
		panic(err) // impossible: only text and numbers
	}
	k := &(*s.keys.Load())[0]
	nonce := macOf(k.mac, plain)[:k.aead.NonceSize()]
	out := append([]byte{tokenVersion}, nonce...)
	return base64.RawURLEncoding.EncodeToString(k.aead.Seal(out, nonce, plain, out[:1]))
}

// errForged is the error for a text that is not a lock token sealed with one of the keys.
var errForged = errors.New("this gateway did not issue the lock token (replicas need the same --http-key)")

// Open is the inverse of Seal. It leaves SentAt and MinHoldUntil of the grant empty.
func (s *Sealer) Open(text string) (_ backend.Grant, minHold time.Duration, of string, _ error) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(raw) == 0 || raw[0] != tokenVersion {
		return backend.Grant{}, 0, "", errForged
	}
	plain, opened := s.open(raw)
	var t sealed
	if !opened || json.Unmarshal(plain, &t) != nil {
		return backend.Grant{}, 0, "", errForged
	}
	return backend.Grant{
		Name: t.Name, Owner: t.Owner, RequestID: t.RequestID, HoldID: backend.HoldID(t.RequestID),
		Kind: t.Kind, Permits: t.Permits, Limit: t.Limit, Hierarchical: t.Hierarchical,
		Token: fencing.Token(t.Token), TTL: t.TTL, Incarnation: t.Incarnation,
	}, t.MinHold, t.Of, nil
}

func (s *Sealer) open(raw []byte) (plain []byte, opened bool) {
	for _, k := range *s.keys.Load() {
		n := k.aead.NonceSize()
		if len(raw) < 1+n {
			return nil, false
		}
		if plain, err := k.aead.Open(nil, raw[1:1+n], raw[1+n:], raw[:1]); err == nil {
			return plain, true
		}
	}
	return nil, false
}

// requestID derives the secret key of an attempt from the parts of the client's request. All replicas derive the same
// key, and nobody without the gateway's key can forge it.
func (s *Sealer) requestID(parts ...string) string {
	all := make([][]byte, len(parts))
	for i, p := range parts {
		all[i] = []byte(p)
	}
	return base64.RawURLEncoding.EncodeToString(macOf(s.ids, all...))
}
