package guardtest

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"sync/atomic"

	"github.com/fencelock/fencelock/fencing"
)

var writeClauses = []Clause{
	{
		ID: "W1", Group: "write", Slug: "refused-writes-nothing", needs: needWrite, run: refusedWritesNothing,
		Rule: "a refused write changes nothing",
	},
	{
		ID: "W2", Group: "write", Slug: "never-goes-back", needs: needWrite, run: neverGoesBack,
		Rule: "with concurrent writers, a read never returns a value of a lower token than an earlier write or read",
	},
}

func refusedWritesNothing(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	must := func(c *Client, token fencing.Token) {
		if err := t.write(c, t.claim(name, token), token.String()); err != nil {
			t.fatalf("write with token %v = %v, want it admitted", token, err)
		}
	}
	must(a, 33)
	must(a, 33)
	must(b, 34)
	for token, reason := range map[fencing.Token]error{
		33: fencing.ErrStale, 0: fencing.ErrNoToken, fencing.Token(99).NotExclusive(): fencing.ErrNotExclusive,
	} {
		if err := t.write(a, t.claim(name, token), "refused"); !errors.Is(err, reason) {
			t.errorf("write with token %v = %v, want an error that is %q", token, err, reason)
		}
		if value := t.read(b, name); value != "34" {
			t.errorf("after a write with token %v the value is %q, want %q", token, value, "34")
		}
	}
	if err := t.write(b, t.claim(name, 34), "34"); err != nil {
		t.errorf("write with token 34 again = %v, want it admitted", err)
	}
}

func neverGoesBack(t *trial) {
	const writers, writes = 6, 50
	name := t.resource()
	var known atomic.Uint64 // the highest token written or read
	var left atomic.Int64
	left.Store(writers * writes)
	look := func(c *Client) {
		floor := known.Load()
		text, err := c.Read(t.ctx, name)
		if err != nil {
			t.errorf("read %q: %v", name, err)
			return
		}
		if text == "" && floor == 0 {
			return
		}
		value, err := strconv.ParseUint(text, 10, 63)
		if err != nil || value < floor {
			t.errorf("the value is %q after %d (%v)", text, floor, err)
			return
		}
		raise(&known, value)
	}
	t.together(writers+1, func(c *Client) {
		for !t.failed() {
			n := left.Add(-1)
			if n < 0 {
				return
			}
			if n%4 == 0 {
				look(c)
				continue
			}
			floor := known.Load()
			token := fencing.Token(max(1, floor+rand.Uint64N(6)-min(floor, 2)))
			switch err := t.write(c, t.claim(name, token), token.String()); {
			case err == nil:
				if uint64(token) < floor {
					t.errorf("a write with token %v was admitted after %d", token, floor)
				}
				raise(&known, uint64(token))
			case !errors.Is(err, fencing.ErrStale):
				t.errorf("write with token %v = %v, want it admitted or ErrStale", token, err)
			}
		}
	})
	if t.failed() {
		return
	}
	c := t.client()
	look(c)
	t.agree(c, name, "after all writes")
}

// agree reports an error unless the value belongs to the guard's highest token, and returns the token. A killed
// process's last request may take effect after its death, so the guard's highest token must be the same before and
// after the value is read; otherwise agree retries.
func (t *trial) agree(c *Client, name, when string) fencing.Token {
	for {
		before := t.highest(c, name)
		value := t.read(c, name)
		if after := t.highest(c, name); after != before {
			continue
		}
		if value != before.String() {
			t.errorf("%s: the value is of token %q, the guard remembers %v", when, value, before)
		}
		return before
	}
}
