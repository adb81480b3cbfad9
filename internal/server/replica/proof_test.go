package replica

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/hashicorp/raft"
)

// follower answers a leader. Its log ends with last, and matches.
type follower struct {
	transport
	last uint64
}

func (f *follower) AppendEntries(
	_ raft.ServerID, _ raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	*resp = raft.AppendEntriesResponse{Term: req.Term, LastLog: f.last, Success: true}
	for _, e := range req.Entries {
		f.last = max(f.last, e.Index)
	}
	return nil
}

// A leader whose memory and disk went back in time stops before it counts a follower that has more entries of the
// leader's term. If the follower has more entries of an earlier term, the leader continues: the follower is about to
// delete those entries.
func TestRevertedLeaderStops(t *testing.T) {
	t.Parallel()
	var failed error
	f := &follower{last: 9} // of an earlier term
	p := newProof(f, &silence{})
	p.log, p.fatal = slog.New(slog.DiscardHandler), func(err error) { failed = err }
	here := uint64(5)
	term := uint64(3)
	last := func() (uint64, uint64) { return here, term }
	p.last.Store(&last)
	send := func(entries ...*raft.Log) error {
		var resp raft.AppendEntriesResponse
		return p.AppendEntries("f", "", &raft.AppendEntriesRequest{Term: 3, Entries: entries}, &resp)
	}
	if err := send(&raft.Log{Index: 5, Term: 2}); err != nil || failed != nil {
		t.Fatalf("a follower with more of an earlier term: %v, %v", err, failed)
	}
	f.last, here = 5, 6
	for range 3 {
		if err := send(&raft.Log{Index: here, Term: 3}); err != nil || failed != nil {
			t.Fatalf("a follower that keeps up: %v, %v", err, failed)
		}
		here++
	}
	here, term = 6, 4
	if err := send(); err != nil || failed != nil {
		t.Fatalf("it leads no more, and the next leader took entries away: %v, %v", err, failed)
	}
	term = 3
	mark := p.mark()
	if err := send(&raft.Log{Index: 7, Term: 3}); err == nil || failed == nil ||
		!strings.Contains(failed.Error(), "went back in time") {
		t.Errorf("after it went back: %v, stopped by %v", err, failed)
	}
	if p.heardOf("f", 3, mark) {
		t.Error("the follower's word counts")
	}
}
