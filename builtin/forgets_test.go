package builtin_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// A server restarts wiped, restored from a backup, or with an old copy of its data. A client that was running notices
// it; a new client gets no smaller token than before in the same token space.
func TestServerThatForgetsUnderALiveClient(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		forget    func(t *testing.T, n *node, backup []byte, copied string)
		sameSpace bool // and greater tokens
		notFresh  bool // a new client cannot detect it
	}{
		"wiped": {forget: func(t *testing.T, n *node, _ []byte, _ string) { n.config.DataDir = t.TempDir() }},
		"restored": {sameSpace: true, forget: func(t *testing.T, n *node, backup []byte, _ string) {
			n.config.DataDir = t.TempDir()
			o := replica.RestoreOptions{ClosedFor: -1}
			if _, err := replica.Restore(n.config.DataDir, bytes.NewReader(backup), o); err != nil {
				t.Fatal(err)
			}
		}},
		"an old copy": {notFresh: true, forget: func(_ *testing.T, n *node, _ []byte, copied string) {
			n.config.DataDir, n.config.Moved = copied, true
		}},
	} {
		t.Run(what, func(t *testing.T) {
			n := startNode(t)
			d := opened(t, n)
			take(t, d, request("first", time.Hour)) // on another session
			var backup bytes.Buffer
			if err := n.current().Backup(t.Context(), &backup); err != nil {
				t.Fatal(err)
			}
			n.stop(t)
			copied := t.TempDir()
			if err := os.CopyFS(copied, os.DirFS(n.config.DataDir)); err != nil {
				t.Fatal(err)
			}
			n.start(t)

			lost := make(chan backend.Reason, 8)
			r := request("x", time.Minute)
			r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
			for range 50 {
				giveBack(t, d, take(t, d, request("others", time.Minute)))
			}
			before := take(t, d, r)
			space := d.Describe().TokenSpace
			n.stop(t)
			c.forget(t, n, backup.Bytes(), copied)
			n.start(t)

			_, err := d.Acquire(t.Context(), request("y", time.Minute))
			for ; err == nil; _, err = d.Acquire(t.Context(), request("z", time.Minute)) {
				t.Errorf("granted after the service had forgotten")
				return
			}
			if !errors.Is(err, backend.ErrHistoryLost) {
				t.Errorf("the next acquire is %v, want ErrHistoryLost", err)
			}
			if reason := <-lost; reason != backend.ReasonHistoryLost {
				t.Errorf("the holder is notified of %q", reason)
			}
			if c.notFresh {
				return
			}
			fresh := opened(t, n)
			after := take(t, fresh, request("x", time.Minute))
			switch same := fresh.Describe().TokenSpace == space; {
			case same != c.sameSpace:
				t.Errorf("the token space was %q and is %q", space, fresh.Describe().TokenSpace)
			case same && after.Token.Order() <= before.Token.Order():
				t.Errorf("token %v after %v in the same space", after.Token, before.Token)
			case same && (before.Generation != fencing.Generation{} || after.Generation.Number != 1 ||
				after.Generation.ID == fencing.Nonce{}):
				t.Errorf("generation %v after %v, want 1 after 0", after.Generation, before.Generation)
			}
		})
	}
}

func opened(t *testing.T, n *node) *builtin.Driver {
	d := open(t, n.addr()).(*builtin.Driver)
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	return d
}

// The visible identifiers of a hold do not permit other clients to release or move it.
func TestShownIdentifiersMoveNothing(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, thief := attached(t, n), attached(t, n)
	r := request("x", time.Minute)
	r.HoldID = backend.HoldID(r.RequestID)
	g := take(t, d, r)
	info, err := thief.Look(t.Context(), "x")
	if err != nil || len(info.Holders) != 1 || info.Holders[0].HoldID != r.HoldID {
		t.Fatalf("shown: %+v, %v", info, err)
	}
	var held *backend.HeldError
	_, err = thief.Acquire(t.Context(), request("x", time.Minute))
	if !errors.As(err, &held) || held.HoldID != r.HoldID {
		t.Errorf("refused with %v, want the hold id %s", err, r.HoldID)
	}
	stolen := g
	stolen.RequestID = info.Holders[0].HoldID
	if err := thief.Renew(t.Context(), []backend.Grant{stolen})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renewed by what is shown: %v", err)
	}
	if err := thief.Release(t.Context(), stolen); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("released by what is shown: %v", err)
	}
	if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
		t.Errorf("the holder: %v", err)
	}
}
