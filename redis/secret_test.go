package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

// Looks at a lock show the hold's id, and never the key that moves the hold.
func TestShowsNoKeys(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	holder, other := s.open(t), s.open(t)
	for name, kind := range map[string]func(backend.Request) backend.Request{
		"exclusive": func(r backend.Request) backend.Request { return r },
		"shared":    reading,
		"permits":   func(r backend.Request) backend.Request { return taking(r, 2, 2) },
	} {
		r := kind(request(name, 10*time.Second, false))
		r.HoldID, r.Owner, r.Metadata = "shown-to_all", "owner|with\"marks", map[string]string{"a": "|"}
		g := mustAcquire(t, holder, r)
		if g.HoldID != r.HoldID {
			t.Errorf("%s: granted as %q", name, g.HoldID)
		}
		state, err := other.Look(within(t, 30*time.Second), name)
		if err != nil || len(state.Holders) != 1 || state.Holders[0].HoldID != r.HoldID ||
			state.Holders[0].Owner != r.Owner || state.Holders[0].Metadata["a"] != "|" {
			t.Errorf("%s: %+v, %v", name, state, err)
		}
		rival := request(name, time.Minute, false)
		if name == "permits" {
			rival = taking(rival, 1, 2)
		}
		_, err = other.Acquire(within(t, 30*time.Second), rival)
		var refused *backend.HeldError
		if !errors.As(err, &refused) || refused.HoldID != r.HoldID || refused.Holder != r.Owner {
			t.Errorf("%s: a rival gets %+v", name, refused)
		}
		if text := fmt.Sprintf("%+v %v %#v", state, err, refused); strings.Contains(text, r.RequestID) {
			t.Errorf("%s: the key is shown: %s", name, text)
		}
		// Neither the visible id nor the key of another hold moves the hold: a late release affects only the attempt for
		// which it was sent.
		for _, key := range []string{r.HoldID + "-padding-", backend.NewRequestID(), r.RequestID[:31] + "x"} {
			foreign := r
			foreign.RequestID = key
			if err := other.Release(within(t, 30*time.Second), foreign.Grant()); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("%s: release with %q: %v", name, key, err)
			}
		}
		mustRelease(t, holder, g)
	}
	nothingLeft(t, s)
}

// A hold id that could be parsed as another one is refused, and so are invalid clients.
func TestRefusedInput(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	r := request("n", time.Minute, false)
	for _, id := range []string{"a|b", "a\nb", "ä", strings.Repeat("x", 65)} {
		r.HoldID = id
		_, err := s.open(t).Acquire(within(t, 30*time.Second), r)
		refused(t, fmt.Sprintf("hold id %q", id), err)
	}
	for name, client := range map[string]goredis.UniversalClient{
		"nil": nil, "nil client": (*goredis.Client)(nil), "nil cluster client": (*goredis.ClusterClient)(nil),
		"nil ring": (*goredis.Ring)(nil),
	} {
		d := New(client, nil)
		ctx := within(t, 30*time.Second)
		r := request("n", time.Minute, true)
		_, acquire := d.Acquire(ctx, r)
		_, all := d.AcquireAll(ctx, []backend.Request{r})
		_, look := d.Look(ctx, "n")
		for call, err := range map[string]error{
			"acquire": acquire, "acquire all": all, "look": look, "ping": d.Ping(ctx),
			"release": d.Release(ctx, r.Grant()), "renew": d.Renew(ctx, []backend.Grant{r.Grant()})[0].Err,
		} {
			refused(t, name+", "+call, err)
		}
		if err := d.Close(ctx); err != nil {
			t.Errorf("%s: close: %v", name, err)
		}
	}
}

func refused(t *testing.T, what string, err error) {
	t.Helper()
	var invalid *backend.InvalidError
	if !errors.As(err, &invalid) || !errors.Is(err, backend.ErrInvalidOption) || strings.Contains(err.Error(), "%!") {
		t.Errorf("%s: %v, want an InvalidError", what, err)
	}
}

// A renewal for less than the remaining time of a hold of any kind changes nothing, and neither does a repeated
// acquire.
func TestRenewalsNeverShorten(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	for name, kind := range map[string]func(backend.Request) backend.Request{
		"exclusive": func(r backend.Request) backend.Request { return r },
		"shared":    reading,
		"permits":   func(r backend.Request) backend.Request { return taking(r, 1, 2) },
	} {
		r := kind(request(name, time.Minute, false))
		g := mustAcquire(t, d, r)
		lives := func(when string) {
			t.Helper()
			state, err := d.Look(within(t, 30*time.Second), name)
			if err != nil || len(state.Holders) != 1 || state.Holders[0].ExpiresIn < 30*time.Second {
				t.Errorf("%s: %s: %+v, %v", name, when, state, err)
			}
		}
		short := g
		short.TTL = time.Second
		if answer := d.Renew(within(t, 30*time.Second), []backend.Grant{short})[0]; answer.Err != nil ||
			answer.TTL != short.TTL {
			t.Errorf("%s: renewed for less: %+v", name, answer)
		}
		lives("renewed for less")
		again := r
		again.TTL, again.Fresh = time.Second, false
		g = mustAcquire(t, d, again)
		lives("acquired again for less")
		mustRelease(t, d, g)
	}
	nothingLeft(t, s)
}
