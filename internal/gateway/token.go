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

// Sealer turns a grant into the lock token that a client keeps, and back. All replicas of a gateway have the same keys,
// so that each of them can renew and release what another one was granted. All methods are safe for concurrent use.
type Sealer struct {
	keys atomic.Pointer[[]sealingKey] // the first one seals, all of them open
	ids  []byte                       // key for request ids, which stays
}

// sealingKey has the keys derived from one secret.
type sealingKey struct {
	aead cipher.AEAD
	mac  []byte // key for the nonce
}

// NewSealer returns a Sealer of secrets of at least MinKeyBytes each. Only request ids are derived from identity,
// unless there are no keys. Identity stays when keys change: with another one the repetition of a request is another
// request.
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

// SetKeys replaces the keys: the first one seals, all of them open.
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

// MinKeyBytes is the minimum length of a gateway's key.
const MinKeyBytes = 16

func macOf(key []byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, p := range parts {
		h.Write(binary.AppendUvarint(nil, uint64(len(p))))
		h.Write(p)
	}
	return h.Sum(nil)
}

// sealed is the content of a lock token. It has no instants: two processes cannot compare theirs.
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

// Seal returns the lock token of a grant. The same hold has the same token, whichever replica with the same first key
// makes it. of is the principal that may use it, empty for everybody with the token.
func (s *Sealer) Seal(g *backend.Grant, minHold time.Duration, of string) string {
	plain, err := json.Marshal(sealed{
		g.Name, g.Owner, g.RequestID, g.Kind, g.Permits, g.Limit, g.Hierarchical, uint64(g.Token), g.TTL, g.Incarnation,
		minHold, of,
	})
	if err != nil {
		panic(err) // text and numbers only
	}
	k := &(*s.keys.Load())[0]
	nonce := macOf(k.mac, plain)[:k.aead.NonceSize()]
	out := append([]byte{tokenVersion}, nonce...)
	return base64.RawURLEncoding.EncodeToString(k.aead.Seal(out, nonce, plain, out[:1]))
}

// errForged: the text is no lock token that was sealed with this key.
var errForged = errors.New("this gateway did not issue the lock token (replicas need the same --http-key)")

// Open is the inverse of Seal. The grant has no SentAt and no MinHoldUntil.
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

// requestID derives the secret key of one attempt at one name from the client's parts. The same request at any
// replica is the same attempt, and nobody without the gateway's key can forge it.
func (s *Sealer) requestID(parts ...string) string {
	all := make([][]byte, len(parts))
	for i, p := range parts {
		all[i] = []byte(p)
	}
	return base64.RawURLEncoding.EncodeToString(macOf(s.ids, all...))
}
