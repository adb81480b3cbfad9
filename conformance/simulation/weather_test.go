package simulation

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance/check"
)

// weather injects faults around one client, repeatedly, until the end of the world.
func (n *node) weather(d dice) {
	w := n.w
	for w.rest(d.about(w.fine)) {
		lasts := d.scale(2*time.Millisecond, 5*w.ttl)
		net := n.driver.Network()
		clear := func() { net.Reset() }
		what := ""
		switch d.IntN(14) {
		case 0:
			what, clear = "slow", func() {}
			n.storm(func() { net.Delay(memory.Both, d.scale(10*time.Millisecond, 2*w.ttl)) })
		case 1, 2:
			// Messages that are on their way now arrive long after their senders have stopped waiting.
			what, clear = "late requests", func() {}
			n.storm(func() { net.Delay(memory.Requests, d.scale(w.ttl/4, 3*w.ttl)) })
		case 3:
			what, clear = "late replies", func() {}
			n.storm(func() { net.Delay(memory.Replies, d.scale(w.ttl/4, 3*w.ttl)) })
		case 4:
			what = "drops requests"
			n.storm(func() { net.Drop(memory.Requests) })
		case 5:
			what = "drops replies"
			n.storm(func() { net.Drop(memory.Replies) })
		case 6:
			what = "drops both"
			n.storm(func() { net.Drop(memory.Both) })
		case 7:
			what, clear = "refuses", net.Pass
			n.storm(net.Refuse)
		case 8:
			what, lasts = "resets", 0
			n.storm(net.Reset)
		case 9, 10:
			what = "pauses the client"
			clear = func() {}
			n.mu.Lock()
			n.paused = w.now() + lasts
			n.pauses = append(n.pauses, pause{w.now(), n.paused})
			n.mu.Unlock()
		case 11, 12:
			// Answers come late, and then not at all.
			what = "degrades"
			w.fault(what, n.id)
			n.storm(func() { net.Delay(memory.Replies, d.scale(w.ttl/30, w.ttl/3)) })
			w.rest(d.scale(w.ttl/3, 3*w.ttl))
			net.Drop(memory.Both)
			what, lasts = "drops both", d.scale(w.ttl/2, 3*w.ttl)
		case 13:
			if !w.checked { // the history does not show whether a closed client still releases
				n.replace(d)
			}
			continue
		}
		w.fault(what, n.id)
		w.rest(lasts)
		n.calm(clear)
	}
}

// storm changes the network and keeps vary from changing it back.
func (n *node) storm(change func()) {
	n.mu.Lock()
	n.delay = 0
	n.mu.Unlock()
	change()
}

// calm heals the network. Messages always take some time, so that their effects come one after the other.
func (n *node) calm(clear func()) {
	n.mu.Lock()
	n.delay = n.usual
	net := n.driver.Network()
	n.mu.Unlock()
	net.Delay(memory.Both, n.usual)
	clear()
	net.Delay(memory.Both, n.usual)
}

// replace closes the client, or kills it, and starts another.
func (n *node) replace(d dice) {
	dies := d.one(2)
	what := "closes the client"
	if dies {
		what = "kills the client"
	}
	n.w.fault(what, n.id)
	ctx, cancel := context.WithTimeout(context.Background(), d.scale(time.Millisecond, 2*n.w.ttl))
	defer cancel()
	began := n.w.now()
	err := n.close(ctx, dies)
	deadline, _ := ctx.Deadline()
	const grace = time.Second // Close returns within it after the end of its context
	if end := max(began, n.w.at(deadline)) + grace; !dies && n.w.now() > n.runsBy(end) {
		n.w.rec.violation("Close took %v longer than its context and its grace", n.w.now()-end)
	}
	if dies {
		// At this instant the core may or may not have begun to release a hold, which takes microseconds.
		time.Sleep(max(tick(began)-n.w.now(), 0))
	} else {
		n.w.rec.note(event{who: n.id, what: "closed", answer: class(err)})
	}
	n.w.rest(d.scale(time.Millisecond, n.w.ttl))
	n.open()
}

// serverWeather injects faults into the service itself.
func (w *world) serverWeather(d dice) {
	for w.rest(d.about(3 * w.fine)) {
		lasts := d.scale(2*time.Millisecond, 4*w.ttl)
		name := w.names[d.IntN(len(w.names))].text
		switch d.IntN(6) {
		case 0, 1:
			w.fault("server stops", weather)
			w.store.Stop()
			w.rest(lasts)
			w.store.Start()
		case 2, 3:
			w.fault("server freezes", weather)
			w.store.Pause()
			w.rest(lasts)
			w.store.Resume()
		case 4:
			w.fault("evicts "+name, weather)
			w.takeAway(name)
			w.forced(name, func() { w.store.Evict(name) })
		case 5:
			w.fault("force-releases "+name, weather)
			w.takeAway(name)
			w.forced(name, func() {
				r := backend.ForceRequest{Name: name, Reason: "the simulation wants it"}
				w.admin.ForceRelease(context.Background(), r)
			})
		}
	}
}

// forced runs do, which ends holds of a name by force, and records it in the history if there is one.
func (w *world) forced(name string, do func()) {
	if w.history != nil {
		call := w.history.Begin(context.Background(), "weather", check.OpForce, name)
		defer call.Return(check.OK, nil)
	}
	do()
}

// takeAway notes the holders of a name, which are about to lose it.
func (w *world) takeAway(name string) {
	info, err := w.admin.Look(context.Background(), name)
	if err != nil {
		w.rec.violation("the service that serves does not answer: %v", err)
	}
	w.rec.took(info)
}

func (w *world) fault(what string, who int) {
	w.rec.note(event{who: weather, what: what, answer: whose(who)})
	w.rec.mu.Lock()
	w.rec.faults++
	w.rec.mu.Unlock()
}

func whose(client int) string {
	if client == weather {
		return ""
	}
	return fmt.Sprintf("of client %d", client)
}
