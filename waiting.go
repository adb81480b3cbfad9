package fencelock

// EventWaiting: acquires that wait, in the order in which they began.
//
//	begin ─► waits.add ─► timer ─► fire ─► look ─► EventWaiting
//	end of the acquire ─► waitReport.end
//
// Each is due waitingAfter its beginning, so the first of the list is due first, and one timer serves a client. An
// acquire that ends earlier leaves the list; it starts and stops no timer.

import (
	"context"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// waits are the acquires of a client that may have to be reported.
type waits struct {
	mu sync.Mutex // protects the following fields, and the links of the list
	// first and last are the ends of the list.
	first, last *waitReport
	// timer calls fire, and armed is set while it runs. stopped: it will not run.
	timer          *time.Timer
	armed, stopped bool
}

// waitReport reports to the observer that an acquire waits, if it does so for a moment, and for whom. Nil without an
// observer and for an attempt that does not wait.
type waitReport struct {
	acquisition waiting
	// due is the time from which the acquire counts as waiting. before and after are its neighbours in the list;
	// listed: it is in the list. waits.mu protects them.
	due           time.Time
	before, after *waitReport
	listed        bool

	mu sync.Mutex // protects the following fields
	// ended: no further reports follow.
	ended bool
	// reported: the observer got an EventWaiting for each name, with these holders.
	reported bool
	holders  []*Holder
}

// waiting has the fields of an acquisition that a report needs; the acquisition itself is on its caller's stack.
type waiting struct {
	client *Client
	// ctx is the caller's, and bounded ends with the acquire.
	ctx, bounded context.Context
	// names and rs are the acquisition's: their elements may get another key meanwhile, and keep name, kind and hold id.
	names []string
	rs    []backend.Request
}

// reportWait starts a report, if there is an observer. It ends with end.
func (a *acquisition) reportWait(bounded context.Context) *waitReport {
	c := a.client
	if !c.observed() || !a.rs[0].Wait || a.outer != nil { // one more lease of a hold does not wait
		return nil
	}
	w := &waitReport{acquisition: waiting{c, a.ctx, bounded, a.names, a.rs}}
	c.waits.add(w)
	return w
}

// add appends a report to the list.
func (ws *waits) add(w *waitReport) {
	w.due = time.Now().Add(waitingAfter)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w.listed, w.before = true, ws.last
	if ws.last == nil {
		ws.first = w
	} else {
		ws.last.after = w
	}
	ws.last = w
	if !ws.armed {
		ws.arm(waitingAfter)
	}
}

// arm starts the timer. The caller holds mu.
func (ws *waits) arm(d time.Duration) {
	switch {
	case ws.stopped:
		return
	case ws.timer == nil:
		ws.timer = time.AfterFunc(d, ws.fire)
	default:
		ws.timer.Reset(d)
	}
	ws.armed = true
}

// fire sends the due reports. The timer then waits for the next report of the list, if there is one.
func (ws *waits) fire() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.armed = false
	for w := ws.first; w != nil; w = ws.first {
		if left := time.Until(w.due); left > 0 {
			ws.arm(left)
			return
		}
		ws.remove(w)
		go w.look()
	}
}

// remove takes a report out of the list, if it is there. The caller holds mu.
func (ws *waits) remove(w *waitReport) {
	if !w.listed {
		return
	}
	if w.before == nil {
		ws.first = w.after
	} else {
		w.before.after = w.after
	}
	if w.after == nil {
		ws.last = w.before
	} else {
		w.after.before = w.before
	}
	w.listed, w.before, w.after = false, nil, nil
}

// stop stops the timer: there are no reports after Close.
func (ws *waits) stop() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.stopped = true
	if ws.timer != nil {
		ws.timer.Stop()
	}
}

// look asks who holds the names and reports it. It counts as a flight: Close waits for it. It ends with the acquire, or
// after a second for each name.
func (w *waitReport) look() {
	a := &w.acquisition
	c, f := a.client, &flight{kind: looking}
	if c.work.begin(f) != nil {
		return
	}
	defer c.work.leave(f)
	holders := make([]*Holder, len(a.rs))
	for i := range a.rs {
		holders[i] = c.holderOf(a.bounded, a.rs[i].Name)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	w.reported, w.holders = true, holders
	for i := range a.rs {
		r := &a.rs[i]
		c.tell(a.ctx, &Event{
			Type: EventWaiting, Name: a.names[i], Kind: r.Kind, HoldID: r.HoldID, Holder: holders[i], Wait: waitingAfter,
		})
	}
}

// end ends the report: no EventWaiting comes after the outcome of the same acquire.
func (w *waitReport) end() {
	if w == nil {
		return
	}
	ws := &w.acquisition.client.waits
	ws.mu.Lock()
	ws.remove(w)
	ws.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}

// outcome returns an event for the outcome of the i-th name, with the reported wait. The report has ended.
func (w *waitReport) outcome(typ EventType, i int) Event {
	if w == nil || !w.reported {
		return Event{Type: typ}
	}
	return Event{Type: typ, Waited: true, Holder: w.holders[i]}
}
