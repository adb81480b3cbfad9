package server

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
)

// One member's state is changed behind its back. It says so, and the others do not.
func TestMemberThatDiffersSaysSo(t *testing.T) {
	t.Parallel()
	var logged [3]atomic.Int64
	i := 0
	c := newCluster(t, 3, func(c *Config) {
		calm(c) // the odd one is not to lead
		c.compareEvery = 20 * time.Millisecond
		c.Log = slog.New(listening{slog.DiscardHandler, "state differs from the leader's", &logged[i]})
		i++
	})
	x := newCaller(t, c.connect)
	compared := func(what string, as func(i int, agreed, differs uint64) bool) {
		t.Helper()
		eventually(t, what, func() bool {
			x.unlock(x.lock("x")) // so that there is something to compare
			for i, s := range c.servers {
				if is := s.replica.Status(); !as(i, is.Agreed, is.Differs) {
					return false
				}
			}
			return true
		})
	}
	compared("all agree", func(_ int, agreed, _ uint64) bool { return agreed > 0 })
	for i, s := range c.servers {
		if differs := s.replica.Status().Differs; differs != 0 || logged[i].Load() != 0 {
			t.Errorf("server %d differs after entry %d", i, differs)
		}
	}

	odd := (c.leader() + 1) % 3
	c.servers[odd].replica.State.Machine.Apply(0,
		&machine.Command{Op: machine.OpOpenSession, Session: machine.SessionID{1}, TTL: time.Hour})
	compared("one differs", func(i int, _, differs uint64) bool { return i != odd || differs > 0 })
	for i, s := range c.servers {
		if differs := s.replica.Status().Differs; (differs != 0) != (i == odd) ||
			(logged[i].Load() == 1) != (i == odd) {
			t.Errorf("server %d differs after entry %d and reported it %d times; the odd server is %d",
				i, differs, logged[i].Load(), odd)
		}
	}
	for i, s := range c.servers {
		if is := s.Measure(); (is.DiffersIndex == 0) != (i != odd) || is.AgreedIndex == 0 {
			t.Errorf("server %d, the odd one is %d: %+v", i, odd, is)
		}
	}
	status, err := (&admin{server: c.servers[odd]}).Status(t.Context(), nil)
	if err != nil || status.DiffersIndex == 0 || status.AgreedIndex == 0 {
		t.Errorf("its status: %v, %v", status, err)
	}
}
