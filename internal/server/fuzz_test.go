package server

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
)

// Whatever a client asks is answered, once, and the server goes on. What becomes a command is the same on every member.
func FuzzRequest(f *testing.F) {
	s := start(f, Config{MinTTL: time.Millisecond})
	eventually(f, "it leads", s.Leads)
	c := attach(f, s)
	session := c.open(longTTL)
	for _, q := range []*lockpb.Request{
		acquireOf(session, "x", backend.NewRequestID(), true), releaseOf(session, "x", backend.NewRequestID(), 1),
		keepAliveOf(session), attachOf(session, "", 3), holderOf("x"), watchOf("x", true, 0),
		openOf(sessionID(), time.Minute), {Session: session, Call: &lockpb.Request_Move{Move: &lockpb.Move{Name: "x"}}},
		{Session: session, Call: &lockpb.Request_CancelWait{CancelWait: &lockpb.CancelWait{Name: "x"}}},
		{Session: session, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}},
		{Call: &lockpb.Request_ForceRelease{ForceRelease: &lockpb.ForceRelease{Name: "x"}}},
		{Call: &lockpb.Request_List{List: &lockpb.List{Prefix: "x"}}},
		{Session: session, Sequence: 1, Call: &lockpb.Request_AcquireAll{AcquireAll: &lockpb.AcquireAll{
			Requests: []*lockpb.Acquire{
				{Name: "a/b", Kind: lockpb.Kind_KIND_SHARED, Hierarchical: true}, {Name: "y", Kind: 9},
			},
		}}},
	} {
		data, err := proto.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		q := &lockpb.Request{}
		if proto.Unmarshal(data, q) != nil {
			return
		}
		if a := q.GetAcquireAll().GetRequests(); q.GetAcquire() != nil {
			a = append(a, q.GetAcquire())
			sameCommand(t, a, q.GetAcquire().GetUnder())
		} else {
			sameCommand(t, a, q.GetAcquireAll().GetUnder())
		}
		if _, err := c.try(q); err != nil {
			t.Fatalf("%v is answered with %v; the server: %v", q, err, s.Err())
		}
	})
}

func sameCommand(t *testing.T, all []*lockpb.Acquire, under []string) {
	command, err := acquireCommand(all, under)
	if err != nil {
		return
	}
	entry := machine.AppendBatch(nil, &machine.Batch{Commands: []machine.Command{command}})
	batch, err := machine.DecodeBatch(entry)
	if err != nil || !bytes.Equal(machine.AppendBatch(nil, batch), entry) {
		t.Errorf("%+v is read as %+v, %v", command, batch, err)
	}
}
