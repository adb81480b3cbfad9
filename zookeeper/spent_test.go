package zookeeper_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/adler32"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/conformance/containers"
)

// counted is a snapshot, in the servers' format, in which the nodes of some names have counted so many entries. They
// are no containers, which a server would remove before the test uses them on a busy machine.
func counted(counts map[string]int32) containers.Option { return countedFrom(100, counts) }

// countedFrom is counted, where the last transaction has a zxid.
func countedFrom(zxid int64, counts map[string]int32) containers.Option {
	var b bytes.Buffer
	put := func(fields ...any) {
		for _, f := range fields {
			_ = binary.Write(&b, binary.BigEndian, f)
		}
	}
	node := func(path, data string, cversion int32) {
		const everyone = int64(-1) // the ACL
		put(int32(len(path)), []byte(path), int32(len(data)), []byte(data), everyone)
		// Zxids and times of creation and change, versions of data, children and ACL, owner, zxid of the children.
		put(int64(1), int64(1), int64(1), int64(1), int32(0), cversion, int32(0), int64(0), int64(1))
	}
	put([]byte("ZKSN"), int32(2), int64(-1), int32(0), int32(0)) // header, no sessions, no ACLs
	node("", "", 2)
	node("/zookeeper", "", 1)
	node("/zookeeper/quota", "", 0)
	node(rootNode, `{"fencelock_space":"zookeeper-of-the-snapshot"}`, int32(len(counts)))
	for name, count := range counts {
		node(rootNode+"/lock:"+escaped(name), "", count)
	}
	put(int32(1), []byte("/"))
	put(int64(adler32.Checksum(b.Bytes())), int32(1), []byte("/"))
	return containers.Files(map[string][]byte{fmt.Sprintf("version-2/snapshot.%x", zxid): b.Bytes()})
}

// TestCountNearItsEnd begins near the bounds of the number that the server gives to entries: where this driver stops
// to hold, and where the server stops to count and gives the same number to every entry.
func TestCountNearItsEnd(t *testing.T) {
	t.Parallel()
	const few, bound, end = 20, 1 << 30, math.MaxInt32
	server := containers.ZooKeeper(t, counted(map[string]int32{
		"bound": bound - few, "end": end - few, "mixed": end - few,
		"held": bound - 1, "read": bound - 1, "other": end, "foreign": end,
	}))
	for _, name := range []string{"bound", "end", "mixed"} {
		t.Run("contended-"+name, func(t *testing.T) {
			t.Parallel()
			contendAtTheEnd(t, server, name)
		})
	}
	t.Run("waits-for-a-hold-below-the-bound", func(t *testing.T) {
		t.Parallel()
		d, rival := driver(t, server.Addr()), driver(t, server.Addr())
		held := take(t, d, request("held", false))
		if _, err := rival.Acquire(soon(t, 20*time.Second), request("held", false)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("an attempt with a number above the bound = %v, want ErrHeld", err)
		}
		got := make(chan backend.Grant, 1)
		go func() { got <- take(t, rival, request("held", true)) }()
		stands(t, d, "held", 1, 1)
		release(t, d, held)
		g := <-got
		if g.Token <= held.Token {
			t.Errorf("token %v after %v", g.Token, held.Token)
		}
		if node, _, _ := strings.Cut(g.Incarnation, "/"); !strings.HasSuffix(node, ".0000000000") {
			t.Errorf("the node is %q, want the number to begin anew", node)
		}
		release(t, rival, g)
	})
	t.Run("readers-wait-for-a-reader-below-the-bound", func(t *testing.T) {
		t.Parallel()
		d := driver(t, server.Addr())
		held := take(t, d, reader("read", false))
		_, err := d.Acquire(soon(t, 20*time.Second), reader("read", false))
		var by *backend.HeldError
		if !errors.As(err, &by) || by.HoldID != held.HoldID {
			t.Errorf("a reader's attempt with a number above the bound = %v, want a HeldError with the first", err)
		}
		release(t, d, held)
		release(t, d, take(t, d, reader("read", false)))
	})
	t.Run("never-beside-another-clients-holder", func(t *testing.T) {
		t.Parallel()
		neverBesideAtTheEnd(t, server)
	})
	t.Run("a-foreign-node-is-named", func(t *testing.T) {
		t.Parallel()
		newAdmin(t, server.Addr()).create(t, rootNode+"/lock:foreign/left")
		_, err := driver(t, server.Addr()).Acquire(soon(t, 20*time.Second), request("foreign", true))
		if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), rootNode+"/lock:foreign/left") {
			t.Errorf("Acquire = %v, want ErrMisconfigured with the node to delete", err)
		}
	})
}

// contendAtTheEnd lets several clients contend across the end, and has the suite's checker judge.
func contendAtTheEnd(t *testing.T, server *containers.ZooKeeperServer, name string) {
	recorder := check.NewRecorder(check.Options{})
	const clients, workers, rounds = 3, 4, 12
	var all sync.WaitGroup
	for range clients {
		locks, err := fencelock.ForCorrectness(driver(t, server.Addr()), nil)
		if err != nil {
			t.Fatal(err)
		}
		for range workers {
			all.Go(func() {
				l := recorder.Wrap(backend.NewRequestID(), locks)
				opts := []fencelock.AcquireOption{fencelock.TTL(longTTL)}
				for n := range rounds {
					if name == "mixed" && n%2 == 0 {
						opts = append(opts[:1], fencelock.Shared())
					} else {
						opts = opts[:1]
					}
					held, err := l.Acquire(soon(t, time.Minute), name, opts...)
					if err != nil {
						t.Errorf("Acquire = %v", err)
						return
					}
					time.Sleep(time.Millisecond) // a holder works
					if err := held.Release(soon(t, 20*time.Second)); err != nil {
						t.Errorf("Release = %v", err)
					}
				}
			})
		}
	}
	all.Wait()
	report := check.Verify(t.Context(), recorder.History(), check.Rules{Fencing: true, TTL: longTTL})
	for _, v := range report.Violations {
		t.Error(v)
	}
	if n := report.Figures.Grants; n != clients*workers*rounds {
		t.Errorf("%d grants, want %d", n, clients*workers*rounds)
	}
}

// neverBesideAtTheEnd has a client that knows no bound hold with the last number. Of all attempts half have a smaller
// request id, by which entries of one number would be in order.
func neverBesideAtTheEnd(t *testing.T, server *containers.ZooKeeperServer) {
	const other = rootNode + "/lock:other/77777777777777777777777777777777.2147483647"
	old := newAdmin(t, server.Addr())
	text := []byte(`{"fencelock":1,"hold":"old"}`)
	if _, err := old.Create(other, text, zk.FlagEphemeral, zk.WorldACL(zk.PermAll)); err != nil {
		t.Fatal(err)
	}
	d := driver(t, server.Addr())
	ctx, giveUp := context.WithCancel(soon(t, time.Minute))
	var waiters sync.WaitGroup
	for _, id := range []string{strings.Repeat("0", 32), strings.Repeat("f", 32)} {
		waits, tries := request("other", true), request("other", false)
		waits.RequestID, tries.RequestID = id, id[1:]+"a"
		waiters.Go(func() {
			if g, err := d.Acquire(ctx, waits); !errors.Is(err, context.Canceled) {
				t.Errorf("a waiter got %+v, %v beside the other client's holder", g, err)
			}
		})
		_, err := d.Acquire(soon(t, 20*time.Second), tries)
		var by *backend.HeldError
		if !errors.As(err, &by) || by.HoldID != "old" {
			t.Errorf("an attempt beside the other client's holder = %v, want a HeldError with it", err)
		}
	}
	giveUp()
	waiters.Wait()
	if err := old.Delete(other, -1); err != nil {
		t.Fatal(err)
	}
	release(t, d, take(t, d, request("other", true)))
}
