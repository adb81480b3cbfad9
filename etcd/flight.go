package etcd

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// flight is a step that changes something: until it is answered, or attemptTime has passed. It outlives the call that
// began it.
type flight struct {
	name            string // of the lock; "" for a step that must be a transaction of its own
	cmps            []clientv3.Cmp
	then, otherwise []clientv3.Op
	here            bool            // only in the token space that the driver knows
	values          context.Context // of the call
	ended           func(*flight)   // nil, or called before done is closed

	done chan struct{} // closed at the end; the fields below are valid then
	resp *clientv3.TxnResponse
	err  error
}

// departures are the steps of all callers on their way to the server. What comes while others are under way waits for
// them and is sent with them, as one transaction of which each step is a part with comparisons of its own: a log entry
// of the cluster instead of many. A name has one step in it at most, since etcd evaluates all comparisons before it
// does anything.
type departures struct {
	mu      sync.Mutex // protects the following fields
	waiting []*flight
	under   int // transactions under way that others wait for
	most    int // steps in one transaction; halved for servers that allow fewer
}

const (
	// atOnce is how many transactions may be under way before steps wait: two callers never wait for each other.
	atOnce = 2
	// mostTogether leaves room for the operations in each step below the 128 that a server allows by default.
	mostTogether = 60
	// unansweredAlone is for how long others wait for a transaction. One server that does not answer holds up nobody
	// whose request goes to another one.
	unansweredAlone = 100 * time.Millisecond
)

// launch begins a step that writes keys, which have places, on the lease of a session.
func (d *Driver) launch(
	ctx context.Context, s *session, wishes []wish, cmps []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*flight, error) {
	f := &flight{cmps: cmps, then: then, otherwise: otherwise, here: true, values: ctx}
	if len(wishes) == 1 {
		f.name = wishes[0].r.Name
	}
	keys := make([]string, len(wishes))
	for i, w := range wishes {
		keys[i] = w.key
	}
	f.ended = func(f *flight) { d.landing(f, s, keys) }
	d.mu.Lock()
	for _, key := range keys {
		d.places[key].flights++
		d.places[key].last = f
	}
	d.mu.Unlock()
	return f, d.send(f)
}

// landing notes where a flight may yet write.
func (d *Driver) landing(f *flight, s *session, keys []string) {
	late := f.err != nil && !unsent(f.err) && !refused(f.err)
	d.mu.Lock()
	defer d.mu.Unlock()
	late = late && !s.Ended()
	for _, key := range keys {
		p := d.places[key]
		p.flights--
		if late {
			if p.doubts == nil {
				p.doubts = map[*session]bool{}
			}
			p.doubts[s] = true
		}
		d.tidyLocked(key)
	}
}

// landed waits for the end of the last step on key that is under way, if there is one.
func (d *Driver) landed(ctx context.Context, key string) error {
	d.mu.Lock()
	var f *flight
	if p := d.places[key]; p != nil {
		f = p.last
	}
	d.mu.Unlock()
	if f == nil {
		return nil
	}
	select {
	case <-f.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// send begins a flight, or lets it wait for others that are under way.
func (d *Driver) send(f *flight) error {
	f.done = make(chan struct{})
	if err := d.enter(); err != nil {
		f.err = errUnsent
		d.end(f)
		return err
	}
	out := &d.departures
	out.mu.Lock()
	defer out.mu.Unlock()
	if f.name == "" || len(out.waiting) == 0 && out.under < atOnce {
		d.departLocked([]*flight{f})
	} else {
		out.waiting = append(out.waiting, f)
	}
	return nil
}

func (d *Driver) end(f *flight) {
	if f.ended != nil {
		f.ended(f)
	}
	close(f.done)
}

// withdraw takes a flight back that nobody waits for. It reports false if it has departed.
func (d *Driver) withdraw(f *flight) bool {
	out := &d.departures
	out.mu.Lock()
	at := slices.Index(out.waiting, f)
	if at >= 0 {
		out.waiting = slices.Delete(out.waiting, at, at+1)
	}
	out.mu.Unlock()
	if at < 0 {
		return false
	}
	f.err = errUnsent
	d.end(f)
	d.gate.Leave()
	return true
}

func (d *Driver) departLocked(together []*flight) {
	d.departures.under++
	arrived := sync.OnceFunc(d.arrived)
	late := time.AfterFunc(unansweredAlone, arrived)
	go func() {
		d.commitTogether(together)
		arrived()
		late.Stop()
		for _, f := range together {
			d.end(f)
			d.gate.Leave()
		}
	}()
}

// arrived lets those go that waited for the last transaction under way: in order, one of each name.
func (d *Driver) arrived() {
	out := &d.departures
	out.mu.Lock()
	defer out.mu.Unlock()
	if out.under--; out.under > 0 {
		return
	}
	names := map[string]bool{}
	var together []*flight
	out.waiting = slices.DeleteFunc(out.waiting, func(f *flight) bool {
		if names[f.name] || len(together) == out.most {
			return false
		}
		names[f.name] = true
		together = append(together, f)
		return true
	})
	if len(together) > 0 {
		d.departLocked(together)
	}
}

// commitTogether commits steps in one transaction. Where that is refused each is tried by itself: it may be for the sake
// of another one.
func (d *Driver) commitTogether(together []*flight) {
	values, cancellable, here := d.ctx, true, false
	for _, f := range together {
		cancellable = cancellable && f.here // Close ends what acquires, and waits for what releases
		here = here || f.here
	}
	if len(together) == 1 {
		values = together[0].values
	}
	ctx, cancel := d.bounded(context.WithoutCancel(values))
	defer cancel()
	if cancellable {
		defer context.AfterFunc(d.ctx, cancel)()
	}
	if f := together[0]; len(together) == 1 && !f.here {
		f.resp, f.err = d.commit(ctx, f.cmps, f.then, f.otherwise)
		return
	}
	var cmps []clientv3.Cmp
	var then, otherwise []clientv3.Op
	if here {
		cmps, otherwise = []clientv3.Cmp{d.sameSpace()}, []clientv3.Op{clientv3.OpGet(d.spaceKey())}
	}
	for _, f := range together {
		step := clientv3.OpTxn(f.cmps, f.then, f.otherwise)
		then = append(then, step)
		if !f.here {
			otherwise = append(otherwise, step)
		}
	}
	resp, err := d.commit(ctx, cmps, then, otherwise)
	if len(together) > 1 && resp == nil && refused(err) {
		d.commitEach(together, isOneOf(err, rpctypes.ErrTooManyOps))
		return
	}
	next := 0 // among the responses
	if resp != nil && !resp.Succeeded {
		err, next = d.checkSpace(resp.Responses[0].GetResponseRange().Kvs), 1
		if err == nil {
			err = errSameSpace
		}
	}
	for _, f := range together {
		f.err = err
		if resp == nil || f.here && !resp.Succeeded {
			continue
		}
		inner := resp.Responses[next].GetResponseTxn()
		inner.Header = resp.Header
		f.resp = (*clientv3.TxnResponse)(inner)
		if next++; !f.here {
			f.err = nil // it is done also where the past is lost
		}
	}
}

func (d *Driver) commitEach(together []*flight, tooMany bool) {
	if tooMany {
		d.departures.mu.Lock()
		d.departures.most = max(1, min(d.departures.most, len(together)/2))
		d.departures.mu.Unlock()
	}
	var work sync.WaitGroup
	for _, f := range together {
		work.Go(func() { d.commitTogether([]*flight{f}) })
	}
	work.Wait()
}
