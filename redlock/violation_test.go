package redlock

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/testfacts"
	"github.com/fencelock/fencelock/internal/testtier"
)

var violationRounds = flag.Int("violations", 0,
	"rounds of each row of TestViolationRate; of rows with restarts a third")

// TestViolationRate measures how often two clients hold a lock at once when what Redlock assumes does not hold. In each
// round a holder takes the lock, then the fault strikes servers chosen at random, then a rival tries; both are sure of
// their grants. The holder was reached by as many servers as the row says when it took the lock.
//
// A row fails for one of three reasons, and says which: two held at once although the row promises that this never
// happens; nobody's lock was ever in doubt although the row is there to show that it is; or a round could not be
// played, because a server did not come back or the holder did not get the lock. The last one says nothing about the
// algorithm.
//
//	go test -run TestViolationRate -v ./redlock -violations 200
func TestViolationRate(t *testing.T) {
	t.Parallel()
	if *violationRounds == 0 {
		if *violationRounds = 3; testtier.Wanted() {
			*violationRounds = 12
		}
	}
	s := start(t, 5)
	for _, row := range []violation{
		{fault: "clock jumps past the TTL on 1 server,  holder had 5 votes", struck: 1, reached: 5, want: never},
		{fault: "clock jumps past the TTL on 2 servers, holder had 5 votes", struck: 2, reached: 5, want: never},
		{fault: "clock jumps past the TTL on 3 servers, holder had 5 votes", struck: 3, reached: 5, want: always},
		{fault: "clock jumps past the TTL on 1 server,  holder had 3 votes", struck: 1, reached: 3, want: sometimes},
		{fault: "clock jumps past the TTL on 2 servers, holder had 3 votes", struck: 2, reached: 3, want: sometimes},
		{
			fault: "1 server restarts empty,  holder had 3 votes, quarantine", struck: 1, reached: 3,
			restart: true, want: never,
		},
		{
			fault: "2 servers restart empty,  holder had 3 votes, quarantine", struck: 2, reached: 3,
			restart: true, want: never,
		},
		{
			fault: "1 server restarts empty,  holder had 3 votes, without", struck: 1, reached: 3,
			restart: true, off: true, want: sometimes,
		},
		{
			fault: "2 servers restart empty,  holder had 3 votes, without", struck: 2, reached: 3,
			restart: true, off: true, want: sometimes,
		},
	} {
		t.Run(row.fault, func(t *testing.T) { row.run(t, s) })
	}
}

// violation is one row: what is broken, and what must come of it.
type violation struct {
	fault   string
	struck  int  // servers, in each round
	reached int  // by the holder
	restart bool // or else the clock jumps
	off     bool // without the quarantine
	want    expectation
}

type expectation int

const (
	never expectation = iota
	sometimes
	always
)

func (v violation) run(t *testing.T, s servers) {
	rounds := *violationRounds
	if v.restart {
		rounds = max(1, rounds/3) // takes long
	}
	both := 0
	for round := range rounds {
		held, err := v.play(t, s, fmt.Sprintf("%s, round %d", t.Name(), round))
		if err != nil {
			t.Fatalf("after %d rounds, %d of them with two holders at once, one could not be played: %v",
				round, both, err)
		}
		if held {
			both++
		}
	}
	testfacts.Write(t, testfacts.Rate{Fault: strings.Join(strings.Fields(v.fault), " "), Times: both, Rounds: rounds})
	t.Logf("%-60s %4d of %d   (%.0f %%)", v.fault, both, rounds, 100*float64(both)/float64(rounds))
	switch {
	case v.want == never && both > 0, v.want == always && both < rounds:
		t.Errorf("two held the lock at once in %d of %d rounds, want that %s", both, rounds,
			map[expectation]string{never: "never", always: "always"}[v.want])
	case v.want == sometimes && rounds >= 30 && both == 0: // by chance once in 10⁸ times
		t.Errorf("in %d rounds two never held the lock at once: the fault does not strike", rounds)
	}
}

// play plays one round and reports whether two held the lock at once. An error says why there was no round.
func (v violation) play(t *testing.T, s servers, name string) (both bool, err error) {
	o := &Options{TrustFresh: true, NodeTimeout: time.Second}
	holder, links := s.linked(t, o)
	rival := s.driver(t, o)
	for _, d := range []*Driver{holder, rival} { // both know all servers
		d.service.quarantine = !v.off
		defer closeSoon(d)
		if err := d.Ping(within(t, 30*time.Second)); err != nil {
			return false, err
		}
	}
	for _, n := range rand.Perm(len(s))[v.reached:] {
		links[n].Refuse()
	}
	first, err := holder.Acquire(within(t, 30*time.Second), long(name))
	if err != nil {
		return false, fmt.Errorf("the holder: %w", err)
	}
	eventually(t, "all servers in reach vote", func() bool { return s.votes(t, name) == v.reached })
	for _, i := range rand.Perm(len(s))[:v.struck] {
		if !v.restart {
			s.expire(t, i, name)
		} else if err := s[i].Restart(within(t, time.Minute)); err != nil {
			return false, fmt.Errorf("server %d does not come back: %w", i, err)
		}
	}
	second, err := rival.Acquire(within(t, 30*time.Second), long(name))
	switch {
	case errors.Is(err, backend.ErrHeld), errors.Is(err, backend.ErrUnavailable):
		return false, nil // enough servers remember the holder, or too few have a vote
	case err != nil:
		return false, fmt.Errorf("the rival: %w", err)
	}
	now := rival.service.clock.Now()
	end := func(g backend.Grant) backend.Instant { return g.SentAt.Add(rival.Describe().Validity(g.TTL)) }
	if now >= end(first) {
		return false, fmt.Errorf("the machine is so slow that the holder's %v were over before the rival's answer",
			first.TTL)
	}
	return now < end(second), nil
}

// long is a request whose lock outlives its round, restarts included.
func long(name string) backend.Request {
	r := request(name)
	r.TTL = 30 * time.Second
	return r
}

// closeSoon closes a driver over links that may be broken: what it cannot give back ends with its TTL.
func closeSoon(d *Driver) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = d.Close(ctx)
}
