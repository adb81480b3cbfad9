package kit

// The check of requests, before anything is sent. The core has checked the same, with the functions of package backend;
// the driver repeats the check for callers without a core, such as the HTTP gateway and the conformance suite.

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/fencelock/fencelock/backend"
)

// Validate refuses an invalid request, or a request that a driver with the description d cannot serve: with
// backend.ErrUnsupported for a missing capability, backend.ErrInvalidName for a bad name, backend.ErrInvalidTTL for a
// bad TTL, and backend.ErrInvalidOption otherwise.
//
//	Name, RequestID, TTL          as the functions of package backend say
//	Owner                         the same, and it may be empty here
//	HoldID                        at most 64 characters of A-Z a-z 0-9 - _
//	Kind, Hierarchical            declared in d.Capabilities; no permits of a path
//	MinHold, Metadata             declared in d.Capabilities
//	Permits, Limit                1 ≤ Permits ≤ Limit < 2^31 for permits, 0 for the other kinds
//	MinHold                       between 0 and d.MaxTTL
//	Under                         at most backend.MaxUnder request ids
//	Metadata                      as backend.ValidateMetadata says
func Validate(d backend.Description, r backend.Request) error {
	err := cmp.Or(
		validateKind(d.Capabilities, r), backend.ValidateName(r.Name), backend.ValidateRequestID(r.RequestID),
		validateHoldID(r.HoldID), validateUnder(r.Under),
	)
	if err == nil && r.Owner != "" {
		err = backend.ValidateOwner(r.Owner)
	}
	if err == nil && len(r.Metadata) > 0 {
		err = backend.ValidateMetadata(r.Metadata)
	}
	if most := d.MaxTTL; err == nil && (r.MinHold < 0 || most > 0 && r.MinHold > most) {
		err = InvalidOption("minimum hold", r.MinHold.String(), fmt.Sprintf("want between 0 and %v", most))
	}
	return cmp.Or(err, d.ValidateTTL(r.TTL))
}

// ValidateSet is Validate for names that are taken in one step: at least one, each once, and all alike in Wait, TTL,
// MinHold and Under. Kinds may differ from name to name.
func ValidateSet(d backend.Description, rs []backend.Request) error {
	if len(rs) == 0 {
		return InvalidOption("set of names", "of none", "it is empty")
	}
	if len(rs) == 1 {
		return Validate(d, rs[0])
	}
	seen := make(map[string]bool, len(rs))
	for _, r := range rs {
		if err := Validate(d, r); err != nil {
			return err
		}
		switch first := rs[0]; {
		case seen[r.Name]:
			return InvalidOption("set of names", fmt.Sprintf("with %q twice", r.Name), "each name is taken once")
		case r.Wait != first.Wait, r.TTL != first.TTL, r.MinHold != first.MinHold, !slices.Equal(r.Under, first.Under):
			return InvalidOption("set of names", fmt.Sprintf("with %q and %q", first.Name, r.Name),
				"the requests of one set agree in Wait, TTL, MinHold and Under")
		}
		seen[r.Name] = true
	}
	return nil
}

// InvalidOption returns a *backend.InvalidError that wraps backend.ErrInvalidOption.
func InvalidOption(what, value, why string) error {
	return &backend.InvalidError{Kind: backend.ErrInvalidOption, What: what, Value: value, Why: why}
}

// ValidateText refuses text that is not valid UTF-8: services store bytes, but messages carry text only.
func ValidateText(what, text string) error {
	if utf8.ValidString(text) {
		return nil
	}
	return InvalidOption(what, strconv.QuoteToASCII(text[:min(len(text), 64)]), "it is not valid UTF-8")
}

// validateKind checks kind, permits and hierarchy, and the capabilities that the request needs. It reports a missing
// capability before invalid values.
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
	if r.Hierarchical {
		need |= backend.CapHierarchy
	}
	if r.MinHold != 0 {
		need |= backend.CapMinHold
	}
	if len(r.Metadata) > 0 {
		need |= backend.CapMetadata
	}
	switch {
	case !can.Has(need):
		return fmt.Errorf("%v hold, which needs %v: %w", r.Kind, can.Missing(need), backend.ErrUnsupported)
	case r.Hierarchical && r.Kind == backend.KindPermits:
		return fmt.Errorf("permits of a hierarchical name: %w", backend.ErrUnsupported)
	}
	why := ""
	switch permits := r.Kind == backend.KindPermits; {
	case !permits && (r.Permits != 0 || r.Limit != 0):
		why = "the kind of hold is " + r.Kind.String()
	case permits && (r.Permits < 1 || r.Limit < r.Permits || r.Limit > math.MaxInt32):
		why = "want at least 1, and no more than the limit, which is below 2^31"
	default:
		return nil
	}
	return InvalidOption("permits", fmt.Sprintf("%d of %d", r.Permits, r.Limit), why)
}

// ValidateForce checks the request of ForceRelease for a driver with the description d: the name, and the texts as
// ValidateText does. Empty texts are allowed. A token needs CapFencing.
func ValidateForce(d backend.Description, r *backend.ForceRequest) error {
	if r.Token != 0 && !d.Capabilities.Has(backend.CapFencing) {
		return fmt.Errorf("force-release of a token: %w", backend.ErrUnsupported)
	}
	return cmp.Or(backend.ValidateName(r.Name), ValidateText("reason", r.Reason), ValidateText("by", r.By),
		ValidateText("principal", r.Principal))
}

// maxHoldID bounds Request.HoldID, in bytes.
const maxHoldID = 64

// validateHoldID refuses hold ids that a driver could not store without escaping. The empty hold id is allowed.
func validateHoldID(id string) error {
	for i := range len(id) {
		c := id[i]
		if i >= maxHoldID ||
			!(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
			return InvalidOption("hold id", fmt.Sprintf("%.*q", maxHoldID, id),
				fmt.Sprintf("want at most %d characters of A-Z a-z 0-9 - _", maxHoldID))
		}
	}
	return nil
}

// validateUnder checks the ids of the holds under which a request is made: each is a request id, and compared as one.
func validateUnder(under []string) error {
	if len(under) > backend.MaxUnder {
		return InvalidOption("number of holds under which a request is made", strconv.Itoa(len(under)),
			fmt.Sprintf("want at most %d", backend.MaxUnder))
	}
	for _, id := range under {
		if err := backend.ValidateRequestID(id); err != nil {
			return err
		}
	}
	return nil
}
