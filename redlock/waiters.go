package redlock

import (
	"sync"
	"time"
)

// waiters knows the contenders of one driver, for pushes.
type waiters struct {
	mu     sync.Mutex // protects the following fields
	nonces map[string]*contender
	names  map[string]int       // contenders by lock key
	recent map[string]time.Time // when there was one last, by lock key
	ended  map[string]bool      // nonces of attempts that ended without a hold and may still be handed a vote
}

const (
	maxEnded   = 10000           // then all are forgotten: what one of them is handed stays closed for a TTL
	maxRecent  = 10000           // likewise
	recentTime = 1 * time.Second // for which a name counts as contended
)

func (w *waiters) init() {
	w.nonces = map[string]*contender{}
	w.names = map[string]int{}
	w.recent = map[string]time.Time{}
	w.ended = map[string]bool{}
}

func (w *waiters) add(x *contender) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nonces[x.h.Nonce] = x
	w.names[x.c.keys.Lock]++
}

func (w *waiters) remove(x *contender) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.nonces, x.h.Nonce)
	lock := x.c.keys.Lock
	if w.names[lock]--; w.names[lock] > 0 {
		return
	}
	delete(w.names, lock)
	if len(w.recent) >= maxRecent {
		clear(w.recent)
	}
	w.recent[lock] = time.Now()
}

// contended reports whether somebody waits for a name, or did just now.
func (w *waiters) contended(lock string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names[lock] > 0 {
		return true
	}
	at, ok := w.recent[lock]
	return ok && time.Since(at) < recentTime
}

// abandon says that an attempt has ended without a hold.
func (w *waiters) abandon(nonce string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ended) >= maxEnded {
		clear(w.ended)
	}
	w.ended[nonce] = true
}

// offered passes on that a node has offered its vote to a place in its queue. It is false if the attempt was abandoned.
func (w *waiters) offered(node int, nonce string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.nonces[nonce]; x != nil {
		x.tell(event{node: node, offered: true})
	}
	return !w.ended[nonce]
}

// closed passes on that a name stays closed on one node for another d.
func (w *waiters) closed(node int, lock string, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range w.nonces {
		if x.c.keys.Lock == lock {
			x.tell(event{node: node, closed: d})
		}
	}
}

// look makes the contenders for one name look, which tells the node that they live.
func (w *waiters) look(node int, lock string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range w.nonces {
		if x.c.keys.Lock == lock {
			x.tell(event{node: node})
		}
	}
}

// lookAll makes every contender look: pushes of one node may have been lost.
func (w *waiters) lookAll(node int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range w.nonces {
		x.tell(event{node: node})
	}
}

// event is what a contender hears of one node: that it is offered its vote, that the name stays closed there for a
// while, or, with neither, that something may have been missed or that the node wants a sign of life.
type event struct {
	node    int
	offered bool
	closed  time.Duration
}

func (x *contender) tell(e event) {
	select {
	case x.events <- e:
	default: // so many that a look, which is due anyway, will find out
	}
}
