package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

func TestErrorsOfTheLibrary(t *testing.T) {
	t.Parallel()
	odd := errors.New("nobody has thought of this")
	for _, test := range []struct {
		call string
		err  error
		want error
	}{
		{"acquire", odd, backend.ErrUnknown},
		{"release", odd, backend.ErrUnknown},
		{"look", odd, backend.ErrUnknown},
		{"acquire", zk.ErrConnectionClosed, backend.ErrUnavailable}, // what was sent, the attempt has marked
		{"release", zk.ErrConnectionClosed, backend.ErrUnknown},
		{"renew", zk.ErrConnectionClosed, backend.ErrUnknown},
		{"release", context.Canceled, backend.ErrUnknown},
		{"acquire", context.Canceled, context.Canceled},
		{"ping", context.DeadlineExceeded, backend.ErrUnavailable},
		{"acquire", fmt.Errorf("%w: %w", errNoConnection, odd), backend.ErrUnavailable},
		{"release", zk.ErrNoAuth, backend.ErrMisconfigured},
		{"acquire", &backend.HistoryError{}, backend.ErrHistoryLost},
	} {
		got := (&Driver{}).callError(test.call, "n", test.err)
		if !errors.Is(got, test.want) || !errors.Is(got, test.err) {
			t.Errorf("%s: %v becomes %v, want %v", test.call, test.err, got, test.want)
		}
		for _, other := range []error{backend.ErrUnknown, backend.ErrUnavailable, backend.ErrMisconfigured} {
			if !errors.Is(test.want, other) && errors.Is(got, other) {
				t.Errorf("%s: %v becomes %v, which is %v, too", test.call, test.err, got, other)
			}
		}
	}
}
