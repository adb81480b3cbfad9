package redisconn

// This file turns requests of the contract into holds of the script and back: servers get the types of
// redisscript, the core gets those of backend, and both drivers say it in the same words. The two directions meet in
// a grant's incarnation: it carries the part that the script compares (without the request's id, which the grant has
// anyway) and the metadata, so that a driver needs no memory of its grants.

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// HoldOf returns the hold that the n-th try of client asks for. Its nonce is short, since it travels in every value and
// every push, and of two nonces of one length the greater one is the later one: the script relies on that.
func HoldOf(r backend.Request, client string, n uint64) redisscript.Hold {
	h := redisscript.Hold{
		PX:     max(r.TTL, r.MinHold),
		Shared: r.Kind == backend.KindShared, Permits: r.Permits, Limit: r.Limit,
		Client: client, Nonce: strconv.FormatUint(n, 36), Request: r.RequestID, ID: r.HoldID, Owner: r.Owner,
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

// Grant is the answer to r, which got the hold h by what was sent at sentAt. A minimum hold counts from now, which is
// not before the server's grant: a minimum may last longer than asked for and never shorter. The incarnation carries
// the metadata along, for ValueOf.
func Grant(r backend.Request, h redisscript.Hold, sentAt, now backend.Instant) backend.Grant {
	g := backend.Grant{
		Name: r.Name, Owner: r.Owner, RequestID: r.RequestID, HoldID: r.HoldID,
		Kind: r.Kind, Permits: r.Permits, Limit: r.Limit,
		TTL: r.TTL, SentAt: sentAt, Incarnation: h.Incarnation(), Nonce: redisscript.NonceOf(h.Start()),
	}
	// ValueOf needs it for servers that lack the hold; no other code reads it.
	if h.Metadata != "" {
		g.Incarnation += metadataMark + h.Metadata
	}
	// Counted from now and not from sentAt, so that the name opens no earlier than the request asked for.
	if r.MinHold > 0 {
		g.MinHoldUntil = now.Add(r.MinHold)
	}
	return g
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

// HolderOf tells about one hold. Of the hold it shows the id that is meant to be shown, and no field by which it could
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
	// Only this package writes it, so that what cannot be read was changed by somebody else.
	if err := json.Unmarshal([]byte(s.Hold.Metadata), &h.Metadata); err != nil {
		return backend.Holder{}, &Failure{Cause: err, Fatal: true}
	}
	return h, nil
}

// HeldError tells an attempt on name who is in its way.
func HeldError(name string, s redisscript.State) *backend.HeldError {
	return &backend.HeldError{Name: name, Holder: s.Hold.Owner, HoldID: s.Hold.ID, RetryAfter: s.ExpiresIn}
}

// LossReason tells a hold that ran out before now from a hold that ended before its time.
func LossReason(g backend.Grant, now backend.Instant) backend.Reason {
	if now >= g.SentAt.Add(g.TTL) {
		return backend.ReasonExpired
	}
	return backend.ReasonEvicted
}
