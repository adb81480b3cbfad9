package lead

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// conn is a listener for tests.
type conn struct{ heard int }

func (c *conn) Hear(*Leadership, machine.SessionID, *machine.Notice) { c.heard++ }

// named is a proposal with a name.
func named(by Listener, name string) Proposal {
	return Proposal{Command: machine.Command{Op: machine.OpRelease, Name: name}, By: by, Done: func(Outcome, error) {}}
}

func namesOf(batch []Proposal) (all []string) {
	for _, x := range batch {
		all = append(all, x.Command.Name)
	}
	return all
}

func TestConnectionsTakeTurns(t *testing.T) {
	t.Parallel()
	a, b := &conn{}, &conn{}
	var l lanes
	for _, x := range []Proposal{
		named(a, "a1"), named(a, "a2"), named(a, "a3"), named(b, "b1"), named(nil, "n1"), named(b, "b2"),
	} {
		if !l.add(x) {
			t.Fatal("refused")
		}
	}
	gone := named(b, "b3")
	gone.Obsolete = func() error { return replica.ErrNotLeader }
	l.add(gone)
	batch, obsolete := l.take()
	if got := namesOf(batch); !slices.Equal(got, []string{"a1", "b1", "n1", "a2", "b2", "a3"}) {
		t.Errorf("the entry has %v", got)
	}
	if len(obsolete) != 1 || obsolete[0].Command.Name != "b3" || !errors.Is(obsolete[0].why, replica.ErrNotLeader) {
		t.Errorf("obsolete: %v", obsolete)
	}
	if l.queued != 0 || len(l.all) != 0 || l.last != nil {
		t.Errorf("left over: %+v", l)
	}
}

// A connection that sends after a flood of others waits for only one command of each, and finds room in the queue.
func TestFloodLeavesRoom(t *testing.T) {
	t.Parallel()
	var l lanes
	flooders := []*conn{{}, {}, {}}
	refused := 0
	for range maxQueued {
		for _, by := range flooders {
			if !l.add(named(by, "flood")) {
				refused++
			}
		}
	}
	if want := (len(flooders) - 1) * maxQueued; refused != want {
		t.Errorf("%d were refused; want %d", refused, want)
	}
	if !l.add(named(&conn{}, "late")) {
		t.Fatal("refused")
	}
	batch, _ := l.take()
	if at := slices.Index(namesOf(batch), "late"); at < 0 || at > len(flooders) {
		t.Errorf("it is number %d of %d", at, len(batch))
	}
}

func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	small := Proposal{Command: machine.Command{Op: machine.OpRelease, Name: "x", RequestID: backend.NewRequestID()}}
	large := Proposal{Command: machine.Command{Op: machine.OpAcquire, Requests: []machine.Request{
		{Metadata: map[string]string{"key": strings.Repeat("x", maxBatchBytes)}},
	}}}
	many := func(x Proposal, n int) (all []Proposal) {
		for range n {
			all = append(all, x)
		}
		return all
	}
	for _, x := range []struct {
		queue []Proposal
		want  int
	}{
		{nil, 0}, {many(small, 3), 3}, {many(small, 2*maxBatch), maxBatch}, {many(large, 3), 1},
		{append(many(small, 5), large), 5},
	} {
		var l lanes
		for _, q := range x.queue {
			l.add(q)
		}
		if got, _ := l.take(); len(got) != x.want || l.queued != len(x.queue)-x.want {
			t.Errorf("%d of %d go into one entry, %d are left; want %d", len(got), len(x.queue), l.queued, x.want)
		}
	}
}
