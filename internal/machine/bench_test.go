package machine

import (
	"bytes"
	"fmt"
	"io"
	"testing"
	"time"
)

// filled returns a machine with that many locks held, in sessions of 100 each.
func filled(b *testing.B, locks int) *Machine {
	m := New(1 << 16)
	for i := range locks {
		s := sid(fmt.Sprint(i / 100))
		m.Apply(1, &Command{Op: OpOpenSession, Session: s, TTL: time.Second})
		c := Command{Op: OpAcquire, Session: s, Requests: []Request{{
			Name: fmt.Sprintf("filler/%d", i), ID: fmt.Sprintf("request-%016d", i), Owner: "host/1234/abcd",
		}}}
		if r, _ := m.Apply(1, &c); r.Code != CodeGranted {
			b.Fatalf("code %d", r.Code)
		}
	}
	m.Apply(1, &Command{Op: OpOpenSession, Session: sid("bench"), TTL: time.Second})
	return m
}

// One operation is an acquire and a release of a free name, through the log's encoding and beside 100,000 other locks.
func BenchmarkAcquireRelease(b *testing.B) {
	m := filled(b, 100_000)
	var buf []byte
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		name, request := fmt.Sprintf("orders/%d", i%1000), fmt.Sprintf("request-%016d", i)
		seq := uint64(2*i + 1)
		buf = AppendBatch(buf[:0], &Batch{At: 1, Commands: []Command{
			{
				Op: OpAcquire, Session: sid("bench"), Seq: seq, Acked: seq - 1, Wait: true,
				Requests: []Request{{Name: name, ID: request, Owner: "host/1234/abcd"}},
			},
			{Op: OpRelease, Session: sid("bench"), Seq: seq + 1, Acked: seq, Name: name, RequestID: request},
		}})
		batch, err := DecodeBatch(buf)
		if err != nil {
			b.Fatal(err)
		}
		for j := range batch.Commands {
			if r, _ := m.Apply(batch.At, &batch.Commands[j]); r.Code > CodeGranted {
				b.Fatalf("code %d", r.Code)
			}
		}
	}
}

// One operation is a release that hands the name to the first of many waiters, and a new place at the end of the queue.
func BenchmarkHandOff(b *testing.B) {
	for _, waiters := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprint(waiters), func(b *testing.B) {
			m := filled(b, 0)
			limits := DefaultLimits()
			limits.WaitersPerName = waiters + 1
			m.Apply(1, &Command{Op: OpSetLimits, Limits: &limits})
			request := func(i int) string { return fmt.Sprintf("request-%016d", i) }
			acquire := func(i int) {
				m.Apply(1, &Command{Op: OpAcquire, Session: sid("bench"), Wait: true, Requests: []Request{{
					Name: "hot", ID: request(i),
				}}})
			}
			for i := range waiters + 1 {
				acquire(i)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				acquire(i + waiters + 1)
				r, notices := m.Apply(1, &Command{Op: OpRelease, Name: "hot", RequestID: request(i)})
				if r.Code != CodeOK || len(notices) != 2 {
					b.Fatalf("code %d, %d notices", r.Code, len(notices))
				}
			}
		})
	}
}

// One operation is the time for which the start of a snapshot delays Apply.
func BenchmarkFreeze(b *testing.B) {
	m := filled(b, 100_000)
	b.ReportAllocs()
	for b.Loop() {
		m.Freeze()
	}
}

func BenchmarkWriteSnapshot(b *testing.B) {
	f := filled(b, 100_000).Freeze()
	b.ReportAllocs()
	for b.Loop() {
		n, _ := f.WriteTo(io.Discard)
		b.ReportMetric(float64(n), "bytes")
	}
}

func BenchmarkRestore(b *testing.B) {
	data := snapshot(b, filled(b, 100_000))
	m := New(1)
	b.ReportAllocs()
	for b.Loop() {
		if err := m.Restore(bytes.NewReader(data)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkList(b *testing.B) {
	m := filled(b, 100_000)
	for b.Loop() {
		m.List("", "filler/5", 1000)
	}
}
