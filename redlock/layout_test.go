package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// A majority with keys of a later layout is refused with both versions, and keeps them as they are.
func TestLaterLayoutIsRefused(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	d, err := opened(t, s.url("", "trust-fresh=true"))
	if err != nil {
		t.Fatal(err)
	}
	for _, wait := range []bool{false, true} {
		r := request(fmt.Sprint("later", wait))
		r.Wait = wait
		each := func(act func(ctx context.Context, c *goredis.Client) error) {
			for i := range s {
				s.admin(t, i, act)
			}
		}
		each(func(ctx context.Context, c *goredis.Client) error {
			return c.HSet(ctx, redisscript.KeysOf("fencelock:", r.Name).Lock, "#", "layout 2").Err()
		})
		_, err := d.Acquire(within(t, 30*time.Second), r)
		if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), `"2", must be 1`) {
			t.Errorf("wait %v: %v", wait, err)
		}
		each(func(ctx context.Context, c *goredis.Client) error {
			keys, err := c.Keys(ctx, "*"+r.Name+"*").Result()
			if len(keys) != 1 {
				t.Errorf("wait %v: a server has %q", wait, keys)
			}
			return err
		})
	}
}
