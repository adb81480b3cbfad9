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
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

var violationRounds = flag.Int("violations", 0,
	"rounds of each row of TestViolationRate; of rows with restarts a third")

// TestViolationRate measures how often two clients hold a lock concurrently when Redlock's assumptions are violated.
// In each round a holder acquires the lock from the row's number of reachable servers, the fault is injected into
// random servers, and then a rival tries to acquire it.
//
// A row fails for one of three reasons, which it reports: two clients held the lock concurrently although that must
// not happen in the row; they never did although the row must show that they do; or a round failed, because a server
// did not restart or the holder did not get the lock. The last reason is not about the algorithm.
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

// violation is one row: the fault, and the expected result.
type violation struct {
	fault   string
	struck  int  // the number of servers with the fault, in each round
	reached int  // the number of servers that the holder reaches
	restart bool // the fault is a restart; otherwise a clock jump
	off     bool // the quarantine is off
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
	testfindings.Write(t, testfindings.Rate{Fault: strings.Join(strings.Fields(v.fault), " "), Times: both, Rounds: rounds})
	t.Logf("%-60s %4d of %d   (%.0f %%)", v.fault, both, rounds, 100*float64(both)/float64(rounds))
	switch {
	case v.want == never && both > 0, v.want == always && both < rounds:
		t.Errorf("two held the lock at once in %d of %d rounds, want that %s", both, rounds,
			map[expectation]string{never: "never", always: "always"}[v.want])
	case v.want == sometimes && rounds >= 30 && both == 0: // by chance once in 10⁸ runs
		t.Errorf("in %d rounds two never held the lock at once: the fault does not strike", rounds)
	}
}

// play plays one round and reports whether two clients held the lock concurrently. An error is the reason for a failed
// round.
func (v violation) play(t *testing.T, s servers, name string) (both bool, err error) {
	o := &Options{TrustFresh: true, NodeTimeout: time.Second}
	holder, links := s.linked(t, o)
	rival := s.driver(t, o)
	for _, d := range []*Driver{holder, rival} { // both have examined all servers
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
		return false, nil // enough servers still have the holder's vote, or too few may vote
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

// long returns a request whose lock outlives its round, including restarts.
func long(name string) backend.Request {
	r := request(name)
	r.TTL = 30 * time.Second
	return r
}

// closeSoon closes a driver over links that may be broken: holds that it cannot release end with their TTL.
func closeSoon(d *Driver) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = d.Close(ctx)
}
