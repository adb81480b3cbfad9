package zookeeper

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

func TestURLs(t *testing.T) {
	t.Parallel()
	addrs, o, timeout, err := parseURL("zk://ann:s%40cret@a,b:2182,[::1]:2183/app/locks?prefix=/r&tick=3s&timeout=7s")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"a:2181", "b:2182", "[::1]:2183"}; !slices.Equal(addrs, want) {
		t.Errorf("addresses = %q, want %q", addrs, want)
	}
	if o.User != "ann" || o.Password != "s@cret" || o.Chroot != "/app/locks" || o.KeyPrefix != "/r" ||
		o.Tick != 3*time.Second || timeout != 7*time.Second || o.TLS != nil {
		t.Errorf("options = %+v, %v", o, timeout)
	}
	if _, o, _, err := parseURL("zks://a:2281"); err != nil || o.TLS == nil {
		t.Errorf("zks: TLS is not selected: %v", err)
	}
	if schemes := backend.Schemes(); !slices.Contains(schemes, "zk") || !slices.Contains(schemes, "zookeeper") {
		t.Errorf("registered: %q", schemes)
	}
	for _, bad := range []string{
		"etcd://a", "zk://", "zk://a,,b", "zk://a:0", "zk://a:x", "zk://a?tick=0s",
		"zk://a?nothing=1", "zk://a?prefix=/a&prefix=/b", "zk://:pw@a", "zk://a?cert=x", "zk://::1",
	} {
		if _, _, _, err := parseURL(bad); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v, want ErrInvalidOption", bad, err)
		}
	}
	if _, _, _, err := parseURL("zk://ann:secret@a?nothing=1"); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("the error %v shows the password", err)
	}
}

// TestNoConnectionInTime dials servers that never answer: nothing was sent, so that nothing is unknown.
func TestNoConnectionInTime(t *testing.T) {
	t.Parallel()
	d := New([]string{"a:1", "b:1"}, &Options{
		Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	for _, wait := range []bool{false, true} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err := d.Acquire(ctx, backend.Request{
			Name: "a", RequestID: backend.NewRequestID(), TTL: 10 * time.Second, Wait: wait,
		})
		cancel()
		if !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire (wait %v) = %v, want ErrUnavailable alone", wait, err)
		}
	}
	if err := d.Close(t.Context()); err != nil {
		t.Errorf("Close = %v", err)
	}
}

// TestWaitersShareAFailure counts the dials of many waiters while no server runs: they share each session that cannot
// be made, and its failure for a while.
func TestWaitersShareAFailure(t *testing.T) {
	t.Parallel()
	const waiters, dials = 50, 10
	var dialled atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	began := time.Now()
	d := New([]string{"a:1"}, &Options{Dial: func(context.Context, string, string) (net.Conn, error) {
		if dialled.Add(1) == dials {
			cancel()
		}
		return nil, errors.New("refused")
	}})
	var all sync.WaitGroup
	for range waiters {
		all.Go(func() {
			r := backend.Request{Name: "a", RequestID: backend.NewRequestID(), TTL: 10 * time.Second, Wait: true}
			if g, err := d.Acquire(ctx, r); err == nil {
				t.Errorf("Acquire = %+v, without a server", g)
			}
		})
	}
	all.Wait()
	// On a busy machine a session that has failed may dial once more before it ends, after half of the pause.
	if took := time.Since(began); took < (dials-1)*failurePause/2 {
		t.Errorf("%d waiters dialled %d times in %v, want a pause of %v between", waiters, dials, took, failurePause)
	}
	if err := d.Close(t.Context()); err != nil {
		t.Errorf("Close = %v", err)
	}
}

func TestBadOptionsShowInTheFirstCall(t *testing.T) {
	t.Parallel()
	for what, d := range map[string]*Driver{
		"no address":      New(nil, nil),
		"no port":         New([]string{"a"}, nil),
		"empty address":   New([]string{""}, &Options{}),
		"prefix is /":     New([]string{"a:1"}, &Options{KeyPrefix: "/"}),
		"relative prefix": New([]string{"a:1"}, &Options{KeyPrefix: "a"}),
		"prefix with //":  New([]string{"a:1"}, &Options{KeyPrefix: "/a//b"}),
		"prefix ends /":   New([]string{"a:1"}, &Options{KeyPrefix: "/a/"}),
		"prefix a name's": New([]string{"a:1"}, &Options{KeyPrefix: "/fencelock/lock:orders"}),
		"servers' own":    New([]string{"a:1"}, &Options{KeyPrefix: "/zookeeper/locks"}),
		"chroot with ..":  New([]string{"a:1"}, &Options{Chroot: "/a/../b"}),
		"tick of an hour": New([]string{"a:1"}, &Options{Tick: time.Hour}),
		"negative tick":   New([]string{"a:1"}, &Options{Tick: -time.Second}),
		"user with colon": New([]string{"a:1"}, &Options{User: "a:b"}),
		"no user":         New([]string{"a:1"}, &Options{Password: "secret"}),
	} {
		r := backend.Request{Name: "a", RequestID: backend.NewRequestID(), TTL: 10 * time.Second}
		_, acquired := d.Acquire(context.Background(), r)
		_, looked := d.Look(context.Background(), "a")
		for call, err := range map[string]error{
			"Ping": d.Ping(context.Background()), "Acquire": acquired, "Look": looked,
			"Renew":   d.Renew(context.Background(), []backend.Grant{r.Grant()})[0].Err,
			"Release": d.Release(context.Background(), r.Grant()),
		} {
			var invalid *backend.InvalidError
			if !errors.Is(err, backend.ErrInvalidOption) || !errors.As(err, &invalid) ||
				strings.Contains(err.Error(), "%!") || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: %s = %v, want an InvalidError", what, call, err)
			}
		}
		if err := d.Close(context.Background()); err != nil {
			t.Errorf("%s: Close = %v", what, err)
		}
	}
}
