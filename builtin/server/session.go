package server

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"github.com/fencelock/fencelock/builtin/machine"
	"github.com/fencelock/fencelock/fencing"
)

// grace is what a session gets beyond its TTL, for timers that are late here and there.
const grace = 50 * time.Millisecond

// retryAfter is when the end of a session is proposed again if the log had no room for it.
const retryAfter = 100 * time.Millisecond

// endsAtOnce bounds how many ends are proposed in one go, so that a crowd of dead clients does not delay the living.
const endsAtOnce = 256

// timekeeper knows, for one term of leadership, when sessions and minimum holds end. Nobody else times them.
//
// A session ends no earlier than TTL + grace after the receipt of the last request that renewed it. From the moment at
// which its end is proposed it is not renewed any more: the end may be in the log already. A new leader does not know
// when a session was renewed last, so it gives each its full TTL; and a name its full minimum.
//
// It has one heap and one timer. Renewals only move a deadline; the heap follows when the old one is reached.
type timekeeper struct {
	now func() time.Time
	// propose sends a command through the log and then calls done; or refuses it.
	propose func(c machine.Command, done func(error)) error

	mu       sync.Mutex
	sessions map[machine.SessionID]*deadline
	minimums map[fencing.Token]*deadline
	heap     deadlineHeap
	wake     chan struct{} // has room for one: the first deadline has moved forward
}

// deadline is the end of a session or of a minimum hold.
type deadline struct {
	at    time.Time // when it is due
	seen  time.Time // where the heap believes it to be: never after at
	index int       // in the heap

	session machine.SessionID
	ttl     time.Duration
	ending  bool // its end is proposed

	token     fencing.Token // not zero: a minimum hold
	name      string
	lingering bool // nobody holds it any more: the name is freed at the deadline
}

func newTimekeeper(now func() time.Time, propose func(machine.Command, func(error)) error) *timekeeper {
	return &timekeeper{
		now: now, propose: propose,
		sessions: map[machine.SessionID]*deadline{}, minimums: map[fencing.Token]*deadline{}, wake: make(chan struct{}, 1),
	}
}

// inherit gives all that a new leader finds its full time.
func (k *timekeeper) inherit(m *machine.Machine) {
	now := k.now()
	for _, s := range m.Sessions() {
		k.opened(s.ID, s.TTL, now)
		if all, ok := m.Session(s.ID); ok {
			for _, h := range all.Holds {
				k.granted(h.Name, h.Token, h.MinHold)
			}
		}
	}
	for _, h := range m.Lingering() {
		k.granted(h.Name, h.Token, h.MinHold)
		k.linger(h.Name, h.Token)
	}
}

// opened times a session that the log has opened; receipt is when the request for it came.
// It reports whether the session lives on: one that was open before may be about to end.
func (k *timekeeper) opened(id machine.SessionID, ttl time.Duration, receipt time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.sessions[id]; d != nil {
		return d.prolong(receipt)
	}
	d := &deadline{session: id, ttl: ttl, at: receipt.Add(ttl + grace)}
	k.sessions[id] = d
	k.push(d)
	return true
}

// renew prolongs a session by a request that came at receipt. It reports whether that is still possible.
func (k *timekeeper) renew(id machine.SessionID, receipt time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.sessions[id]
	return d != nil && d.prolong(receipt)
}

func (d *deadline) prolong(receipt time.Time) bool {
	if d.ending {
		return false
	}
	if at := receipt.Add(d.ttl + grace); at.After(d.at) {
		d.at = at
	}
	return true
}

// ended forgets a session that the log has ended.
func (k *timekeeper) ended(id machine.SessionID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.sessions[id]; d != nil {
		delete(k.sessions, id)
		k.remove(d)
	}
}

// ending reports whether the end of the session is proposed.
func (k *timekeeper) ending(id machine.SessionID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.sessions[id]
	return d != nil && d.ending
}

// left is how long a session lives unless it is renewed; zero if not known.
func (k *timekeeper) left(id machine.SessionID) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.sessions[id]; d != nil {
		return max(0, d.at.Sub(k.now()))
	}
	return 0
}

// granted notes a hold that the log has just granted.
func (k *timekeeper) granted(name string, token fencing.Token, minimum time.Duration) {
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

// closed is how long a hold's minimum goes on.
func (k *timekeeper) closed(token fencing.Token) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.minimums[token]; d != nil {
		return max(0, d.at.Sub(k.now()))
	}
	return 0
}

// anyClosed reports whether any minimum goes on.
func (k *timekeeper) anyClosed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.minimums) > 0
}

// linger notes that nobody holds the name any more and that its minimum alone keeps it closed.
func (k *timekeeper) linger(name string, token fencing.Token) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.minimums[token]
	if d == nil { // over already
		d = &deadline{token: token, name: name, at: k.now()}
		k.minimums[token] = d
		k.push(d)
	}
	d.lingering = true
}

// run proposes what is due, until ctx ends.
func (k *timekeeper) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-k.wake:
		case <-ctx.Done():
			return
		}
		for _, d := range k.due() {
			k.end(d)
		}
		if wait, ok := k.wait(); ok {
			timer.Reset(wait)
		}
	}
}

// due returns what has to end now. Sessions among it are not renewed from now on.
func (k *timekeeper) due() (due []*deadline) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	for len(k.heap) > 0 && len(due) < endsAtOnce && !k.heap[0].seen.After(now) {
		d := k.heap[0]
		if d.at.After(now) { // renewed since
			d.seen = d.at
			heap.Fix(&k.heap, d.index)
			continue
		}
		heap.Pop(&k.heap)
		if d.token != 0 && !d.lingering {
			delete(k.minimums, d.token) // the hold outlasted its minimum
			continue
		}
		d.ending = true
		due = append(due, d)
	}
	return due
}

// end proposes the end of d, again and again until the log has it: a leader may be unable to write for a while, and
// stay leader.
func (k *timekeeper) end(d *deadline) {
	c := machine.Command{Op: machine.OpFree, Name: d.name, Token: d.token}
	if d.token == 0 {
		c = machine.Command{Op: machine.OpExpire, Session: d.session, Linger: k.anyClosed()}
	}
	if err := k.propose(c, func(err error) { k.hasEnded(d, err) }); err != nil {
		k.hasEnded(d, err)
	}
}

func (k *timekeeper) hasEnded(d *deadline, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case err != nil:
		d.at = k.now().Add(retryAfter)
		k.push(d)
	case d.token != 0:
		delete(k.minimums, d.token)
	default:
		delete(k.sessions, d.session)
	}
}

func (k *timekeeper) wait() (time.Duration, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.heap) == 0 {
		return 0, false
	}
	return max(0, k.heap[0].seen.Sub(k.now())), true
}

func (k *timekeeper) push(d *deadline) {
	d.seen = d.at
	heap.Push(&k.heap, d)
	if d.index == 0 {
		signal(k.wake)
	}
}

func (k *timekeeper) remove(d *deadline) {
	if d.index >= 0 {
		heap.Remove(&k.heap, d.index)
	}
}

type deadlineHeap []*deadline

func (h deadlineHeap) Len() int           { return len(h) }
func (h deadlineHeap) Less(i, j int) bool { return h[i].seen.Before(h[j].seen) }
func (h deadlineHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *deadlineHeap) Push(x any) {
	d := x.(*deadline)
	d.index = len(*h)
	*h = append(*h, d)
}

// Pop implements heap.Interface.
func (h *deadlineHeap) Pop() any {
	old := *h
	d := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	d.index = -1
	return d
}
