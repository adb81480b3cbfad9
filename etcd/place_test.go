package etcd

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// everWritten returns how often each key of a name was created.
func everWritten(t testing.TB, d *Driver, name string) map[string]int {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	now, err := d.service.client.Get(ctx, "now")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.service.client.Put(ctx, dirOf(name)+"end", ""); err != nil {
		t.Fatal(err)
	}
	created := map[string]int{}
	for resp := range d.service.client.Watch(ctx, dirOf(name), clientv3.WithPrefix(), clientv3.WithRev(1)) {
		for _, e := range resp.Events {
			if e.Kv.ModRevision > now.Header.Revision {
				return created
			}
			if e.IsCreate() {
				created[string(e.Kv.Key)]++
			}
		}
	}
	t.Fatal("the watch ended")
	return nil
}

// etcd remembers deleted keys until the next compaction, and comparisons of ranges visit them. So a name must have few
// keys, however often it was held, also by drivers that have ended.
func TestKeysOfANameAreFew(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	for _, c := range []use{exclusively(), sharing(), taking(2, 3)} {
		t.Run(c.Kind.String(), func(t *testing.T) {
			name := "few/" + c.Kind.String()
			const drivers, rounds = 4, 25
			var last *Driver
			token := uint64(0)
			for range drivers {
				last = newDriver(t, server.Addr())
				for i := range rounds {
					g := mustAcquire(t, last, c.asks(name, i%2 == 0))
					if g.Token.Order() <= token {
						t.Fatalf("token %v after %d", g.Token, token)
					}
					token = g.Token.Order()
					mustRelease(t, last, g)
				}
			}
			created := everWritten(t, last, name)
			if len(created) > drivers {
				t.Errorf("%d holds stood on %v", drivers*rounds, created)
			}
		})
	}
}

// Drivers whose first choice is the same key.
func TestDriversThatWantOneKey(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	for _, c := range []use{exclusively(), sharing(), taking(1, 3)} {
		t.Run(c.Kind.String(), func(t *testing.T) {
			name := "one/" + c.Kind.String()
			same := sameKeys(t, 2, server.Addr())
			one, two, three := same[0], same[1], newDriver(t, server.Addr())
			first := mustAcquire(t, one, c.asks(name, false))
			if c.Kind == backend.KindExclusive {
				waits := acquireLater(t, two, c.asks(name, true))
				again := acquireLater(t, three, c.asks(name, true))
				mustRelease(t, one, first)
				second := mustGet(t, waits)
				mustWait(t, "the third", again)
				mustRelease(t, two, second)
				mustRelease(t, three, mustGet(t, again))
				return
			}
			second, third := mustAcquire(t, two, c.asks(name, false)), mustAcquire(t, three, c.asks(name, true))
			wantHolders(t, one, name, 0, first, second, third)
			more, err := two.AcquireAll(t.Context(),
				[]backend.Request{sharing().asks("more/"+name, false), exclusively().asks("all/"+name, false)})
			if err != nil {
				t.Fatal(err)
			}
			beside := mustAcquireAll(t, one,
				[]backend.Request{sharing().asks("more/"+name, false), exclusively().asks("else/"+name, false)})
			wantHolders(t, one, "more/"+name, 0, more[0], beside[0])
			mustRelease(t, two, more...)
			mustRelease(t, one, beside...)
			mustRelease(t, one, first)
			mustRelease(t, two, second)
			mustRelease(t, three, third)
		})
	}
}

// A foreign key is in the place of a hold.
func TestForeignKeyOnAPlace(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	at := firstKey(t, d)
	for _, c := range []use{exclusively(), sharing(), taking(1, 3)} {
		for _, wait := range []bool{true, false} {
			r := c.asks(fmt.Sprint("foreign/", c.Kind, wait), wait)
			key := dirOf(r.Name) + c.part() + at
			if _, err := d.service.client.Put(t.Context(), key, "foreign"); err != nil {
				t.Fatal(err)
			}
			mustRelease(t, d, mustAcquire(t, d, r))
			if resp, err := d.service.client.Get(t.Context(), key); err != nil || len(resp.Kvs) != 1 ||
				string(resp.Kvs[0].Value) != "foreign" {
				t.Errorf("%v: the foreign key is %v, %v", c.Kind, resp, err)
			}
		}
	}
}

// A grant names its hold by the whole request id: a right incarnation and a right key are not enough.
func TestAnotherRequestIDMovesNothing(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	own, other := newDriver(t, server.Addr()), newDriver(t, server.Addr())
	r := request("x", false)
	r.TTL = time.Minute
	g := mustAcquire(t, own, r)
	for _, id := range []string{backend.NewRequestID(), g.RequestID[:len(g.RequestID)-1], g.RequestID + "0"} {
		wrong := g
		wrong.RequestID = id
		for _, d := range []*Driver{own, other} {
			for _, ttl := range []time.Duration{g.TTL, 2 * g.TTL} {
				wrong.TTL = ttl
				if err := d.Renew(t.Context(), []backend.Grant{wrong})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
					t.Errorf("Renew with the request id %s = %v", id, err)
				}
			}
			if err := d.Release(t.Context(), wrong); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("Release with the request id %s = %v", id, err)
			}
		}
	}
	if err := own.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
		t.Error(err)
	}
	if err := other.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
		t.Errorf("Renew by another driver = %v", err)
	}
	if err := other.Release(t.Context(), g); err != nil {
		t.Errorf("Release by another driver = %v", err)
	}
}
