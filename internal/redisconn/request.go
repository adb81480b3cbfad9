package redisconn

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// maxLimit bounds the permits of a name: the script counts exactly far beyond it.
const maxLimit = 1<<31 - 1

const maxHoldID = 64

// Validate repeats what the core has checked, for those who use a driver directly: a name or an owner with a separator in
// it would not break anything, an empty or endless one would.
func Validate(d backend.Description, r backend.Request) error {
	if err := validateKind(d.Capabilities, r); err != nil {
		return err
	}
	if err := backend.ValidateName(r.Name); err != nil {
		return err
	}
	if err := backend.ValidateRequestID(r.RequestID); err != nil {
		return err
	}
	if err := validateHoldID(r.HoldID); err != nil {
		return err
	}
	if r.Owner != "" {
		if err := backend.ValidateOwner(r.Owner); err != nil {
			return err
		}
	}
	return d.ValidateTTL(r.TTL)
}

// validateHoldID refuses what would be read back as another one. None at all is shown as none.
func validateHoldID(id string) error {
	other := func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_')
	}
	if len(id) <= maxHoldID && !strings.ContainsFunc(id, other) {
		return nil
	}
	return &backend.InvalidError{
		Kind: backend.ErrInvalidOption, What: "hold id", Value: fmt.Sprintf("%.*q", maxHoldID, id),
		Why: fmt.Sprintf("want at most %d characters of A-Z a-z 0-9 - _", maxHoldID),
	}
}

// validateKind refuses kinds that the driver does not have, and numbers of permits that cannot be meant.
func validateKind(can backend.Capabilities, r backend.Request) error {
	need := backend.Capabilities(0)
	switch r.Kind {
	case backend.KindExclusive:
	case backend.KindShared:
		need = backend.CapShared
	case backend.KindPermits:
		need = backend.CapPermits
	default:
		return fmt.Errorf("%v: %w", r.Kind, backend.ErrUnsupported)
	}
	if !can.Has(need) {
		return fmt.Errorf("%v holds: %w", r.Kind, backend.ErrUnsupported)
	}
	if r.Hierarchical {
		return fmt.Errorf("hierarchical names: %w", backend.ErrUnsupported)
	}
	invalid := func(why string) error {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "permits", Value: fmt.Sprintf("%d of %d", r.Permits, r.Limit), Why: why,
		}
	}
	switch {
	case r.Kind != backend.KindPermits && (r.Permits != 0 || r.Limit != 0):
		return invalid("the kind of hold is " + r.Kind.String())
	case r.Kind == backend.KindPermits && (r.Permits < 1 || r.Limit < r.Permits || r.Limit > maxLimit):
		return invalid("want at least 1, and no more than the limit, which is below 2^31")
	}
	return nil
}

// Metadata writes a request's metadata for redisscript.Hold.
func Metadata(r backend.Request) (string, error) {
	if len(r.Metadata) == 0 {
		return "", nil
	}
	text, err := json.Marshal(r.Metadata)
	return string(text), err
}

// Grant is the answer to r, which got the hold h by what was sent at sentAt. A minimum hold counts from now, which is not
// before the server's grant. The incarnation carries the metadata along, for ValueOf.
func Grant(r backend.Request, h redisscript.Hold, sentAt, now backend.Instant) backend.Grant {
	g := backend.Grant{
		Name: r.Name, Owner: r.Owner, RequestID: r.RequestID, HoldID: r.HoldID,
		Kind: r.Kind, Permits: r.Permits, Limit: r.Limit,
		TTL: r.TTL, SentAt: sentAt, Incarnation: h.Incarnation(),
	}
	if h.Metadata != "" {
		g.Incarnation += metadataMark + h.Metadata
	}
	if r.MinHold > 0 {
		g.MinHoldUntil = now.Add(r.MinHold)
	}
	return g
}

// metadataMark separates the metadata from the rest of an incarnation, which has no newline.
const metadataMark = "\n"

// StartOf is Hold.Start for a grant that came back. An empty answer: the grant names no incarnation of ours.
func StartOf(g backend.Grant) string {
	if g.Incarnation == "" {
		return ""
	}
	incarnation, _, _ := strings.Cut(g.Incarnation, metadataMark)
	return redisscript.StartOf(incarnation, g.RequestID)
}

// ValueOf is Hold.Value for a grant that came back with an incarnation.
func ValueOf(g backend.Grant) string {
	incarnation, metadata, _ := strings.Cut(g.Incarnation, metadataMark)
	return redisscript.ValueOf(incarnation, g.RequestID, redisscript.Hold{ID: g.HoldID, Owner: g.Owner, Metadata: metadata})
}

// HolderOf tells about one hold.
func HolderOf(s redisscript.State) (backend.Holder, error) {
	h := backend.Holder{
		Owner: s.Hold.Owner, HoldID: s.Hold.ID, Permits: s.Hold.Permits, ExpiresIn: s.ExpiresIn,
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
	if err := json.Unmarshal([]byte(s.Hold.Metadata), &h.Metadata); err != nil {
		return backend.Holder{}, &Failure{Cause: err, Fatal: true}
	}
	return h, nil
}

// HeldError tells an attempt on name who is in its way.
func HeldError(name string, s redisscript.State) *backend.HeldError {
	return &backend.HeldError{Name: name, Holder: s.Hold.Owner, HoldID: s.Hold.ID, RetryAfter: s.ExpiresIn}
}

// LossReason tells a hold that ran out before now from one that went before its time.
func LossReason(g backend.Grant, now backend.Instant) backend.Reason {
	if now >= g.SentAt.Add(g.TTL) {
		return backend.ReasonExpired
	}
	return backend.ReasonEvicted
}
