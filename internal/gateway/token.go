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
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Sealer turns a grant into the lock token that a client keeps, and back. All replicas of a gateway have the same key,
// so that each of them can renew and release what another one was granted.
type Sealer struct {
	aead cipher.AEAD
	mac  []byte // key for the nonce
	ids  []byte // key for request ids
}

// NewSealer derives what it needs of a secret of at least 16 bytes.
func NewSealer(secret []byte) (*Sealer, error) {
	if len(secret) < MinKeyBytes {
		return nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "key", Value: "of so many bytes", Why: "it needs 16 bytes or more",
		}
	}
	derive := func(purpose string) []byte { return macOf(secret, []byte(purpose)) }
	block, err := aes.NewCipher(derive("fencelock gateway: lock token"))
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	return &Sealer{aead, derive("fencelock gateway: nonce"), derive("fencelock gateway: request id")}, nil
}

// MinKeyBytes is the least length of a gateway's key.
const MinKeyBytes = 16

func macOf(key []byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, p := range parts {
		h.Write(binary.AppendUvarint(nil, uint64(len(p))))
		h.Write(p)
	}
	return h.Sum(nil)
}

// sealed is what a lock token says. It has no instants: those of two processes do not compare.
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
}

// tokenVersion is the first byte of a lock token.
const tokenVersion = 1

// Seal returns the lock token of a grant. The same hold has the same token, whichever replica makes it.
func (s *Sealer) Seal(g *backend.Grant, minHold time.Duration) string {
	plain, err := json.Marshal(sealed{
		g.Name, g.Owner, g.RequestID, g.Kind, g.Permits, g.Limit, g.Hierarchical, uint64(g.Token), g.TTL, g.Incarnation,
		minHold,
	})
	if err != nil {
		panic(err) // text and numbers only
	}
	nonce := macOf(s.mac, plain)[:s.aead.NonceSize()]
	out := append([]byte{tokenVersion}, nonce...)
	return base64.RawURLEncoding.EncodeToString(s.aead.Seal(out, nonce, plain, out[:1]))
}

// errForged: the text is no lock token that was sealed with this key.
var errForged = errors.New("the lock token is not one of this gateway")

// Open is the inverse of Seal. The grant has no SentAt and no MinHoldUntil.
func (s *Sealer) Open(text string) (backend.Grant, time.Duration, error) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	n := s.aead.NonceSize()
	if err != nil || len(raw) < 1+n || raw[0] != tokenVersion {
		return backend.Grant{}, 0, errForged
	}
	plain, err := s.aead.Open(nil, raw[1:1+n], raw[1+n:], raw[:1])
	var t sealed
	if err != nil || json.Unmarshal(plain, &t) != nil {
		return backend.Grant{}, 0, errForged
	}
	return backend.Grant{
		Name: t.Name, Owner: t.Owner, RequestID: t.RequestID, HoldID: backend.HoldID(t.RequestID),
		Kind: t.Kind, Permits: t.Permits, Limit: t.Limit, Hierarchical: t.Hierarchical,
		Token: fencing.Token(t.Token), TTL: t.TTL, Incarnation: t.Incarnation,
	}, t.MinHold, nil
}

// requestID derives the secret key of one attempt at one name from what the client says. The same request at any
// replica is the same attempt, and nobody without the gateway's key can make it up.
func (s *Sealer) requestID(parts ...string) string {
	all := make([][]byte, len(parts))
	for i, p := range parts {
		all[i] = []byte(p)
	}
	return base64.RawURLEncoding.EncodeToString(macOf(s.ids, all...))
}
