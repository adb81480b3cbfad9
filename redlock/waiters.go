package redlock

// This file finds the waiters for a push. It is the only place where several waiters meet: each is notified by its own
// channel, and its own goroutine does the rest.
//
// A push names a nonce, for an offer, or a lock, for everything else. The waiters of a lock are found by going through
// all of the driver's, because such pushes are rare: a second index would cost every wait.

import (
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// waiters knows the waiters of one driver. Its lock is held for a few lines at a time and never while anything is sent
// to a server.
type waiters struct {
	mu sync.Mutex // protects the following fields
	// By the nonce of the try, which an offer names.
	nonces map[string]*waiter
	// Waiters by lock key.
	names map[string]int

	// Names for which there was one just now.
	recent redisconn.Wanted
	// Tries that have ended and may still be handed a vote.
	ended redisconn.Abandoned
}

// init makes the maps.
func (w *waiters) init() {
	w.nonces = map[string]*waiter{}
	w.names = map[string]int{}
}

// add makes a waiter known, before its first request leaves.
func (w *waiters) add(x *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nonces[x.h.Nonce] = x
	w.names[x.a.keys.Lock]++
}

// remove forgets a waiter that has ended. The name counts as contended for a second more, since where one has waited
// the next is rarely far.
func (w *waiters) remove(x *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.nonces, x.h.Nonce)
	lock := x.a.keys.Lock
	if w.names[lock]--; w.names[lock] > 0 {
		return
	}
	delete(w.names, lock)
	w.recent.Note(lock)
}

// contended reports whether somebody of this driver waits for a name, or did within the last second. It spares a
// release the short script, which would have no effect, and keeps a new waiter from taking votes past earlier waiters.
func (w *waiters) contended(lock string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.names[lock] > 0 || w.recent.Has(lock)
}

// offered passes on that a node has offered its vote to a place in its queue. It is false if the try was abandoned, and
// the vote is to be declined. An offer to a try that is merely unknown is left alone: its hold may rest on
// that vote.
func (w *waiters) offered(node int, nonce string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.nonces[nonce]; x != nil {
		x.tell(event{node: node, offered: true})
	}
	return !w.ended.Has(nonce)
}

// tell passes e on to the waiters for a lock, or to all if lock is empty.
func (w *waiters) tell(lock string, e event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range w.nonces {
		if lock == "" || x.a.keys.Lock == lock {
			x.tell(e)
		}
	}
}

// event is a message to a waiter about one node: that it is offered its vote, that the name stays closed there for a
// while, or, with neither, that something may have been missed or that the node wants a sign of life.
type event struct {
	node    int
	offered bool
	closed  time.Duration
}

// tell does not block: pushes are read on the goroutine that every name of the driver shares.
func (x *waiter) tell(e event) {
	select {
	case x.events <- e:
	default: // so many that a look, which is due anyway, will find out
	}
}
