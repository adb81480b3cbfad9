package redlock

import (
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// waiters knows the contenders of one driver, for pushes.
type waiters struct {
	mu     sync.Mutex // protects the following fields
	nonces map[string]*contender
	names  map[string]int // contenders by lock key

	recent redisconn.Wanted    // names for which there was one just now
	ended  redisconn.Abandoned // attempts that may still be handed a vote
}

func (w *waiters) init() {
	w.nonces = map[string]*contender{}
	w.names = map[string]int{}
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
	w.recent.Note(lock)
}

// contended reports whether somebody waits for a name, or did just now.
func (w *waiters) contended(lock string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.names[lock] > 0 || w.recent.Has(lock)
}

// offered passes on that a node has offered its vote to a place in its queue. It is false if the attempt was abandoned.
func (w *waiters) offered(node int, nonce string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.nonces[nonce]; x != nil {
		x.tell(event{node: node, offered: true})
	}
	return !w.ended.Has(nonce)
}

// tell passes e on to the contenders for a lock, or for any if it is empty.
func (w *waiters) tell(lock string, e event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range w.nonces {
		if lock == "" || x.c.keys.Lock == lock {
			x.tell(e)
		}
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
