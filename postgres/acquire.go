// This file takes locks: one name (Acquire) or several in one commit (AcquireAll), from the check of the request to
// the grant or its error.
//
// The path of an acquire is admit, which counts it in; acquire, which repeats the request until there is a definite
// answer; acquireOn, which sends it once and waits for its turn (wait.go); put, which lets the statement outlive its
// caller; and granted, which reads the server's answer. together.go decides whether the statement is shared with
// others. The functions of migrations/0001_locks.sql decide who holds and who waits, under the lock of the name's row;
// this file does not take part in that.
//
// A statement that was sent may commit although its answer never arrives. The end of such a hold:
//
//   - the caller, or the core, repeats the request id and gets the same hold;
//   - or the call's own end, giveUp, or the core's Release with that id releases it, after waiting for the answer
//     (answered); a statement that runs even later is refused (migrations/0008_sets.sql);
//   - or neither happens: the session is then in doubt, and after its next renewal, which comes about three times per
//     TTL, sweep ends every hold that no call and no holder of this client knows;
//   - or the client has stopped, and the hold ends with its session.

package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// Acquire takes a lock: one statement and one commit for a free name, or a place in the name's queue. The release
// before grants to the head of the queue in its own transaction and then notifies it. Without r.Wait the error for a
// held name comes immediately, with a holder and, as RetryAfter, the time after which its hold ends unless renewed.
//
// r.TTL is between 1 s and 24 h, in milliseconds. The grant's validity counts from the instant at which the session
// was last proved to live. A repeated RequestID gets the same hold with the same token. If ctx ends, Acquire
// returns within about 30 ms; the hold or place of the request is released in the background.
//
// Errors wrap backend.ErrHeld, ErrLimitMismatch, ErrDeadlock, ErrUnavailable (not sent, or the server rolled it back), ErrUnknown
// (the commit may have happened, and the hold could not be released in time), ErrMisconfigured, ErrHistoryLost,
// ErrClosed, or ctx's error. Acquire is safe for concurrent use; calls that come together may share a statement.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := d.admit(ctx, r); err != nil {
		return backend.Grant{}, callError("acquire", r.Name, err)
	}
	defer d.gate.Leave()
	leave := d.calling(r.RequestID)
	defer leave()
	g, err := d.acquire(ctx, &r, leave)
	if err != nil {
		return backend.Grant{}, callError("acquire", r.Name, err)
	}
	return g, nil
}

// admit counts a call in, if its requests are valid. gate.Leave follows unless it fails.
func (d *Driver) admit(ctx context.Context, rs ...backend.Request) error {
	// Validation needs no server: invalid requests are refused even while no server answers.
	if err := d.validate(rs...); err != nil {
		return err
	}
	return d.enter(ctx)
}

// calling marks requests of calls in progress, until done is called: a sweep ends unknown holds, and must not end a
// hold that such a call is about to get.
func (d *Driver) calling(ids ...string) (done func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	// Calls are counted, since two calls may send the same request concurrently.
	for _, id := range ids {
		d.calls[id]++
	}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, id := range ids {
			if d.calls[id]--; d.calls[id] == 0 {
				delete(d.calls, id)
			}
		}
	})
}

// shared reports whether a request has a hold here, or another call that asks for it.
func (d *Driver) shared(k key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.holds[k] != nil || d.calls[k.requestID] > 0
}

// acquire repeats the request until there is a definite answer: the request id makes a repetition the same request. w
// is entered before the first statement is sent, since the notification of a grant can overtake the answer "waiting".
//
// sent records over all tries whether a request may have taken effect: the error of the last try covers only that try.
func (d *Driver) acquire(ctx context.Context, r *backend.Request, leave func()) (backend.Grant, error) {
	var w *waiter
	if r.Wait {
		w = d.waitFor(r)
		w.leave = leave
		defer w.stop()
	}
	// sent: a request may have taken effect without an answer. lapsed: its session ended, and its minimum may still bind.
	sent, lapsed := false, false
	for {
		err := d.dropLapsed(ctx, lapsed, *r)
		if err == nil {
			lapsed = false
			var g backend.Grant
			if g, err = d.tryOne(ctx, r, w, sent); err == nil {
				return g, nil
			}
		}
		// The session ended before the request took effect; the next session is made immediately.
		if errors.Is(err, errNoSession) && ctx.Err() == nil {
			lapsed = sent || errors.Is(err, errLapsed)
			continue
		}
		sent = sent || carriedOut(err)
		// The pause lets the server, or the conflicting transaction, finish.
		if again(err) && d.pause(ctx, kit.RetryPause(time.Second)) {
			continue
		}
		// The last try may have had no effect; an earlier try may have had one.
		if sent && !errors.Is(err, backend.ErrUnknown) && !definite(err) {
			err = fmt.Errorf("%w: %w", backend.ErrUnknown, err)
		}
		if ctx.Err() != nil && !errors.Is(err, ctx.Err()) && !definite(err) {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return backend.Grant{}, err
	}
}

// tryOne sends the request once, on a live session that was proved within the last half of its TTL.
func (d *Driver) tryOne(ctx context.Context, r *backend.Request, w *waiter, sent bool) (backend.Grant, error) {
	s, err := d.join(ctx, r.TTL)
	if err != nil {
		return backend.Grant{}, err
	}
	defer s.Leave(1)
	return d.acquireOn(ctx, s, r, w, sent)
}

// errLapsed: the session is over, and with it a grant that no caller got.
var errLapsed = fmt.Errorf("a late grant has already expired: %w", errNoSession)

// dropLapsed drops, if lapsed, the minimum holds of grants of this call that no caller received: they would refuse the
// next try.
func (d *Driver) dropLapsed(ctx context.Context, lapsed bool, rs ...backend.Request) error {
	if !lapsed || rs[0].MinHold == 0 {
		return nil
	}
	for i := range rs {
		if _, err := d.ask(ctx, d.sql.release, rs[i].Name, rs[i].RequestID, int64(0), false, d.clockKnown()); err != nil {
			return err
		}
	}
	return nil
}

// acquireOn sends the request once, on session s, and waits for its turn if the request waits. w is nil for an attempt
// without Wait. If sent, an earlier statement of the call may still run: the server then refuses it from now on. A
// place in the queue that ended with its session is errLapsed: the caller then uses another session.
func (d *Driver) acquireOn(
	ctx context.Context, s *session, r *backend.Request, w *waiter, sent bool,
) (backend.Grant, error) {
	// From here on the waiter's place is on this session: its end wakes the waiter.
	if w != nil {
		w.place(s)
	}
	var a answer
	err := d.put(ctx, s, []key{{r.Name, r.RequestID}}, func(ctx context.Context) (err error) {
		args := append(arguments(s, r), r.Wait, r.MinHold.Milliseconds(), d.clockKnown())
		switch {
		case sent:
			a, err = d.ask(ctx, d.sql.acquireAgain, append(args, slices.Concat([]string{}, r.Under))...)
		case r.Wait && len(r.Under) > 0:
			a, err = d.ask(ctx, d.sql.acquireUnder, append(args, r.Under)...)
		default:
			a, err = d.acquires.ask(ctx, r.MinHold == 0, args...)
		}
		return err
	})
	if err != nil {
		if w != nil && ctx.Err() != nil {
			return backend.Grant{}, d.giveUp(ctx, w, err)
		}
		return backend.Grant{}, err
	}
	if a.state == "waiting" {
		// Until a notification can arrive, the loop looks often while this queue moves.
		if !d.hears.Load() {
			d.lookAtAll()
		}
		if a, err = w.wait(ctx); err != nil {
			if errors.Is(err, errGone) {
				return backend.Grant{}, errLapsed // repeat the request
			}
			return backend.Grant{}, d.giveUp(ctx, w, err)
		}
		a.queued = true
	}
	return d.granted(ctx, s, r, a)
}

// lateTime bounds a statement after its caller has left. An immediate cancellation would be worse: pgx ends the
// connection, and the server may still run the statement, later than the cleanup behind it.
const lateTime = 2 * time.Second

// put sends a request for keys on s, and returns with the answer or with the end of ctx. The statement continues after
// that for lateTime: a cleanup must come after the server has run it, and waits for it (answered). An earlier cleanup
// would find no hold, and the name would stay closed until the next sweep.
//
// The results of ask belong to the caller only if put returns ask's error; after the end of ctx the goroutine may
// still write them. That goroutine ends with ask. Its channel in Driver.asking is closed after the earlier channels,
// so that waiting for the last channel is waiting for all.
func (d *Driver) put(ctx context.Context, s *session, keys []key, ask func(context.Context) error) error {
	done, result := make(chan struct{}), make(chan error, 1)
	// before has the earlier calls of the same requests that are still in progress.
	var before []chan struct{}
	d.mu.Lock()
	for _, k := range keys {
		if c := d.asking[k]; c != nil {
			before = append(before, c)
		}
		d.asking[k] = done
	}
	d.mu.Unlock()
	// over ends the wait of cleanups. It runs once: in the goroutine, or here if the goroutine could not be started.
	over := func() {
		for _, c := range before {
			<-c
		}
		d.mu.Lock()
		for _, k := range keys {
			if d.asking[k] == done {
				delete(d.asking, k)
			}
		}
		d.mu.Unlock()
		close(done)
	}
	started := d.gate.Go(func(work context.Context) {
		defer over()
		bounded, cancel := context.WithCancel(work)
		defer cancel()
		// The end of the caller's context only starts the timer.
		stop := context.AfterFunc(ctx, func() { time.AfterFunc(lateTime, cancel) })
		defer stop()
		err := ask(bounded)
		// The answer may get lost: the session sweeps the hold.
		if err != nil || ctx.Err() != nil {
			s.doubted(err)
		}
		result <- err
	})
	if !started {
		over()
		return backend.ErrClosed
	}
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err())
	}
}

// answered waits until no answer to a request is outstanding, or ctx ends. It does not see the answers.
func (d *Driver) answered(ctx context.Context, k key) {
	d.mu.Lock()
	asking := d.asking[k]
	d.mu.Unlock()
	if asking == nil {
		return
	}
	select {
	case <-asking:
	case <-ctx.Done():
	}
}

// arguments returns the arguments of the SQL function acquire, in its order: a row of the table holds, as far as the
// client knows it.
func arguments(s *session, r *backend.Request) []any {
	return []any{
		r.Name, r.RequestID, r.HoldID, s.id, r.Owner, int(r.Kind), r.Permits, r.Limit, metadataText(r.Metadata),
	}
}

// requests returns the columns of the arguments of several calls, each an array, as acquire_free and acquire_all take
// them.
func requests(calls []*call) []any {
	return []any{
		column[string](calls, 0), column[string](calls, 1), column[string](calls, 2), column[string](calls, 3),
		column[string](calls, 4), column[int](calls, 5), column[int](calls, 6), column[int](calls, 7),
		column[*string](calls, 8),
	}
}

// metadataText returns metadata as JSON, or nil if it is empty, which is stored as null.
func metadataText(m map[string]string) *string {
	if len(m) == 0 {
		return nil
	}
	text, _ := json.Marshal(m) // a map of strings
	s := string(text)
	return &s
}

// mismatch returns the present use of a name. It asks the server once more, to inform people: the other user of the
// name may have left meanwhile, and without an answer the error names no user.
func (d *Driver) mismatch(ctx context.Context, name string) error {
	e := &backend.LimitError{Name: name}
	var kind int16
	err := d.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&kind, &e.Limit, &e.Holder) }, d.sql.use, name)
	if err != nil {
		return &backend.LimitError{Name: name}
	}
	e.Kind = backend.Kind(kind)
	return e
}

// granted returns a grant, or an error, for the server's answer.
//
// The session is proved again if the answer took so long that its last proof is older than half a TTL, as after a wait
// for the row of the name: the grant would otherwise begin with little time left. The hold is entered in Driver.holds
// before the caller receives it, so that an immediate loss reaches its holder; the core takes losses before Acquire
// has returned.
func (d *Driver) granted(ctx context.Context, s *session, r *backend.Request, a answer) (backend.Grant, error) {
	switch a.state {
	case "granted":
	case "no-session":
		return backend.Grant{}, s.expired(ctx)
	case "mismatch":
		return backend.Grant{}, d.mismatch(ctx, r.Name)
	case "held":
		return backend.Grant{}, &backend.HeldError{
			Name: r.Name, Holder: a.holder, HoldID: a.holdID, RetryAfter: time.Duration(a.retry) * time.Millisecond,
		}
	case "deadlock":
		return backend.Grant{}, deadlock(r, a)
	default:
		return backend.Grant{}, fmt.Errorf("%w: the server answered %q", backend.ErrUnknown, a.state)
	}
	if err := s.fresh(ctx); err != nil { // for example after a long wait for the row of the name
		if errors.Is(err, errNoSession) {
			err = errLapsed
		}
		return backend.Grant{}, err
	}
	// The validity rests on the session's proof, which may be older than this request: the row of the hold lives as
	// long as the session.
	proved := s.provedAt()
	g := r.Grant()
	g.TTL, g.SentAt, g.Queued = s.ttl, proved, a.queued
	g.Token = tokenOf(r.Kind, a.token)
	g.Incarnation = g.Token.String()
	g.Nonce = nonceOf(a.nonce)
	// Counted from the answer: the minimum binds others, and its end on our clock is only a hint for Release.
	if a.minLeft > 0 && r.MinHold > 0 {
		g.MinHoldUntil = d.clock.Now().Add(time.Duration(a.minLeft) * time.Millisecond)
	}
	d.keep(s, r, g)
	return g, nil
}

// deadlock returns the cycle that a request would have closed. The answer has a link for each blocker on the way: the
// name that the link before it waits for. The last one is a hold of the request's caller.
func deadlock(r *backend.Request, a answer) error {
	last := len(a.cycleNames) - 1
	e := &backend.DeadlockError{Cycle: []backend.DeadlockEdge{
		{Owner: r.Owner, Holds: a.cycleNames[last], Wants: a.cycleNames[0]},
	}}
	for i := range last {
		e.Cycle = append(e.Cycle, backend.DeadlockEdge{
			Owner: a.cycleOwners[i], Holds: a.cycleNames[i], Wants: a.cycleNames[i+1],
		})
	}
	return e
}

// tokenOf returns the token of a hold: the number that the server computed in the UPDATE that grants, marked unless
// the hold is exclusive. The number is a position in the server's history and not a count, because a counter in a row,
// and a sequence, fall back when a lagging standby is promoted, and reissue tokens (TestAsynchronousFailover;
// TestMutants has drivers that do so).
func tokenOf(kind backend.Kind, order int64) fencing.Token {
	token := fencing.Token(order)
	if kind != backend.KindExclusive {
		token = token.NotExclusive()
	}
	return token
}

// nonceOf reads a nonce as the database writes it: a UUID, with or without hyphens. It is zero for a hold without one,
// from an earlier version.
func nonceOf(text string) fencing.Nonce {
	n, _ := fencing.ParseNonce(strings.ReplaceAll(text, "-", ""))
	return n
}

// giveUpTime bounds a call's wait for its outcome after its context has ended. The contract allows 50 ms (clause C2).
const giveUpTime = 30 * time.Millisecond

// giveUp releases the place in the queue of a request whose caller has left, or the hold that it was granted
// meanwhile, unless another attempt of the same request has it: an attempt of this client, in progress or granted, or
// of another client. It first waits for the answer to the request, since a release that overtakes it would find no
// hold. An outcome that is unknown after giveUpTime is ErrUnknown; the release continues in the background, for
// callTime at most. cause is the reason for the end of the wait.
func (d *Driver) giveUp(ctx context.Context, w *waiter, cause error) error {
	done, r := make(chan error, 1), w.r
	w.leave()
	d.gate.Go(func(work context.Context) {
		bounded, cancel := context.WithTimeout(work, callTime)
		defer cancel()
		d.answered(bounded, key{r.Name, r.RequestID})
		if d.shared(key{r.Name, r.RequestID}) {
			done <- nil
			return
		}
		_, err := d.ask(bounded, d.sql.leave, r.Name, r.RequestID, d.id+"-", d.clockKnown())
		done <- err
	})
	// Not bounded by ctx, which has ended.
	patience := time.NewTimer(giveUpTime)
	defer patience.Stop()
	var err error
	select {
	case err = <-done:
	case <-patience.C:
		err = errors.New("the place in the queue is released in the background")
	}
	ended := ctx.Err()
	if ended == nil {
		ended = cause // the driver is closing
	}
	// The place has certainly ended. If the outcome of the request itself is unknown, a late delivery may still come.
	if err == nil && !errors.Is(cause, backend.ErrUnknown) {
		return ended
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, ended)
}

// AcquireAll acquires all names or no name, in one statement and one commit, and returns the grants in the order of
// rs. The requests agree in TTL, Wait and MinHold. The rows of the names are locked in one order, that of their
// bytes, so that two sets never wait for each other in a circle.
//
// A waiting set retries every 25 to 50 ms and keeps no place in the queues, since a set at the head of one
// queue would close that name while it waits for another; waiters for one name go first. Errors are as for Acquire. If
// the set was granted to an earlier delivery of the statement and has ended since, also in part, the error is ErrUnknown
// (migrations/0008_sets.sql).
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	name := ""
	if len(rs) > 0 {
		name = rs[0].Name
	}
	grants, err := d.acquireAll(ctx, rs)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	return grants, nil
}

// acquireAll is AcquireAll without the name of the call: it retries until the set is granted or refused, or ctx ends.
func (d *Driver) acquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if err := d.admit(ctx, rs...); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	ids := make([]string, len(rs))
	for i := range rs {
		ids[i] = rs[i].RequestID
	}
	defer d.calling(ids...)()
	sent, lapsed := false, false // as in acquire
	for {
		var grants []backend.Grant
		err := d.dropLapsed(ctx, lapsed, rs...)
		if err == nil {
			lapsed = false
			grants, err = d.tryAll(ctx, rs)
		}
		switch {
		case err == nil:
			return grants, nil
		case errors.Is(err, errNoSession) && ctx.Err() == nil:
			lapsed = sent || errors.Is(err, errLapsed)
		case again(err):
			// A repetition is the same request.
			sent = sent || carriedOut(err)
		case !rs[0].Wait || !errors.Is(err, backend.ErrHeld):
			return nil, err
		}
		if !d.pause(ctx, kit.RetryPause(time.Second)) {
			if d.gate.Closed() {
				return nil, backend.ErrClosed
			}
			// The last statement had no answer: the set may have been granted.
			if carriedOut(err) {
				return nil, fmt.Errorf("%w: %w: %w", backend.ErrUnknown, ctx.Err(), err)
			}
			return nil, ctx.Err()
		}
	}
}

// tryAll sends one request for all of rs. The server answers once for each name, in the order of the names, or with
// one answer that refuses all.
func (d *Driver) tryAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	s, err := d.join(ctx, rs[0].TTL)
	if err != nil {
		return nil, err
	}
	defer s.Leave(1)
	n := len(rs)
	// together never sends these calls; requests makes columns of them.
	keys, calls := make([]key, n), make([]*call, n)
	for i := range rs {
		keys[i] = key{rs[i].Name, rs[i].RequestID}
		calls[i] = &call{args: arguments(s, &rs[i])}
	}
	var answers []answer
	before := d.position()
	err = d.put(ctx, s, keys, func(ctx context.Context) error {
		err := d.query(ctx, func(rows pgx.Rows) error {
			var a answer
			err := a.scan(rows)
			answers = append(answers, a)
			return err
		}, d.sql.acquireAll, append(requests(calls), rs[0].MinHold.Milliseconds(), d.clockKnown())...)
		for i := range answers {
			d.wake(answers[i].wake)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	// order[i] is the request of the i-th answer. The answers come in the order of the names.
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return strings.Compare(rs[a].Name, rs[b].Name) })
	grants := make([]backend.Grant, n)
	for i, a := range answers {
		// Even a grant is worthless from a server that has lost its history.
		if err := d.saw(before, a.here); err != nil {
			return nil, err
		}
		r := &rs[order[min(i, n-1)]]
		if j := slices.IndexFunc(rs, func(r backend.Request) bool { return r.Name == a.name }); j >= 0 {
			r = &rs[j]
		}
		g, err := d.granted(ctx, s, r, a)
		if err != nil {
			return nil, err
		}
		grants[order[i]] = g
	}
	if len(answers) != n {
		return nil, fmt.Errorf("%w: the server answered %d of %d requests", backend.ErrUnknown, len(answers), n)
	}
	return grants, nil
}
