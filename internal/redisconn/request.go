package redisconn

// This file turns requests of the contract into holds of the script and back: servers get the types of redisscript,
// the core gets those of backend, in the same words from both drivers. The two directions meet in a grant's
// incarnation: it carries the part that the script compares (without the request's id, which the grant has anyway) and
// the metadata, so that a driver needs no memory of its grants.

import (
	"encoding/json"
	"hash/maphash"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// HoldOf returns the hold that a try of client asks for. Its nonce is short, since it travels in every value and
// every push, and of two nonces of one length the greater one is the later one: the script relies on that.
func HoldOf(r backend.Request, client, nonce string) redisscript.Hold {
	h := redisscript.Hold{
		PX:     max(r.TTL, r.MinHold),
		Shared: r.Kind == backend.KindShared, Permits: r.Permits, Limit: r.Limit,
		Client: client, Nonce: nonce, Request: r.RequestID, ID: r.HoldID, Owner: r.Owner,
	}
	if len(r.Metadata) > 0 {
		text, _ := json.Marshal(r.Metadata) // which cannot fail for strings
		h.Metadata = string(text)
	}
	return h
}

// PXOf returns the time to live that a renewal asks for now: the TTL, or the rest of the minimum hold if that is
// more.
func PXOf(g backend.Grant, now backend.Instant) time.Duration {
	if g.MinHoldUntil.IsZero() {
		return g.TTL
	}
	return max(g.TTL, g.MinHoldUntil.Sub(now))
}

// ClosedFor writes for how many milliseconds a name stays closed after its release, for a minimum hold that ends at
// until; a zero until: not at all.
func ClosedFor(until, now backend.Instant) string {
	if until.IsZero() || until <= now {
		return "0"
	}
	return redisscript.Millis(until.Sub(now))
}

// WithMetadata returns the incarnation of h with its metadata, for ValueOf.
func WithMetadata(incarnation string, h redisscript.Hold) string {
	if h.Metadata == "" {
		return incarnation
	}
	return incarnation + metadataMark + h.Metadata
}

// KeyDigits is the length of a key.
const KeyDigits = 13 // base 32, for 64 bits

// AppendKey appends a short name of a secret, the same for each call of one client.
func AppendKey(b []byte, seed maphash.Seed, secret string) []byte {
	return AppendNumber(b, maphash.String(seed, secret), KeyDigits)
}

// AppendNumber appends n in so many digits.
func AppendNumber(b []byte, n uint64, width int) []byte {
	for range width {
		b = append(b, '0')
	}
	for at := len(b) - 1; n > 0; at-- {
		b[at] = "0123456789abcdefghijklmnopqrstuv"[n%32]
		n /= 32
	}
	return b
}

// metadataMark separates the metadata from the rest of an incarnation, which has no newline.
const metadataMark = "\n"

// StartOf is Hold.Start for a grant that came back. It is empty for a grant that names no incarnation of ours, such as
// a grant that Request.Grant made.
func StartOf(g backend.Grant) string {
	if g.Incarnation == "" {
		return ""
	}
	incarnation, _, _ := strings.Cut(g.Incarnation, metadataMark)
	return redisscript.StartOf(incarnation, g.RequestID)
}

// ValueOf is Hold.Value for a grant that came back with an incarnation. Redlock gives it to servers that lack the hold.
func ValueOf(g backend.Grant) string {
	incarnation, metadata, _ := strings.Cut(g.Incarnation, metadataMark)
	shown := redisscript.Hold{ID: g.HoldID, Owner: g.Owner, Metadata: metadata}
	return redisscript.ValueOf(incarnation, g.RequestID, shown)
}

// HolderOf returns one holder. Of the hold it shows the id that is meant to be shown, and no field by which it could
// be moved.
func HolderOf(s redisscript.State) (backend.Holder, error) {
	h := backend.Holder{
		Owner: s.Hold.Owner, HoldID: s.Hold.ID, Permits: s.Hold.Permits, Limit: s.Hold.Limit, ExpiresIn: s.ExpiresIn,
		Nonce: redisscript.NonceOf(s.Hold.Start()),
	}
	switch {
	case s.Hold.Shared:
		h.Kind = backend.KindShared
	case s.Hold.Permits > 0:
		h.Kind = backend.KindPermits
	}
	if s.Hold.Metadata == "" {
		return h, nil
	}
	// Only this package writes it, so that another program has changed an unreadable value.
	if err := json.Unmarshal([]byte(s.Hold.Metadata), &h.Metadata); err != nil {
		return backend.Holder{}, &Failure{Cause: err, Fatal: true}
	}
	return h, nil
}

// HeldError returns the error of an attempt on name, with the holder that blocks it.
func HeldError(name string, s redisscript.State) *backend.HeldError {
	return &backend.HeldError{Name: name, Holder: s.Hold.Owner, HoldID: s.Hold.ID, RetryAfter: s.ExpiresIn}
}

// LossReason distinguishes a hold that expired before now from a hold that ended before its time.
func LossReason(g backend.Grant, now backend.Instant) backend.Reason {
	if now >= g.SentAt.Add(g.TTL) {
		return backend.ReasonExpired
	}
	return backend.ReasonEvicted
}
