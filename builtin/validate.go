package builtin

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/fencelock/fencelock/backend"
)

// The server judges what it is sent. Before, it has to be sent: text that is not valid UTF-8 does not fit into a message, and
// would break the connection that all calls share.

// validateSet checks what is asked for in one step: one name, or several.
func validateSet(rs []backend.Request) error {
	if len(rs) == 0 {
		return invalidOption("set of names", "of none", "it is empty")
	}
	names := map[string]bool{}
	for i := range rs {
		r, first := &rs[i], &rs[0]
		if err := validate(r); err != nil {
			return err
		}
		if len(rs) == 1 {
			return nil
		}
		switch {
		case names[r.Name]:
			return invalidOption("set of names", fmt.Sprintf("with %q twice", r.Name), "each name is taken once")
		case r.Wait != first.Wait, r.TTL != first.TTL, !slices.Equal(r.Under, first.Under):
			return invalidOption("set of names", fmt.Sprintf("with %q and %q", first.Name, r.Name),
				"the requests of one set agree in Wait, TTL and Under")
		}
		names[r.Name] = true
	}
	return nil
}

func validate(r *backend.Request) error {
	err := cmp.Or(
		backend.ValidateName(r.Name), backend.ValidateRequestID(r.RequestID), validateKind(r), validText("owner", r.Owner),
		validText("hold id", r.HoldID), validateUnder(r.Under),
	)
	for k, v := range r.Metadata {
		err = cmp.Or(err, validText("metadata", k), validText("metadata", v))
	}
	return err
}

func validateKind(r *backend.Request) error {
	permits := r.Kind == backend.KindPermits
	why := ""
	switch {
	case r.Kind > backend.KindPermits:
		return fmt.Errorf("%v: %w", r.Kind, backend.ErrUnsupported)
	case permits && r.Hierarchical:
		return fmt.Errorf("permits of a hierarchical name: %w", backend.ErrUnsupported)
	case permits && (r.Permits < 1 || r.Permits > r.Limit):
		why = "want at least one, and no more than there are"
	case permits && uint64(r.Limit) > math.MaxUint32:
		why = "want a limit below 1<<32"
	case !permits && (r.Permits != 0 || r.Limit != 0):
		why = "the kind of hold is " + r.Kind.String()
	default:
		return nil
	}
	return invalidOption("permits", fmt.Sprintf("%d of %d", r.Permits, r.Limit), why)
}

func validateUnder(under []string) error {
	if len(under) > backend.MaxUnder {
		return invalidOption("number of holds under which a request is made", strconv.Itoa(len(under)),
			fmt.Sprintf("want at most %d", backend.MaxUnder))
	}
	for _, id := range under {
		if err := backend.ValidateRequestID(id); err != nil {
			return err
		}
	}
	return nil
}

func invalidOption(what, value, why string) error {
	return &backend.InvalidError{Kind: backend.ErrInvalidOption, What: what, Value: value, Why: why}
}

func validatePrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	return backend.ValidateName(prefix)
}

func validateReason(reason string) error { return validText("reason", reason) }

func validText(what, text string) error {
	if utf8.ValidString(text) {
		return nil
	}
	return invalidOption(what, strconv.QuoteToASCII(text[:min(len(text), 64)]), "it is not valid UTF-8")
}
