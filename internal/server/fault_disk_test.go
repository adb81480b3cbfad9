package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// onDisk gives a server such a disk.
func onDisk(c *Config, d *serverfault.Disk) {
	c.Rig = &serverfault.Rig{Files: d.Files, Stable: d.Stable, SegmentBytes: 64 << 10}
}

// stopsFor waits until the server has stopped because of its disk, and returns what could not be written.
func stopsFor(t testing.TB, s *Server, want error) string {
	t.Helper()
	select {
	case <-s.Done():
	case <-time.After(patience):
		t.Fatal("it goes on")
	}
	var refused *replica.DiskError
	if !errors.As(s.Err(), &refused) || !errors.Is(s.Err(), want) {
		t.Fatalf("it says %v; want a replica.DiskError with %v", s.Err(), want)
	}
	return refused.What
}

var ailments = map[string]struct {
	ails serverfault.Ailment
	says error
}{
	"full":          {serverfault.Full, syscall.ENOSPC},
	"failing fsync": {serverfault.FailingFsync, syscall.EIO},
}

// If its disk refuses a write, a server stops and acknowledges nothing more. After a restart with a working disk it has
// everything that it acknowledged.
func TestServerStopsWhenItsDiskRefuses(t *testing.T) {
	t.Parallel()
	for name, x := range ailments {
		t.Run(name, func(t *testing.T) {
			d := &serverfault.Disk{}
			config := Config{DataDir: t.TempDir(), Listen: freeport.Addresses(t, 1)[0]}
			onDisk(&config, d)
			s := alone(t, config)
			c := dial(t, s.Addr().String())
			session := c.open(time.Minute)
			id, token := c.hold(session, "x")
			d.Suffer(x.ails)
			refused := <-c.send(acquireOf(session, "y", backend.NewRequestID(), false))
			if refused != nil && refused.GetError() == nil {
				t.Errorf("what is not on the disk is acknowledged: %v", refused)
			}
			stopsFor(t, s, x.says)
			if d.Hits() == 0 {
				t.Error("nothing was refused: nothing is shown")
			}
			d.Suffer(serverfault.Ailment{})
			s = alone(t, config)
			c = dial(t, s.Addr().String())
			if r := c.call(attachOf(session, "", 0)); len(r.GetSession().GetHolds()) == 0 || !r.Renewed {
				t.Fatalf("attach: %v", r)
			}
			if r := c.call(releaseOf(session, "x", id, token)); r.GetDone() == nil {
				t.Errorf("release: %v", r)
			}
			if _, next := c.hold(session, "x"); next <= token {
				t.Errorf("token %d after %d", next, token)
			}
		})
	}
}

// The log makes its files ahead of time: the disk may be full long before a write fails.
func TestServerStopsWhenItsLogCannotGrow(t *testing.T) {
	t.Parallel()
	d := &serverfault.Disk{}
	config := Config{DataDir: t.TempDir(), Listen: freeport.Addresses(t, 1)[0]}
	onDisk(&config, d)
	s := alone(t, config)
	c := dial(t, s.Addr().String())
	session := c.open(time.Minute)
	d.Suffer(serverfault.NoNewFiles)
	acknowledged := uint64(0)
	for i := 0; ; i++ {
		r, ok := <-c.send(acquireOf(session, fmt.Sprint("x/", i), backend.NewRequestID(), false))
		if !ok || r.GetError() != nil {
			break
		}
		acknowledged = r.GetAcquired().GetGrants()[0].Token
	}
	if what := stopsFor(t, s, syscall.ENOSPC); what != "a new file of the log" {
		t.Errorf("%s was refused; want a new file", what)
	}
	if acknowledged == 0 || d.Hits() == 0 {
		t.Error("nothing is shown")
	}
	d.Suffer(serverfault.Ailment{})
	c = dial(t, alone(t, config).Addr().String())
	if _, next := c.hold(c.open(time.Minute), "y"); next <= acknowledged {
		t.Errorf("token %d after %d", next, acknowledged)
	}
}

// A member that cannot note the term of an election, or its vote, does not take part in it, and does not end the
// program around it either.
func TestMemberThatCannotNoteItsTermStops(t *testing.T) {
	t.Parallel()
	for name, x := range ailments {
		t.Run(name, func(t *testing.T) {
			disks := []*serverfault.Disk{{}, {}, {}}
			next := 0
			c := newCluster(t, 3, func(config *Config) {
				config.Rig = &serverfault.Rig{Stable: disks[next].Stable}
				next++
			})
			leader := c.leader()
			one, other := (leader+1)%3, (leader+2)%3
			// A server that knows the leader has voted: the first election writes nothing more.
			c.expectKnown(leader, one)
			c.expectKnown(leader, other)
			disks[one].Suffer(x.ails)
			disks[other].Suffer(x.ails)
			c.stop(leader)
			// The first candidate stops, or its voter; the other member never stands, since nobody would vote for it.
			select {
			case <-c.servers[one].Done():
			case <-c.servers[other].Done():
				one, other = other, one
			case <-time.After(patience):
				t.Fatal("both go on")
			}
			if what := stopsFor(t, c.servers[one], x.says); what != "CurrentTerm" {
				t.Errorf("%s was refused; want %s", what, "CurrentTerm")
			}
			disks[one].Suffer(serverfault.Ailment{})
			disks[other].Suffer(serverfault.Ailment{})
			c.servers[one] = nil
			if err := c.servers[other].Err(); err != nil {
				<-c.servers[other].Done() // before, it has the directory still
				c.servers[other] = nil
				c.start(other)
			}
			c.start(one)
			c.start(leader)
			newCaller(t, c.connect).lock("x")
		})
	}
}

// A server can be started on a disk that refuses: it says so, by an error or by stopping, and does not panic.
func TestStartOnADiskThatRefuses(t *testing.T) {
	t.Parallel()
	for name, x := range ailments {
		t.Run(name, func(t *testing.T) {
			d := &serverfault.Disk{}
			d.Suffer(x.ails)
			config := Config{DataDir: t.TempDir(), Log: quiet(t)}
			onDisk(&config, d)
			s, err := Start(t.Context(), config)
			if err != nil {
				if !errors.Is(err, x.says) {
					t.Errorf("Start says %v; want %v", err, x.says)
				}
				return
			}
			defer s.Close(context.Background())
			stopsFor(t, s, x.says)
		})
	}
}
