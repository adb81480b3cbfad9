package replica

import "testing"

// A follower reaches the end of the acknowledged log, even if an election follows the last command: raft counts the
// first entry of a leader, which the state machine does not get. A backup of a follower waits for that end.
func TestFollowerComesToWhatWasAcknowledgedBeforeAnElection(t *testing.T) {
	t.Parallel()
	peers := group(t, 3, onlyOnDemand)
	peers[0].elect(t, peers[2])
	if err := peers[0].applyOne(t); err != nil {
		t.Fatal(err)
	}
	last := peers[0].State.index.Load()
	eventually(t, "the others have the entry", func() bool {
		return peers[1].raft.LastIndex() == last && peers[2].raft.LastIndex() == last
	})
	term := peers[1].elect(t, peers[2])
	eventually(t, "the entry of the election is committed", func() bool {
		return peers[1].raft.CommitIndex() > last && peers[1].State.index.Load() == last
	})
	c := confirming(t, peers[1], term)
	acknowledged, err := (&Term{replica: peers[1].Replica, number: term, confirmer: c}).acknowledged(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if acknowledged < last {
		t.Errorf("acknowledged up to %d, the last command is entry %d", acknowledged, last)
	}
	for _, p := range peers {
		eventually(t, "the member has it", func() bool { return p.Applied() >= acknowledged })
	}
}
