package lead

// The ends of sessions, minimum holds and maximum holds. deadlines.go has the heap, checkpoint.go the records in the
// log for the next leader.

import (
	"container/heap"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/notify"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// grace is added to the TTL of each session, for timers that are late at the leader and at the client.
const grace = 50 * time.Millisecond

// retryAfter is the pause before a failed proposal is retried.
const retryAfter = 100 * time.Millisecond

// endsAtOnce bounds the ends that are proposed at a time, so that many dead clients do not delay live clients.
const endsAtOnce = 256

const (
	// keptAtOnce bounds the sessions of one checkpoint.
	keptAtOnce = 1024
	// keepPace bounds the rate of checkpoints: at most one session becomes kept in each keepPace, on average. See silence.
	keepPace = 10 * time.Millisecond
	// clockEvery is the interval at which a leader records the time while there are kept sessions: a restarted member
	// knows the cluster's time only from the log.
	clockEvery = time.Second
	// reconnect is the minimum time for which a new leader lets a session live, so that its client can find the leader.
	reconnect = time.Second
)

// Timekeeper times sessions, minimum holds and maximum holds during one leadership. Nothing else times them. A nil
// *Timekeeper has no deadlines: it is for a member that does not lead.
//
// A session ends no earlier than TTL + grace after the receipt of the last request that renewed it. Once its end is
// proposed it can no longer be renewed: the log may already have the end.
//
// A session is free or kept. A free session is renewed in memory. A session without a renewal for some time becomes
// kept, as does each free session that a new leader finds: its deadline goes into the log. From then on only a request
// through the log renews the session, and makes it free again. So a new leader knows the deadlines of kept sessions,
// and gives each other session its full TTL once. See docs/decisions/2026-11-22-what-is-left-of-a-lease.md. A new
// leader gives each hold its full minimum and maximum.
//
// Timekeeper has one heap and one timer. A renewal only changes a deadline; the heap is updated when the old deadline
// is reached.
type Timekeeper struct {
	now func() time.Time
	// propose sends a command through the log and then calls done. If it returns an error, it does not call done.
	propose func(c machine.Command, done func(error)) error

	clock replica.Clock // the cluster's clock; set before inherit
	alone atomic.Bool   // no other member can lead

	mu       sync.Mutex
	keeps    bool // all members support deadlines
	kept     int  // the number of kept sessions
	sessions map[machine.SessionID]*deadline
	minimums map[fencing.Token]*deadline
	maximums map[fencing.Token]*deadline
	heap     deadlineHeap
	wake     notify.Signal // the first deadline has moved forward
}

func newTimekeeper(now func() time.Time, propose func(machine.Command, func(error)) error) *Timekeeper {
	return &Timekeeper{
		now: now, propose: propose,
		sessions: map[machine.SessionID]*deadline{}, minimums: map[fencing.Token]*deadline{},
		maximums: map[fencing.Token]*deadline{},
		wake:     notify.New(),
	}
}

// inherit times the sessions and holds of earlier leaders. Sessions get their remaining time or their full TTL, see
// found; minimum and maximum holds get their full time.
func (k *Timekeeper) inherit(m *machine.Machine) {
	now := k.now()
	for _, s := range m.Sessions() {
		k.found(s.SessionTTL, now)
	}
	for _, h := range m.Timed() {
		k.Granted(h.Name, h.Token, h.MinHold)
		k.Bounded(h.Name, h.Token, h.MaxHold)
		if h.Lingering {
			k.linger(h.Name, h.Token)
		}
	}
}

// found times a session of an earlier leader. If the log has its deadline, the session gets the remaining time, but at
// least enough for its client to find this leader. Otherwise the earlier leader may have renewed it in memory until
// just now, so it gets its full TTL.
func (k *Timekeeper) found(s machine.SessionTTL, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := &deadline{session: s.ID, ttl: s.TTL, at: now.Add(s.TTL + grace)}
	if s.Due != 0 {
		d.kept = true
		k.kept++
		due, least := k.clock.When(s.Due), now.Add(min(s.TTL, reconnect))
		if due.Before(least) {
			due = least
		}
		if due.Before(d.at) {
			d.at = due
		}
	}
	k.sessions[s.ID] = d
	k.push(d)
}

// Opened times a session that the log has opened. receipt is the time at which the leader received the request. If the
// session was already open, Opened renews it as Logged does; it returns false if that is impossible.
func (k *Timekeeper) Opened(id machine.SessionID, ttl time.Duration, receipt time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.sessions[id]; d != nil {
		return k.free(d, receipt)
	}
	d := &deadline{session: id, ttl: ttl}
	d.renew(receipt)
	k.sessions[id] = d
	k.push(d)
	return true
}

// Renew renews a free session with a request that the leader received at receipt. It reports whether it did.
func (k *Timekeeper) Renew(id machine.SessionID, receipt time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.sessions[id]
	if d == nil || d.ending || d.kept {
		return false
	}
	d.renew(receipt)
	return true
}

// Logged renews a session with a request that has gone through the log, which makes a kept session free. It reports
// whether it did. It must be called in the order of the log.
func (k *Timekeeper) Logged(id machine.SessionID, receipt time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.sessions[id]
	return d != nil && k.free(d, receipt)
}

// free renews d and makes it free, unless its end has been proposed, or a checkpoint in progress may follow in the log.
// The caller holds k.mu.
func (k *Timekeeper) free(d *deadline, receipt time.Time) bool {
	if d.ending || d.writing {
		return false
	}
	if d.kept {
		d.kept, d.unkept = false, time.Time{}
		k.kept--
	}
	d.renew(receipt)
	k.move(d)
	return true
}

// IsKept reports whether only requests through the log renew the session.
func (k *Timekeeper) IsKept(id machine.SessionID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.sessions[id]
	return d != nil && d.kept
}

// next returns the instant of the next action for d. The caller holds k.mu.
func (k *Timekeeper) next(d *deadline) time.Time {
	next := d.at
	switch {
	case !k.keeps || d.token != 0 || d.writing || d.ending:
		return next
	case !d.kept:
		next = d.renewed.Add(k.silence(d.ttl))
	case !d.unkept.IsZero():
		next = d.unkept
	}
	if next.After(d.at) {
		return d.at
	}
	return next
}

// Ended forgets a session that the log has ended.
func (k *Timekeeper) Ended(id machine.SessionID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.sessions[id]; d != nil {
		k.forget(d)
		k.remove(d)
	}
}

// ending reports whether the end of the session has been proposed.
func (k *Timekeeper) ending(id machine.SessionID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.sessions[id]
	return d != nil && d.ending
}

// Left returns the remaining time of a session; zero if unknown.
func (k *Timekeeper) Left(id machine.SessionID) time.Duration {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.sessions[id]; d != nil {
		return max(0, d.at.Sub(k.now()))
	}
	return 0
}

// Granted times the minimum of a hold that the log has just granted.
func (k *Timekeeper) Granted(name string, token fencing.Token, minimum time.Duration) {
	if minimum <= 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.minimums[token] == nil {
		d := &deadline{token: token, name: name, at: k.now().Add(minimum)}
		k.minimums[token] = d
		k.push(d)
	}
}

// Bounded times the maximum of a hold, from now on. It does nothing if the hold already has a maximum, or if maximum is
// zero. For a grant it is called after the message to the client was sent. The client counts the maximum from a proof
// that the server sent before that message, so from an earlier time.
func (k *Timekeeper) Bounded(name string, token fencing.Token, maximum time.Duration) {
	if maximum <= 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.maximums[token] == nil {
		d := &deadline{token: token, name: name, maximum: true, at: k.now().Add(maximum + grace)}
		k.maximums[token] = d
		k.push(d)
	}
}

// Last returns the remaining maximum of a hold; maximum itself if the hold is not timed yet; 0 without a maximum.
func (k *Timekeeper) Last(token fencing.Token, maximum time.Duration) time.Duration {
	if maximum <= 0 {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.maximums[token]; d != nil {
		return max(1, d.at.Sub(k.now())-grace)
	}
	return maximum
}

// untimed removes the deadline of the maximum of a hold that has ended.
func (k *Timekeeper) untimed(token fencing.Token) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.maximums[token]; d != nil {
		delete(k.maximums, token)
		k.remove(d)
	}
}

// Closed returns the remaining minimum of a hold; 0 if there is none.
func (k *Timekeeper) Closed(token fencing.Token) time.Duration {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.minimums[token]; d != nil {
		return max(0, d.at.Sub(k.now()))
	}
	return 0
}

// AnyClosed reports whether any hold has a remaining minimum.
func (k *Timekeeper) AnyClosed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.minimums) > 0
}

// linger records that a hold has ended, and that only its minimum keeps the name closed.
func (k *Timekeeper) linger(name string, token fencing.Token) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.minimums[token]
	if d == nil { // the minimum is already over
		d = &deadline{token: token, name: name, at: k.now()}
		k.minimums[token] = d
		k.push(d)
	}
	d.lingering = true
}

// run proposes due ends and checkpoints until ctx ends.
func (k *Timekeeper) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	tick := time.NewTicker(clockEvery)
	defer tick.Stop()
	for {
		select {
		case <-timer.C:
		case <-k.wake:
		case <-tick.C:
			if k.anyKept() {
				k.checkpoint(nil, nil)
			}
		case <-ctx.Done():
			return
		}
		over, silent := k.due()
		for _, d := range over {
			k.end(d)
		}
		if len(silent) > 0 {
			k.checkpoint(silent, nil)
		}
		if wait, ok := k.wait(); ok {
			timer.Reset(wait)
		}
	}
}

func (k *Timekeeper) anyKept() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.kept > 0
}

// due returns the deadlines to end now, and the sessions to keep. From now on, the ending sessions cannot be renewed,
// and the kept sessions cannot be renewed in memory.
func (k *Timekeeper) due() (over, silent []*deadline) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	for len(k.heap) > 0 && len(over) < endsAtOnce && len(silent) < keptAtOnce && !k.heap[0].seen.After(now) {
		d := k.heap[0]
		switch next := k.next(d); {
		case next.After(now): // renewed in the meantime
			d.seen = next
			heap.Fix(&k.heap, d.index)
			continue
		case d.at.After(now):
			if !d.kept {
				k.kept++
			}
			d.kept, d.writing = true, true
			silent = append(silent, d)
			k.move(d)
			continue
		}
		heap.Pop(&k.heap)
		if d.token != 0 && !d.maximum && !d.lingering {
			delete(k.minimums, d.token) // the hold outlived its minimum
			continue
		}
		d.ending = true
		over = append(over, d)
	}
	return over, silent
}

// end proposes the end of d. hasEnded retries until the log has it: a leader may be unable to write for some time, and
// stay leader.
func (k *Timekeeper) end(d *deadline) {
	c := machine.Command{Op: machine.OpFree, Name: d.name, Token: d.token, Linger: d.maximum && k.Closed(d.token) > 0}
	if d.token == 0 {
		c = machine.Command{Op: machine.OpExpire, Session: d.session, Linger: k.AnyClosed()}
	}
	if err := k.propose(c, func(err error) { k.hasEnded(d, err) }); err != nil {
		k.hasEnded(d, err)
	}
}

// hasEnded handles the result of the proposed end. After an error, the end is proposed again after retryAfter.
func (k *Timekeeper) hasEnded(d *deadline, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case err != nil && d.maximum && k.maximums[d.token] != d: // the hold has ended
	case err != nil:
		d.at = k.now().Add(retryAfter)
		k.push(d)
	case d.maximum:
		delete(k.maximums, d.token)
	case d.token != 0:
		delete(k.minimums, d.token)
	case k.sessions[d.session] == d:
		k.forget(d)
	}
}

// forget removes an ended session. The caller holds k.mu.
func (k *Timekeeper) forget(d *deadline) {
	delete(k.sessions, d.session)
	if d.kept {
		k.kept--
	}
}

func (k *Timekeeper) wait() (time.Duration, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.heap) == 0 {
		return 0, false
	}
	return max(0, k.heap[0].seen.Sub(k.now())), true
}
