package builtin_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/freeport"
	state "github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// Members that know rules replace members that do not, one by one and under load. Until the last member is replaced,
// rules are refused and no entry has a field of rules: a machine of the lower level refuses such an entry with an
// error to the client. Then rules are set, and no hold is lost.
func TestMembersAreReplacedThroughTheLevelOfRules(t *testing.T) {
	t.Parallel()
	addresses := freeport.Addresses(t, 6)
	nodes := make([]*node, 3)
	var starting sync.WaitGroup
	for i := range nodes {
		n := &node{running: make(chan struct{}), config: server.Config{
			DataDir: t.TempDir(), Listen: addresses[i], PeerListen: addresses[3+i], Join: addresses[3:], BootstrapExpect: 3,
			JoinKey: []byte("a key of the members"), MinTTL: 100 * time.Millisecond, Log: quiet(t),
			Rig: &serverfault.Rig{Level: state.LevelRules - 1},
		}}
		close(n.running)
		nodes[i] = n
		starting.Go(func() { n.start(t) })
		t.Cleanup(func() { n.stop(t) })
	}
	starting.Wait()
	d := builtin.New(addresses[:3], &builtin.Options{Logger: quiet(t)})
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	r := request("jobs/kept", 10*time.Minute)
	r.Lost = func(l backend.Loss) { t.Errorf("the hold is lost: %+v", l) }
	kept := take(t, d, r)

	var rounds [2]atomic.Int64
	var ruled atomic.Bool
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer stop()
	for i := range rounds {
		clients.Go(func() {
			for ctx.Err() == nil {
				of := t.Context()
				if i == 0 && !ruled.Load() { // as a gateway does for its clients
					of = principal.For(of, "token:ci")
				}
				g, err := d.Acquire(of, request(fmt.Sprint("jobs/", i), 10*time.Minute))
				if err == nil {
					err = errors.Join(d.Renew(of, []backend.Grant{kept})[0].Err, d.Release(of, g))
				}
				switch {
				case errors.Is(err, backend.ErrUnavailable), errors.Is(err, backend.ErrUnknown): // a time without a leader
				case errors.Is(err, backend.ErrHeld): // the leftover of such a call
				case err != nil:
					t.Errorf("client %d: %v", i, err)
					return
				default:
					rounds[i].Add(1)
				}
			}
		})
	}
	works := func(after string) {
		t.Helper()
		for i := range rounds {
			before := rounds[i].Load()
			eventually(t, "clients go on after "+after, func() bool { return rounds[i].Load() > before+1 || t.Failed() })
		}
	}
	admin, err := builtin.OpenAdmin("fencelock://" + strings.Join(addresses[:3], ","))
	if err != nil {
		t.Fatal(err)
	}
	set := func() error {
		_, err := admin.SetRules(t.Context(), "allow * acquire,read jobs\n")
		return err
	}
	works("the start")
	for _, n := range nodes {
		eventually(t, "rules are refused", func() bool {
			err := set()
			if err == nil {
				t.Fatal("a cluster with members of an earlier version takes rules")
			}
			return strings.Contains(err.Error(), "a member of the cluster runs a version without rules")
		})
		n.stop(t)
		works("a member is gone")
		n.config.Rig = nil
		n.start(t)
		works("a member was replaced")
	}
	ruled.Store(true)
	works("the last request for others")
	eventually(t, "rules are taken", func() bool { return set() == nil })
	works("the rules were set")
	if _, err := d.Acquire(t.Context(), request("else", time.Minute)); !errors.Is(err, backend.ErrDenied) {
		t.Errorf("by the rules: %v", err)
	}
}
