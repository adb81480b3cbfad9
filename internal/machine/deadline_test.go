package machine

import (
	"bytes"
	"testing"
	"time"
)

// A deadline is in force until anything of its session goes through the log, whatever comes of that.
func TestDeadlines(t *testing.T) {
	r := newRig(t)
	due := func() time.Duration { return r.m.Sessions()[0].Due }
	r.open("a")
	set := Command{
		Op: OpCheckpoint, Clock: time.Minute, Deadlines: []Deadline{{sid("nobody"), 1}, {sid("a"), time.Hour}},
	}
	r.want(set, CodeInvalid) // members of this level do not know it
	first := snapshot(t, r.m)
	if first[len(magic)] != snapshotFirst || due() != 0 {
		t.Errorf("at the first level: a snapshot of version %d, a deadline of %v", first[len(magic)], due())
	}
	r.want(Command{Op: OpRaiseLevel, Level: LevelDeadlines}, CodeOK)
	r.want(Command{Op: OpRenew, Session: sid("nobody")}, CodeNoSession)
	for _, c := range []Command{
		{Op: OpRenew, Session: sid("a")},
		{Op: OpOpenSession, Session: sid("a"), TTL: time.Second},
		{Op: OpAcquire, Session: sid("a")}, // invalid
		{Op: OpRelease, Session: sid("a"), Seq: 1, Name: "x", RequestID: id("r")},
		{Op: OpRelease, Session: sid("a"), Seq: 1, Name: "x", RequestID: id("r")}, // repeated
	} {
		r.want(set, CodeOK)
		if due() != time.Hour || r.m.Clock() != time.Minute {
			t.Fatalf("due at %v, the clock is at %v", due(), r.m.Clock())
		}
		other := New(1)
		if err := other.Restore(bytes.NewReader(snapshot(t, r.m))); err != nil {
			t.Fatal(err)
		}
		if other.Clock() != time.Minute || other.Sessions()[0].Due != time.Hour {
			t.Errorf("a snapshot has %v and %v", other.Clock(), other.Sessions())
		}
		if r.m.Apply(0, &c); due() != 0 {
			t.Errorf("%+v leaves the deadline", c)
		}
	}
	r.want(Command{Op: OpCheckpoint, Deadlines: []Deadline{{sid("a"), 0}}}, CodeInvalid)
	r.want(Command{Op: OpCheckpoint, Clock: -1}, CodeInvalid)
	r.want(Command{Op: OpRenew}, CodeInvalid)
}
