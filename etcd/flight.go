package etcd

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Writes on their way to the server. A step is the atomic work of one call: comparisons, and operations for either
// outcome. Concurrent steps of one client's callers go as one transaction, in which each step is a nested transaction
// with its own comparisons, so that they make one log entry of the cluster instead of many. Sent one by one, the
// steps of 64 callers with a name each reached half of what two raw transactions a cycle allow; the figures and the
// alternatives are in docs/decisions/2026-11-22-etcd-steps-travel-together.md.
//
// The rules: two transactions may be under way before steps wait, so that one or two callers never wait for each
// other; waiting steps go when both are answered, or after 100 ms, in order, one step of each name. The driver does
// not wait for more steps to come: every single caller would pay for that.
//
// Each step answers for itself. A comparison that fails is the step's own answer. A transaction that etcd refuses as
// a whole had no effect, and each step is sent again alone. In a store with another token space the releases are done
// and the acquires are not. If a transaction is not answered, all of its steps are unanswered.
//
// A flight outlives its caller: it goes on when the caller's context ends, since the server may carry out a cancelled
// request, and the driver has to know when that is no longer possible. It ends when the server answers or callTime
// has passed; landing accounts for a later write, on the lease it would write to.

// flight is a step that writes: until it is answered, or callTime has passed. The first group of fields is
// set before send; the results are written once, before done is closed, and read after that.
type flight struct {
	// The name of the lock; "" for a step that must be a separate transaction.
	name            string
	cmps            []clientv3.Cmp
	then, otherwise []clientv3.Op
	// Only in the token space that the driver knows: all steps that may grant. A driver may release its holds in any
	// space.
	here bool
	// The context of the call, for its values alone.
	values context.Context
	// Called before done is closed, if it is not nil.
	ended func(*flight)

	// The results, valid when done is closed. end closes it, once.
	done chan struct{}
	resp *clientv3.TxnResponse
	err  error
}

// departures are the steps of all callers on their way to the server. A name has one step in a transaction at most,
// since etcd evaluates all comparisons before it does anything: two steps for one name would both find it free.
type departures struct {
	mu sync.Mutex // protects the following fields
	// Steps that wait, in order of arrival. arrived removes and sends them; withdraw removes and ends one.
	waiting []*flight
	// Transactions under way that others wait for. A transaction slower than unansweredAlone no longer counts.
	under int
	// The maximum of steps in one transaction. It is halved, for good, for a server that allows fewer.
	most int
}

const (
	// atOnce bounds the transactions under way before steps wait: two callers never wait for each other.
	atOnce = 2
	// mostTogether leaves room for the operations in each step below the 128 that a server allows by default.
	mostTogether = 60
	// unansweredAlone bounds how long others wait for a transaction. A server that does not answer does not delay
	// requests to other servers.
	unansweredAlone = 100 * time.Millisecond
)

// launch begins a step that writes the keys of wishes on the lease of a session. Until landing the places of these
// keys count it, so that no other request gets the keys. An error means that the driver is closed and no request was
// sent.
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

// landing notes where a flight may yet write. A node that was cut off may carry out an unanswered step at any later
// time; the step can write while its lease lives, so the places note that lease. With the end of the session the note
// goes: see forget.
func (d *Driver) landing(f *flight, s *session, keys []string) {
	// Not on an ended lease: a transaction on a lease that is gone is refused as a whole. And not after a refusal by
	// the server.
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

// landed waits until the last step on key has ended, if there is one, or ctx. A release by request id waits here, so
// that the request it follows cannot write concurrently.
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

// send begins a flight, or lets it wait for flights under way. Steps without a name never wait: a set of names,
// which could share a name with anybody. The flight is counted in at the gate until it has ended.
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

// end publishes the results of a flight to all who wait for it. Exactly one goroutine calls it for each flight.
func (d *Driver) end(f *flight) {
	if f.ended != nil {
		f.ended(f)
	}
	close(f.done)
}

// withdraw takes a flight back that nobody waits for, and reports whether it did: if it had departed it goes on, and
// its result is unknown until it ends.
func (d *Driver) withdraw(f *flight) bool {
	out := &d.departures
	out.mu.Lock()
	at := slices.Index(out.waiting, f)
	if at >= 0 {
		out.waiting = slices.Delete(out.waiting, at, at+1)
	}
	out.mu.Unlock()
	if at < 0 {
		d.trouble()
		return false
	}
	f.err = errUnsent
	d.end(f)
	d.gate.Leave()
	return true
}

// departLocked sends steps together, in a separate goroutine that ends with the answer or after callTime. Other steps
// wait for that, but for at most unansweredAlone; the timer and the answer both call arrived, which
// counts once. The caller holds departures.mu.
func (d *Driver) departLocked(together []*flight) {
	d.departures.under++
	// The answer, or the timer, whichever comes first, lets others go.
	arrived := sync.OnceFunc(d.arrived)
	late := time.AfterFunc(unansweredAlone, arrived)
	go func() {
		d.commitTogether(together)
		arrived()
		late.Stop()
		// The calls wait for done; the gate is left after that, so that Close does not go on before the results can be
		// read.
		for _, f := range together {
			d.end(f)
			d.gate.Leave()
		}
	}()
}

// arrived sends the steps that waited for the last transaction under way: in order, one of each name, and as many as
// fit a transaction. The rest waits for that transaction in turn.
func (d *Driver) arrived() {
	out := &d.departures
	out.mu.Lock()
	defer out.mu.Unlock()
	if out.under--; out.under > 0 {
		return
	}
	// The first step of each name goes, the others keep their order.
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

// commitTogether commits steps in one transaction and writes their results. If the server refuses several steps, each
// one is sent alone: another step may be the cause.
//
// The steps are nested below a comparison of the token space. In another space the releases are done anyway, and each
// acquire reads the present space instead. A single release needs no such comparison, and goes as it is, which costs
// the server less.
//
// Values of a caller's context, a trace for example, travel with a step that goes alone. Its deadline and its end never
// do.
func (d *Driver) commitTogether(together []*flight) {
	first, values := together[0], d.ctx
	if len(together) == 1 {
		values = first.values
	}
	ctx, cancel := d.bounded(context.WithoutCancel(values))
	defer cancel()
	// Close ends acquires, and waits for releases: a transaction with a release in it is not cancelled, and takes
	// callTime at most.
	if !slices.ContainsFunc(together, func(f *flight) bool { return !f.here }) {
		defer context.AfterFunc(d.ctx, cancel)()
	} else if len(together) == 1 {
		first.resp, first.err = d.commit(ctx, first.cmps, first.then, first.otherwise)
		return
	}
	var then, otherwise []clientv3.Op
	for _, f := range together {
		step := clientv3.OpTxn(f.cmps, f.then, f.otherwise)
		then = append(then, step)
		if f.here {
			step = clientv3.OpGet(d.spaceKey())
		}
		otherwise = append(otherwise, step)
	}
	resp, err := d.commit(ctx, []clientv3.Cmp{d.sameSpace()}, then, otherwise)
	if len(together) > 1 && resp == nil && refused(err) {
		d.commitEach(together, isOneOf(err, rpctypes.ErrTooManyOps))
		return
	}
	for i, f := range together {
		switch {
		case resp == nil:
			f.err = err
		case f.here && !resp.Succeeded:
			// The space cannot be the same in both; if etcd says so, the step was not done and is repeated.
			f.err = cmp.Or(d.checkSpace(resp.Responses[i].GetResponseRange().Kvs), errChanged)
		default:
			inner := resp.Responses[i].GetResponseTxn()
			inner.Header = resp.Header
			f.resp = (*clientv3.TxnResponse)(inner)
			if f.here {
				f.err = err // a release is done even if the past is lost
			}
		}
	}
}

// commitEach sends each step alone, all concurrently, and returns when all are answered. If they were too many
// operations for this server (--max-txn-ops), later transactions have fewer steps.
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
