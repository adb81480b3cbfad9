package zookeeper_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// attemptsThatMeet lets a request arrive behind an entry that is about to leave: an attempt's, or that of a request that
// is refused. If the entry leaves before the request looks again, the request is not refused. If the entry stays, it is.
func attemptsThatMeet(t *testing.T, server *containers.ZooKeeperServer) {
	admin := newAdmin(t, server.Addr())
	const attempt, waiter = `{"fencelock":1,"try":true}`, `{"fencelock":1}`
	type entry struct{ mark, data string }
	var all sync.WaitGroup
	for name, test := range map[string]struct {
		front []entry
		goes  int // which of them
		asks  backend.Request
		held  error // if it stays
	}{
		"a writer behind one":      {[]entry{{"", attempt}}, 0, writer("", false), backend.ErrHeld},
		"a reader behind a writer": {[]entry{{"", attempt}}, 0, reader("", false), backend.ErrHeld},
		"all permits behind some":  {[]entry{{"-2of4", attempt}}, 0, some("", false, 4, 4), backend.ErrHeld},
		"some behind several": {
			[]entry{{"-1of4", waiter}, {"-1of4", attempt}, {"-2of4", waiter}}, 1,
			some("", false, 1, 4), backend.ErrHeld,
		},
		"another limit":          {[]entry{{"-1of5", attempt}}, 0, some("", false, 1, 4), backend.ErrLimitMismatch},
		"another limit, waiting": {[]entry{{"-1of5", waiter}}, 0, some("", true, 1, 4), backend.ErrLimitMismatch},
		"another kind":           {[]entry{{"-shared", waiter}}, 0, some("", false, 1, 4), backend.ErrLimitMismatch},
		"a reader beside a refused one": {
			[]entry{{"-shared", waiter}, {"", attempt}}, 1, reader("", false), backend.ErrHeld,
		},
		"a reader beside an odd one": {
			[]entry{{"-shared", waiter}, {"-1of2", waiter}}, 1, reader("", false), backend.ErrHeld,
		},
		"permits beside a refused one": {
			[]entry{{"-3of4", waiter}, {"-4of4", attempt}}, 1, some("", false, 1, 4), backend.ErrHeld,
		},
		"permits beside an odd one": {
			[]entry{{"-3of4", waiter}, {"-1of8", waiter}}, 1, some("", false, 1, 4), backend.ErrHeld,
		},
		"permits, waiting beside the odd": {
			[]entry{{"-3of4", waiter}, {"-1of8", waiter}}, 1, some("", true, 1, 4), nil,
		},
	} {
		for _, stays := range []bool{false, true} {
			if stays && test.held == nil {
				continue // it would wait
			}
			r, want := test.asks, error(nil)
			r.Name = strings.ReplaceAll(name, ",", "")
			if stays {
				r.Name, want = r.Name+" that stays", test.held
			}
			r.RequestID = backend.NewRequestID()
			dir := "/fencelock/lock:" + escaped(r.Name)
			admin.create(t, dir)
			var nodes []string
			for _, e := range test.front {
				node, err := admin.Create(dir+"/"+backend.NewRequestID()+e.mark+".", []byte(e.data),
					zk.FlagEphemeral|zk.FlagSequence, zk.WorldACL(zk.PermAll))
				if err != nil {
					t.Fatal(err)
				}
				nodes = append(nodes, node)
			}
			all.Go(func() {
				meet(t, server.Addr(), r, func() {
					if stays {
						return
					}
					if err := admin.Delete(nodes[test.goes], -1); err != nil {
						t.Errorf("%s: %v", r.Name, err)
					}
				}, want)
				if left, err := admin.children(dir); err != nil || len(left) > len(nodes) ||
					!stays && len(left) >= len(nodes) {
					t.Errorf("%s: left behind: %q, %v", r.Name, left, err)
				}
			})
		}
	}
	all.Wait()
}

// meet makes one request, and lets something happen before its first step that depends on the others. The request is
// refused with want, or granted if that is nil.
func meet(t *testing.T, addr string, r backend.Request, happens func(), want error) {
	b := &breaker{requestID: r.RequestID}
	once := sync.OnceFunc(happens)
	b.before = func(step string) {
		if step == "look" || step == "watch another's" || step == "get one's own" {
			once()
		}
	}
	d := zookeeper.New([]string{addr}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	g, err := d.Acquire(soon(t, 20*time.Second), r)
	if !errors.Is(err, want) {
		t.Errorf("%s: Acquire = %v, want %v", r.Name, err, want)
	}
	if err == nil {
		release(t, d, g)
	}
	if err := d.Close(soon(t, 10*time.Second)); err != nil {
		t.Errorf("Close = %v", err)
	}
}
