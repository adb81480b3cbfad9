package machine

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fencelock/fencelock/fencing"
)

// samples are log entries with every operation and every field.
func samples() [][]byte {
	limits := DefaultLimits()
	limits.ClientShare = 7
	full := Request{
		Name: "a/b", ID: id("request"), HoldID: "h", Owner: "o", Kind: Shared, Hierarchical: true, MinHold: time.Minute,
		Metadata: map[string]string{"k": "v", "l": "w"},
	}
	some := Request{
		Name: "z", ID: id("request"), Kind: Permits, Permits: 2, Limit: 5, Nonce: fencing.Nonce{1, 2, 3}, HeedsMaxHold: true,
		For: "token:ci",
	}
	s := sid("session")
	batches := []Batch{
		{},
		{At: -1, Commands: []Command{{Op: OpOpenSession, Session: s, TTL: time.Second}}},
		{At: 1 << 60, Commands: []Command{
			{Op: OpOpenSession, Session: s, TTL: time.Second, Client: "me"},
			{
				Op: OpAcquire, Session: s, Seq: 2, Acked: 1, Wait: true,
				Requests: []Request{full, some}, Under: []string{id("parent")},
			},
			{Op: OpCancelWait, Session: s, Seq: 3, Target: 9, Name: "a/b", RequestID: full.ID, Principal: "cert:a"},
			{Op: OpMove, Session: s, Name: "z", RequestID: some.ID},
			{Op: OpRelease, Name: "z", RequestID: some.ID, Token: 1<<63 | 2, Linger: true},
			{Op: OpForceRelease, Name: "a/b", Reason: "r", By: "b"},
			{Op: OpForceRelease, Name: "a/b", Principal: "p", Nonce: fencing.Nonce{7}, Token: 9},
			{Op: OpFree, Name: "a/b", Token: 1},
			{Op: OpExpire, Session: s, Linger: true},
			{Op: OpCloseSession, Session: s},
			{Op: OpSetLimits, Limits: &limits},
			{Op: OpRaiseLevel, Level: 1},
			{Op: OpCheckpoint, Clock: time.Hour, Deadlines: []Deadline{{s, time.Minute}, {s, 1}}},
			{Op: OpRenew, Session: s},
			{Op: OpSetRules, Rules: "allow * read \"\"\n"},
			{Op: OpSetPolicies, Rules: "max-hold=1h,permits=4 z\n"},
			{Op: 999, Ignorable: true, Payload: []byte("what")},
		}},
	}
	var all [][]byte
	for i := range batches {
		all = append(all, AppendBatch(nil, &batches[i]))
	}
	return all
}

func TestBatchSurvivesTheLog(t *testing.T) {
	for _, data := range samples() {
		b, err := DecodeBatch(data)
		if err != nil {
			t.Fatal(err)
		}
		if again := AppendBatch(nil, b); !bytes.Equal(again, data) {
			t.Errorf("%x was read and written as %x", data, again)
		}
		// No prefix decodes.
		for n := range data {
			if _, err := DecodeBatch(data[:n]); err == nil {
				t.Errorf("%d of %d bytes were enough", n, len(data))
			}
		}
	}
	// An unknown operation keeps its frame, and the decoder finds what follows.
	b, err := DecodeBatch(samples()[2])
	if err != nil {
		t.Fatal(err)
	}
	if last := b.Commands[len(b.Commands)-1]; last.Op != 999 || string(last.Payload) != "what" || !last.Ignorable {
		t.Errorf("the unknown operation was read as %+v", last)
	}
	if !reflect.DeepEqual(b.Commands[1].Requests[0].Metadata, map[string]string{"k": "v", "l": "w"}) {
		t.Errorf("metadata %v", b.Commands[1].Requests[0].Metadata)
	}
}

// The log preserves every command that a server can make: an entry that cannot be read stops every replica.
func TestAnyCommandSurvivesTheLog(t *testing.T) {
	text := rapid.OneOf(rapid.Just(""), rapid.String(), rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string {
		return string(b)
	}))
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.MakeCustom[Command](rapid.MakeConfig{Types: map[reflect.Type]*rapid.Generator[any]{
			reflect.TypeFor[string](): text.AsAny(),
		}}).Draw(t, "command")
		if _, known := fieldsOf[c.Op]; !known || rapid.Bool().Draw(t, "known") {
			c.Op = rapid.SampledFrom(worldOps).Draw(t, "op")
		}
		data := AppendBatch(nil, &Batch{Commands: []Command{c}})
		b, err := DecodeBatch(data)
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		if again := AppendBatch(nil, b); !bytes.Equal(again, data) {
			t.Fatalf("%+v was read as %+v", c, b.Commands[0])
		}
		m := newWorld(1)
		m.Apply(1, &b.Commands[0])
		checkState(t, m)
	})
}

func TestGarbageAllocatesLittle(t *testing.T) {
	huge := binary.AppendUvarint(nil, 1<<40)
	begin := []byte{batchVersion, 0}
	request := append([]byte{batchVersion, 0, 1, byte(OpAcquire), 0, 100, 0}, huge...)
	for what, data := range map[string][]byte{
		"commands": append(begin, huge...),
		"payload":  append([]byte{batchVersion, 0, 1, byte(OpFree), 0}, huge...),
		"requests": append(request, make([]byte, 100)...),
	} {
		used := testing.Benchmark(func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := DecodeBatch(data); err == nil {
					b.Fatal("it was taken for a batch")
				}
			}
		})
		if n := used.AllocedBytesPerOp(); n > 64<<10 {
			t.Errorf("%s: %d bytes were allocated for %d", what, n, len(data))
		}
	}
}

// FuzzDecode: accepted input has exactly one encoding; everything else is an error, and nothing panics.
func FuzzDecode(f *testing.F) {
	for _, data := range samples() {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := DecodeBatch(data)
		if err != nil {
			return
		}
		if again := AppendBatch(nil, b); !bytes.Equal(again, data) {
			t.Fatalf("%x was read and written as %x", data, again)
		}
	})
}

// FuzzApply: no entry of a log breaks the machine, and every state can be restored.
func FuzzApply(f *testing.F) {
	for _, data := range samples() {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := DecodeBatch(data)
		if err != nil {
			return
		}
		m := newWorld(64)
		for i := range b.Commands {
			m.Apply(b.At, &b.Commands[i])
			checkState(t, m)
		}
		copied := New(1)
		if err := copied.Restore(bytes.NewReader(snapshot(t, m))); err != nil || copied.Hash() != m.Hash() {
			t.Fatalf("restored to another state; %v", err)
		}
	})
}
