package replica

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

// deaf is a transport that counts messages but does not deliver them.
type deaf struct {
	transport
	sent int
}

func (d *deaf) AppendEntries(
	raft.ServerID, raft.ServerAddress, *raft.AppendEntriesRequest, *raft.AppendEntriesResponse,
) error {
	d.sent++
	return nil
}

func (d *deaf) InstallSnapshot(
	raft.ServerID, raft.ServerAddress, *raft.InstallSnapshotRequest, *raft.InstallSnapshotResponse, io.Reader,
) error {
	d.sent++
	return nil
}

func (d *deaf) RequestVote(
	raft.ServerID, raft.ServerAddress, *raft.RequestVoteRequest, *raft.RequestVoteResponse,
) error {
	d.sent++
	return nil
}

func (d *deaf) RequestPreVote(
	raft.ServerID, raft.ServerAddress, *raft.RequestPreVoteRequest, *raft.RequestPreVoteResponse,
) error {
	d.sent++
	return nil
}

// sendAll sends each kind of message that reason can prevent, and returns the number of sent messages.
func sendAll(t *testing.T, s *silence) int {
	t.Helper()
	d := &deaf{}
	p := newProof(d, s)
	why := s.reason()
	for what, err := range map[string]error{
		"heartbeat": p.AppendEntries("b", "b", &raft.AppendEntriesRequest{Term: 1}, &raft.AppendEntriesResponse{}),
		"snapshot":  p.InstallSnapshot("b", "b", &raft.InstallSnapshotRequest{}, &raft.InstallSnapshotResponse{}, nil),
		"vote":      p.RequestVote("b", "b", &raft.RequestVoteRequest{}, &raft.RequestVoteResponse{}),
		"pre-vote":  p.RequestPreVote("b", "b", &raft.RequestPreVoteRequest{}, &raft.RequestPreVoteResponse{}),
	} {
		if (err == nil) != (why == nil) || err != nil && err.Error() != why.Error() {
			t.Errorf("%s: %v; the reason for silence is %v", what, err, why)
		}
	}
	return d.sent
}

// Every reason to stop sending, in simulated time. All senders check reason.
func TestSilence(t *testing.T) {
	transfer := raft.ErrLeadershipTransferInProgress
	for name, x := range map[string]struct {
		begin, end func(*silence)
		after      time.Duration // it sends until then
		says       string
	}{
		"a write is stuck": {
			begin: func(s *silence) { s.writing.begin() }, end: func(s *silence) { s.writing.end() },
			after: stallAfter, says: "a write to the log",
		},
		"a command comes to no end": {
			begin: func(s *silence) { s.applying.begin() }, end: func(s *silence) { s.applying.end() },
			after: hangAfter, says: "in the state machine",
		},
		"an entry does not land": {
			begin: (*silence).proposed, end: func(s *silence) { s.landed(nil) },
			after: hangAfter, says: "on its way",
		},
		"an entry does not land, and is lost": {
			begin: (*silence).proposed, end: func(s *silence) { s.landed(errors.New("lost")) },
			after: hangAfter, says: "on its way",
		},
		"the second entry does not land": {
			begin: func(s *silence) { s.proposed(); time.Sleep(hangAfter); s.proposed(); s.landed(nil) },
			end:   func(s *silence) { s.landed(nil) },
			after: hangAfter, says: "on its way",
		},
		"nobody takes the leadership over": {
			begin: func(s *silence) { s.proposed(); s.landed(transfer) }, end: func(s *silence) { s.answered(nil) },
			after: hangAfter, says: "handed over",
		},
		"nobody takes the leadership over, and the term ends": {
			begin: func(s *silence) { s.answered(transfer) }, end: (*silence).deposed,
			after: hangAfter, says: "handed over",
		},
		"the log is damaged": {
			begin: func(s *silence) { s.damaged.Store(true) }, after: -1, says: "damaged",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSilence()
				time.Sleep(time.Hour)
				if sendAll(t, s) != 4 {
					t.Error("it is silent for no reason")
				}
				x.begin(s)
				if x.after >= 0 {
					time.Sleep(x.after)
					if sendAll(t, s) != 4 {
						t.Errorf("it is silent too early: %v", s.reason())
					}
					time.Sleep(time.Millisecond)
				}
				if sendAll(t, s) != 0 || !strings.Contains(s.reason().Error(), x.says) {
					t.Errorf("it speaks, or says %v", s.reason())
				}
				if x.end == nil {
					time.Sleep(time.Hour)
					if sendAll(t, s) != 0 {
						t.Error("it speaks again")
					}
					return
				}
				x.end(s)
				if sendAll(t, s) != 4 {
					t.Errorf("it is silent for good: %v", s.reason())
				}
			})
		})
	}
}

// A leadership transfer that never ends is detected even if each answer comes in time.
func TestEndlessTransferIsDetected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSilence()
		for range 4 {
			s.proposed()
			s.landed(raft.ErrLeadershipTransferInProgress)
			time.Sleep(hangAfter / 3)
		}
		if sendAll(t, s) != 0 {
			t.Error("it speaks")
		}
	})
}
