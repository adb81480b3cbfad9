package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// A key of a later layout is refused with both versions, and stays as it is.
func TestLaterLayoutIsRefused(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	for _, kind := range []backend.Kind{backend.KindExclusive, backend.KindShared, backend.KindPermits} {
		for _, wait := range []bool{false, true} {
			r := request(fmt.Sprint(kind, wait), time.Minute, wait)
			if r.Kind = kind; kind == backend.KindPermits {
				r.Permits, r.Limit = 1, 2
			}
			key := redisscript.KeysOf("fencelock:", r.Name).Lock
			if err := s.admin(t).HSet(t.Context(), key, "#", "layout 2").Err(); err != nil {
				t.Fatal(err)
			}
			_, err := d.Acquire(within(t, 20*time.Second), r)
			if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), `"2", must be 1`) {
				t.Errorf("%v, wait %v: %v", kind, wait, err)
			}
			keys, err := s.admin(t).Keys(t.Context(), "*"+r.Name+"*").Result()
			if err != nil || len(keys) != 1 {
				t.Errorf("%v, wait %v: the server has %q, %v", kind, wait, keys, err)
			}
		}
	}
}
