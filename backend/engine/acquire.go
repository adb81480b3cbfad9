package engine

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Acquire is backend.Driver's. The errors:
//
//	backend.ErrHeld           another request has the name, and this one does not wait
//	DeadlockError             waiting would close a cycle
//	ErrLimitMismatch          the name is in use with another kind, limit or hierarchy
//	ErrInvalidOption, …       the request is invalid, and was not sent
//	ErrUnavailable            the service refuses or cannot be reached, and did not act
//	ErrUnknown                an entry may be left in the service: release Request.Grant
//	ErrHistoryLost            the service has lost acknowledged state
//	ErrClosed, or ctx's       the waiter has left the queue, unless ErrUnknown is there too
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	a, _ := d.free.Get().(*attempt)
	if a == nil {
		a = &attempt{d: d}
	}
	a.request[0] = r
	a.rs = a.request[:]
	grants, err := a.acquire(ctx)
	if err != nil {
		return backend.Grant{}, d.callError(verbAcquire, r.Name, err)
	}
	g := grants[0]
	if d.prompt && !a.unanswered && a.waiter.watching == nil { // a watch may yet wake it
		*a = attempt{d: d, waiter: waiter{memory: a.waiter.memory}}
		d.free.Put(a)
	}
	return g, nil
}

// AcquireAll is backend.MultiAcquirer's. Errors are as for Acquire; they name the first name of the set.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	_, ok := d.service.(Sets)
	err := backend.ErrUnsupported
	var grants []backend.Grant
	if ok {
		a := &attempt{d: d, rs: slices.Clone(rs)} // an exchange may outlive the call
		grants, err = a.acquire(ctx)
	}
	if err != nil {
		name := ""
		if len(rs) > 0 {
			name = rs[0].Name
		}
		return nil, d.callError(verbAcquire, name, err)
	}
	return grants, nil
}

// attempt is one acquire, of one name or of a set.
type attempt struct {
	d          *Driver
	rs         []backend.Request
	waiter     waiter
	position   [1]Position        // memory of the answer to one name
	request    [1]backend.Request // memory of rs
	grant      [1]backend.Grant   // memory of the grants of one name
	name       string             // of the attempt, for the service
	s          *session           // of which the attempt is a user; nil without sessions
	past       []*session         // of which it is still a user, until its entry has moved to s
	place      string             // of the last Position
	push       string             // Push.Handed of the push that has woken the attempt
	again      bool               // an Enter was sent
	late       bool               // an Enter went unanswered, and may take effect at any time
	crossed    bool               // an Enter was sent before an earlier one had landed, which may have an entry beside its place
	doubt      bool               // an Enter was not answered, and no later one was
	placed     bool               // by the last answer, the service has a hold or a wait of the attempt
	queued     bool
	unanswered bool  // an exchange may still use the attempt
	ended      bool  // it does not count as running any more
	refused    error // the last error of an Enter that had no effect
	failed     error // the last error that has a reason
	tries      int   // exchanges that the service refused
	moves      int   // in a row, to another session

	pending atomic.Int32 // sendings of Enters on other goroutines that have not been answered, and may never be
}

func (a *attempt) acquire(ctx context.Context) ([]backend.Grant, error) {
	d, rs := a.d, a.rs
	if err := kit.ValidateSet(d.Describe(), rs); err != nil {
		return nil, err
	}
	if err := d.begin(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := d.lost(); err != nil {
		return nil, err
	}
	a.name = d.attempts.next()
	d.attend(rs)
	defer d.depart(rs)
	if d.oneEntry {
		d.run(rs, 1)
		defer a.end()
	}
	defer a.use(nil)
	w := &a.waiter
	w.enter(d, &rs[0])
	defer w.leave()
	cancel := d.listen(rs)
	grants, err := a.run(ctx, w)
	if err != nil {
		cancel()
	}
	return grants, err
}

// run repeats Enter until the attempt has an outcome:
//
//	granted                          return the grants
//	held by another, without Wait    return a HeldError
//	queued                           wait, and repeat unless a push has brought the hold
//	refused by the contract          return the error: it would be the same again
//	unknown                          pause, and repeat until ctx ends: the service knows the request by its id
//	not done, with Wait              pause, and repeat until ctx ends
//	not done, without Wait           pause, and repeat maxTries times in all
func (a *attempt) run(ctx context.Context, w *waiter) ([]backend.Grant, error) {
	first, began := &a.rs[0], w.began
	for ; ; began = a.d.clock.Now() {
		grants, pos, err := a.enter(ctx)
		class, final := a.d.classOf(err)
		switch {
		case grants != nil:
			return grants, nil
		case err == nil && !first.Wait:
			held := cmp.Or(pos.Holder, &backend.HeldError{})
			held.Name = cmp.Or(held.Name, first.Name)
			return nil, a.abandon(ctx, held)
		case err == nil:
			a.queued = true
			if err = w.wait(ctx, a, pos); err == nil {
				if grant, ok := a.handed(w); ok {
					return []backend.Grant{grant}, nil
				}
			}
		case errors.Is(err, ErrOutgrown) || class == NoSession && !final:
			if a.moves++; a.moves <= maxTries {
				continue // on another session
			}
			a.moves = 0
			err = w.pause(ctx, 0)
		case final || a.d.ended(ctx) != nil:
			return nil, a.abandon(ctx, err)
		default:
			var late *Unanswered
			if !kit.IsContext(err) && (!errors.As(err, &late) || late.Err != nil) {
				a.failed = err
			}
			if class == NotDone {
				a.refused = err
			}
			if a.tries++; class == NotDone && !first.Wait && a.tries >= maxTries {
				return nil, a.abandon(ctx, err)
			}
			if w.pause(ctx, a.d.clock.Now().Sub(began)) != nil {
				return nil, a.abandon(ctx, err)
			}
			err = nil
		}
		if err != nil {
			return nil, a.abandon(ctx, err)
		}
	}
}

// handed returns the hold that a push has brought. Its validity counts from the sending of the attempt's own Enter that
// the service has handed the name to, never from the push, which may have travelled for any time through whatever. The
// grant is dated so that it ends when the short hold does; that is so soon that the caller renews it immediately.
// Without enough left, the next Enter makes the hold whole.
func (a *attempt) handed(w *waiter) (backend.Grant, bool) {
	w.d.mu.Lock()
	push := w.handed
	w.handed = ""
	if w.d.flights[w.first.RequestID].shared {
		push = "" // it may be the place of another attempt, which removes that
	}
	w.d.mu.Unlock()
	a.push = push
	from, ok := a.d.service.(Handover)
	r := &a.rs[0]
	if !ok || push == "" || !r.Renews || r.MinHold > 0 || len(a.rs) > 1 {
		return backend.Grant{}, false
	}
	pos, sent, ttl, ok := from.Handed(Entering{Request: *r, Attempt: a.name, Again: true, Place: a.place}, push)
	if !ok || sent < w.began {
		return backend.Grant{}, false
	}
	a.placed = true
	sent = sent.Add(min(ttl, r.TTL) - r.TTL)
	if left := sent.Add(a.d.Describe().Validity(r.TTL)).Sub(a.d.clock.Now()); left < minHanded {
		return backend.Grant{}, false
	}
	g := r.Grant()
	g.Token, g.Nonce, g.Incarnation, g.SentAt, g.Queued = pos.Token, pos.Nonce, pos.Incarnation, sent, true
	return g, true
}

// use makes s the session of the attempt.
func (a *attempt) use(s *session) {
	if a.s != nil {
		a.past = append(a.past, a.s)
	}
	if a.s = s; s == nil {
		a.leavePast()
	}
}

// leavePast leaves the earlier sessions of the attempt.
func (a *attempt) leavePast() {
	for _, s := range a.past {
		s.Leave(1)
	}
	a.past = nil
}

// enter is one Enter, and the grants if the attempt holds. The steps before the Enter do not send the request.
func (a *attempt) enter(ctx context.Context) ([]backend.Grant, Position, error) {
	if err := a.d.probe(ctx); err != nil {
		if !kit.Classified(err) && a.d.service.Classify(err) != Never {
			err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
		}
		return nil, Position{}, err
	}
	if a.d.sessions != nil && (a.s == nil || a.s.Ended() || a.s.isOutgrown()) {
		s, err := a.d.sessions.join(ctx, a.rs[0].TTL)
		if err != nil {
			// The opening has been sent, and continues. Its outcome is as unknown as an Enter's, unless no connection stood
			// before.
			a.doubt = a.doubt || kit.IsContext(err) && a.refused == nil
			return nil, Position{}, err
		}
		a.use(s)
	}
	all, sent, err := a.exchange(ctx)
	if err != nil {
		class, final := a.d.classOf(err)
		if final && len(all) > 0 && all[0].Placed {
			a.doubt, a.placed, a.place = false, true, all[0].Place
		}
		a.doubt = a.doubt || class == Unknown && !final && !sent.IsZero()
		if class == NoSession && !final && a.s != nil {
			a.d.sessions.missing(ctx, a.s)
			if err := a.d.lost(); err != nil {
				return nil, Position{}, err
			}
		}
		return nil, Position{}, err
	}
	a.doubt = false
	a.leavePast()
	if p := all[0]; p.Placed || p.Held || !p.Poll { // else an earlier Enter's place stays
		a.placed, a.place = p.Placed || p.Held, p.Place
	}
	if !all[0].Held {
		return nil, all[0], nil
	}
	// The validity rests on the session's proof: an old proof would give a short one.
	if a.s != nil {
		if err := a.d.sessions.prove(ctx, a.s, min(a.rs[0].TTL, a.s.ttl)/3); err != nil {
			return nil, Position{}, err
		}
		sent = a.s.provedAt()
	}
	grants := a.grant[:]
	if len(a.rs) > 1 {
		grants = make([]backend.Grant, len(a.rs))
	}
	for i, pos := range all {
		g := a.rs[i].Grant()
		g.Token, g.Nonce, g.Incarnation, g.SentAt = pos.Token, pos.Nonce, pos.Incarnation, sent
		g.MinHoldUntil, g.Queued, g.Generation = pos.MinHoldUntil, a.queued || pos.Queued, pos.Generation
		if a.s != nil {
			g.TTL = min(g.TTL, a.s.ttl)
		}
		if !pos.Last.IsZero() { // SentAt + TTL is not after the end of the hold
			g.SentAt = max(1, min(sent, pos.Last.Add(-g.TTL)))
		}
		if a.s != nil {
			if !a.d.sessions.keepHold(g.RequestID, a.s, g.Incarnation, "") {
				return nil, Position{}, ErrNoSession
			}
			a.d.sessions.promise(g, g.SentAt.Add(g.TTL))
		}
		grants[i] = g
	}
	return grants, all[0], nil
}

// exchange is the exchange of an Enter. The request records the attempt before it is sent, so that every Leave finds
// it until the Enter is answered.
func (a *attempt) exchange(ctx context.Context) ([]Position, backend.Instant, error) {
	d, s := a.d, a.s
	if d.oneEntry {
		if err := d.awaitRemoval(ctx, a.rs); err != nil {
			return nil, 0, err
		}
	}
	a.crossed = a.crossed || s == nil && a.unanswered && d.entering(a.rs[0].RequestID)
	for _, r := range a.rs {
		if s != nil && !d.sessions.keepHold(r.RequestID, s, "", a.name) {
			return nil, 0, ErrNoSession
		}
	}
	var all []Position
	var sent backend.Instant
	var late bool
	var err error
	if d.enters && !d.hedges() {
		all, sent, err = a.exchangeHere(ctx)
	} else {
		all, sent, late, err = a.exchangeHedged(ctx)
	}
	if class, final := d.classOf(err); s != nil && (late || class == Unknown && !final) && !sent.IsZero() {
		a.late = true
	} else if s != nil && !a.late {
		for _, r := range a.rs {
			d.sessions.settle(r.RequestID, a.name)
		}
	}
	if class, _ := d.classOf(err); !sent.IsZero() && (err == nil || late || class != NotDone) {
		a.again = true
	}
	a.push = ""
	a.unanswered = a.unanswered || err != nil || late
	return all, sent, err
}

// entering is the attempt's next Enter.
func (a *attempt) entering() Entering {
	return Entering{
		Request: a.rs[0], Session: a.s.binding(), Attempt: a.name, Again: a.again, Place: a.place, Handed: a.push,
	}
}

// enterSet sends the Enter e for all of rs.
func (d *Driver) enterSet(ctx context.Context, e Entering, rs []backend.Request) ([]Position, error) {
	all := make([]Entering, len(rs))
	for i, r := range rs {
		all[i], all[i].Request = e, r
	}
	return d.service.(Sets).EnterSet(ctx, all)
}

// exchangeHere is the exchange of a prompt Enter that is not hedged. It needs no memory that another exchange may use.
func (a *attempt) exchangeHere(ctx context.Context) (all []Position, sent backend.Instant, err error) {
	c, err := a.d.stepContext(ctx)
	if err != nil {
		return nil, 0, err
	}
	e := a.entering()
	e.Shared = a.d.takeOff(a.rs)
	sent = a.d.clock.Now()
	if e.Sent = sent; len(a.rs) > 1 {
		all, err = a.d.enterSet(c, e, a.rs)
	} else {
		all = a.position[:]
		all[0], err = a.d.service.Enter(c, e)
	}
	if err == nil {
		a.d.land(a.rs, all[0].Held)
		return all, sent, nil
	}
	rs := a.rs
	return all, sent, c.outcome(err, func() { a.d.land(rs, false) })
}

// exchangeHedged is the exchange of an Enter on other goroutines.
func (a *attempt) exchangeHedged(ctx context.Context) (all []Position, sent backend.Instant, late bool, err error) {
	d, rs, first := a.d, a.rs, a.entering()
	first.Shared = d.takeOff(rs)
	var held atomic.Bool
	end := sync.OnceFunc(func() { d.land(rs, held.Load()) }) // a Leave forbids a late hedge
	all, sent, late, err = hedgedUntil(ctx, d, d.enters, func(ctx context.Context, hedge bool) (all []Position, err error) {
		e := first
		e.Sent, e.Again = d.clock.Now(), e.Again || hedge
		a.pending.Add(1)
		if len(rs) > 1 {
			all, err = d.enterSet(ctx, e, rs)
		} else {
			all = make([]Position, 1)
			all[0], err = d.service.Enter(ctx, e)
		}
		if err == nil && all[0].Held {
			held.Store(true)
		}
		if class, final := d.classOf(d.stepError(ctx, err)); d.sessions != nil && (class != Unknown || final) &&
			a.pending.Add(-1) == 0 {
			d.sessions.answered(rs, e.Attempt) // although its caller may have left
		}
		return all, err
	}, end)
	if sent.IsZero() || err == nil && late {
		end()
	}
	return all, sent, late, err
}

// abandon ends an attempt without a hold. Entries known to be in the service are removed, in the background if that
// takes longer than abandonGrace. If there may be others, the error is backend.ErrUnknown, and the core releases
// them.
func (a *attempt) abandon(ctx context.Context, err error) error {
	place, crossed := a.place, a.crossed
	if rs := a.entries(a.placed || a.late || crossed); len(rs) > 0 && !a.doubt {
		removed := make(chan struct{})
		a.d.attend(rs)
		if a.s != nil {
			a.d.sessions.keepPlaces(rs, a.s)
		}
		if !a.d.gate.Go(func(work context.Context) {
			defer close(removed)
			defer a.d.depart(rs)
			var all sync.WaitGroup
			for i := range rs {
				all.Go(func() { a.d.cleanup(work, &rs[i], place, crossed) })
			}
			all.Wait()
		}) {
			a.d.depart(rs)
		} else {
			grace := time.NewTimer(abandonGrace)
			defer grace.Stop()
			select {
			case <-removed:
			case <-grace.C:
			}
		}
	}
	if a.s != nil && a.doubt {
		a.d.sessions.doubt(a.rs)
	}
	if kit.IsContext(err) && !a.doubt && a.refused != nil {
		err = fmt.Errorf("%w: %w", a.refused, err) // the problem of the service
	} else if kit.IsContext(err) && a.doubt && a.failed != nil {
		err = fmt.Errorf("%w, after: %v", err, a.failed)
	}
	if ended := a.d.ended(ctx); ended != nil && !errors.Is(err, ended) {
		err = errors.Join(ended, err)
	}
	switch {
	case !a.doubt || errors.Is(err, backend.ErrUnknown):
	case errors.Is(err, backend.ErrUnavailable): // true of the last exchange only, so it leaves the chain
		err = fmt.Errorf("%w: %v", backend.ErrUnknown, err)
	default:
		err = fmt.Errorf("%w: %w", backend.ErrUnknown, err)
	}
	return err
}

// entries ends the attempt, and returns the requests with an entry to remove. may: the attempt may have one.
func (a *attempt) entries(may bool) []backend.Request {
	switch {
	case a.d.oneEntry:
		a.end()
		return a.d.orphans(a.rs, may)
	case may:
		return a.rs
	}
	return nil
}

// orphans returns the requests of an ended attempt that may have an entry, from that attempt if may is set, or from an
// earlier one.
func (d *Driver) orphans(rs []backend.Request, may bool) (out []backend.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range rs {
		f := d.flights[rs[i].RequestID]
		if f.entry || may {
			out = append(out, rs[i])
		}
		f.entry = false
		d.flights[rs[i].RequestID] = f
	}
	return out
}

// beginRemoval reports whether a cleanup may send a Leave, which could end the hold of a later attempt: not while one
// runs, which then removes the entry, and not when one holds. Attempts that begin after that wait until endRemoval.
func (d *Driver) beginRemoval(g backend.Grant) bool {
	d.mu.Lock()
	f := d.flights[g.RequestID]
	free := f.running == 0
	if f.entry = f.entry || !free; free {
		if f.removals++; f.removals == 1 {
			f.removing = make(chan struct{})
		}
	}
	d.flights[g.RequestID] = f
	d.mu.Unlock()
	if h, known := d.sessions.hold(g); free && known && h.incarnation != "" {
		d.endRemoval(g.RequestID)
		return false
	}
	return free
}

func (d *Driver) endRemoval(requestID string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.flights[requestID]
	if f.removals--; f.removals == 0 {
		close(f.removing)
		f.removing = nil
	}
	d.flights[requestID] = f
}

// awaitRemoval waits until no Leave of a cleanup of rs is in progress.
func (d *Driver) awaitRemoval(ctx context.Context, rs []backend.Request) error {
	for i := range rs {
		d.mu.Lock()
		removing := d.flights[rs[i].RequestID].removing
		d.mu.Unlock()
		if removing == nil {
			continue
		}
		select {
		case <-removing:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// end notes that the attempt does not run any more.
func (a *attempt) end() {
	if !a.ended {
		a.ended = true
		a.d.run(a.rs, -1)
	}
}

// run counts the running attempts of rs.
func (d *Driver) run(rs []backend.Request, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range rs {
		f := d.flights[rs[i].RequestID]
		f.running += n
		d.flights[rs[i].RequestID] = f
	}
}

// cleanup removes the entries of an attempt, until the service has answered, the driver closes, or the TTL has passed.
// By then the service has removed them; with sessions, they expire with their session, which the other holds leave.
func (d *Driver) cleanup(ctx context.Context, r *backend.Request, place string, crossed bool) {
	g := r.Grant()
	for began, n := d.clock.Now(), 1; ; n++ {
		if d.oneEntry && !d.beginRemoval(g) {
			return
		}
		_, err := d.leave(ctx, g, place, crossed)
		if d.oneEntry {
			d.endRemoval(g.RequestID)
		}
		_, final := d.classOf(err)
		late := d.clock.Now().Sub(began) > g.TTL
		refused := errors.Is(err, backend.ErrDenied) || errors.Is(err, backend.ErrMisconfigured) // which may end
		answered := err == nil || final && kit.Classified(err) && !refused
		if answered || d.gate.Closed() || late {
			d.sessions.drop(g, err != nil && late)
			return
		}
		if kit.Sleep(ctx, d.retryPause(g.TTL)) != nil {
			return
		}
	}
}

// attend counts an attempt of rs, or its cleanup, until depart.
func (d *Driver) attend(rs []backend.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range rs {
		f := d.flights[rs[i].RequestID]
		f.attempts++
		f.shared = f.shared || f.attempts > 1
		d.flights[rs[i].RequestID] = f
	}
}

func (d *Driver) depart(rs []backend.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range rs {
		f := d.flights[rs[i].RequestID]
		f.attempts--
		d.put(rs[i].RequestID, f)
	}
}

// put stores a flight, if there is anything to store. mu is held.
func (d *Driver) put(requestID string, f flight) {
	if f.attempts > 0 || f.entering > 0 {
		d.flights[requestID] = f
		return
	}
	delete(d.flights, requestID)
}

// takeOff notes that an Enter of rs is in progress, until land, and reports whether their attempt shares one of the
// requests with another attempt.
func (d *Driver) takeOff(rs []backend.Request) (shared bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range rs {
		f := d.flights[rs[i].RequestID]
		f.entering++
		shared = shared || f.shared
		d.flights[rs[i].RequestID] = f
	}
	return shared
}

// land notes the end of an Enter of rs, and whether it was answered with a hold.
func (d *Driver) land(rs []backend.Request, held bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range rs {
		f := d.flights[rs[i].RequestID]
		f.granted = f.granted || held
		if f.entering--; f.entering == 0 && f.landed != nil {
			close(f.landed)
			f.landed = nil
		}
		d.put(rs[i].RequestID, f)
	}
}

// granted reports whether an attempt of a request was answered with a hold while another one, or its cleanup, was alive.
func (d *Driver) granted(requestID string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flights[requestID].granted
}

// entering reports whether an Enter of a request is in progress.
func (d *Driver) entering(requestID string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flights[requestID].entering > 0
}

// awaitLanding waits until no Enter of a request is in progress, so that a Leave cannot overtake it.
func (d *Driver) awaitLanding(ctx context.Context, requestID string) error {
	d.mu.Lock()
	f := d.flights[requestID]
	if f.entering > 0 && f.landed == nil {
		f.landed = make(chan struct{})
		d.flights[requestID] = f
	}
	d.mu.Unlock()
	if f.entering == 0 {
		return nil
	}
	select {
	case <-f.landed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// attemptNames gives each attempt a name that no other attempt of any client has.
type attemptNames struct {
	client sync.Once
	prefix string
	last   atomic.Uint64
}

func (n *attemptNames) next() string {
	n.client.Do(func() { n.prefix = rand.Text()[:16] })
	return string(strconv.AppendUint(append(make([]byte, 0, 32), n.prefix...), n.last.Add(1), 36))
}
