package builtin

import (
	"errors"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

func TestEveryCodeHasAnError(t *testing.T) {
	t.Parallel()
	want := map[lockpb.Code]error{
		lockpb.Code_CODE_UNSPECIFIED:    backend.ErrUnknown,
		lockpb.Code_CODE_HELD:           backend.ErrHeld,
		lockpb.Code_CODE_NOT_HELD:       backend.ErrNotHeld,
		lockpb.Code_CODE_SESSION_ENDED:  engine.ErrNoSession,
		lockpb.Code_CODE_NOT_LEADER:     backend.ErrUnavailable,
		lockpb.Code_CODE_UNAVAILABLE:    backend.ErrUnavailable,
		lockpb.Code_CODE_UNKNOWN:        backend.ErrUnknown,
		lockpb.Code_CODE_DEADLOCK:       backend.ErrDeadlock,
		lockpb.Code_CODE_LIMIT_MISMATCH: backend.ErrLimitMismatch,
		lockpb.Code_CODE_INVALID:        backend.ErrInvalidOption,
		lockpb.Code_CODE_EXHAUSTED:      backend.ErrUnavailable,
		lockpb.Code_CODE_COMPACTED:      backend.ErrCompacted,
		lockpb.Code_CODE_UNSUPPORTED:    backend.ErrUnsupported,
		lockpb.Code_CODE_DENIED:         backend.ErrDenied,
		lockpb.Code_CODE_CONFLICT:       errConflict,
		lockpb.Code_CODE_CANCELLED:      backend.ErrUnavailable,
		lockpb.Code_CODE_STALE:          backend.ErrUnavailable,
	}
	for number := range lockpb.Code_name {
		code := lockpb.Code(number)
		err := replyError(&lockpb.Error{Code: code})
		n := 0
		for _, class := range []error{
			backend.ErrHeld, backend.ErrNotHeld, backend.ErrUnavailable, backend.ErrUnknown, backend.ErrDeadlock,
			backend.ErrLimitMismatch, backend.ErrInvalidOption, backend.ErrCompacted, backend.ErrUnsupported,
			backend.ErrMisconfigured, backend.ErrDenied, engine.ErrNoSession, errConflict,
		} {
			if errors.Is(err, class) {
				n++
			}
		}
		if want[code] == nil || !errors.Is(err, want[code]) || n != 1 {
			t.Errorf("%v becomes %v, want %v alone", code, err, want[code])
		}
	}
	err := replyError(&lockpb.Error{Code: lockpb.Code_CODE_EXHAUSTED, Field: "holds"})
	if limit := (*LimitError)(nil); !errors.As(err, &limit) || limit.Limit != "holds" {
		t.Errorf("an exceeded limit becomes %v", err)
	}
	err = replyError(&lockpb.Error{Code: lockpb.Code_CODE_EXHAUSTED, Field: "waiters-per-name"})
	if !errors.Is(err, backend.ErrQueueFull) || errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("a full queue becomes %v", err)
	}
	for field, kind := range map[string]error{
		"ttl": backend.ErrInvalidTTL, "TTL": backend.ErrInvalidTTL, "Name": backend.ErrInvalidName, "Owner": backend.ErrInvalidOption,
	} {
		if err := replyError(&lockpb.Error{Code: lockpb.Code_CODE_INVALID, Field: field}); !errors.Is(err, kind) {
			t.Errorf("invalid %s becomes %v, want %v", field, err, kind)
		}
	}
}
