package etcd

import (
	"math/rand/v2"
	"strconv"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// This file chooses the key of a request. Keys are few and reused: a driver starts from one number, its station,
// which it uses for every name, and chooses another one only if another request, its own or of another driver, has
// that key. So a name has at most some 256 keys in etcd's index, however many requests and processes came and went.
//
// The reason: deleted keys stay in etcd's index until the next compaction, which plain etcd never does on its own,
// and a comparison of a range visits them. With a separate key for each request, an acquire cost 1.7 ms at first and
// 23.6 ms after 65,000, spent in the step that applies etcd's log, for all its users.
//
// Rejected alternatives: a head key for each name, which the next in the queue would have to write, one transaction
// more at every change of hands; keys named for their driver, with which short-lived processes would fill the index
// as requests did; compacting, which is the operator's, since other users' watches need the past. See
// docs/decisions/2026-11-22-etcd-keys-are-used-again.md.
//
// A reused key must not be mistaken for its earlier life. A transaction that writes a key for the first time compares
// that it is vacant; releases and moves compare its create revision, which no two lives of a key share; and a key
// that an unanswered transaction may yet write goes to no other request before the lease of that transaction is gone.
// The counts in place say when that is.

// place is a key that a request of this driver has, or may come to have. It reserves the key until tidyLocked drops
// it: no other request of the driver gets the key. Driver.mu protects its fields. Each count is raised before its
// operation begins, and lowered when the operation has ended.
type place struct {
	requestID string
	// The granted hold, or nil.
	hold *hold
	// Calls that may write the key: an acquire until it returns, a renewal while it moves the hold.
	calls int
	// Removals of a place in the queue, under way.
	removals int
	// Transactions under way that write the key, and the last of them.
	flights int
	last    *flight
	// Sessions on whose leases a transaction that was not answered may yet write the key.
	doubts map[*session]bool
}

// stations bounds the keys of a name for all drivers, unless more of them want it at once. With fewer, drivers would
// meet more often, and each encounter costs a transaction; with more, more would stay in etcd's index.
const stations = 256

// freeKeyLocked returns a key below the directory within that no request of this driver has. Only etcd knows whether
// another driver's request has it: the transaction compares. taken counts such encounters. The first choice is the
// same for all names, and changes when another driver turns out to use it: see resettle.
func (d *Driver) freeKeyLocked(within string, taken int) string {
	for n := d.station; ; taken++ {
		key := within + strconv.FormatInt(n, 16)
		if d.places[key] == nil {
			return key
		}
		n = randomStation(taken)
	}
}

// randomStation chooses from a larger range of numbers the more were found taken, so that a thousand drivers at one
// name end their search after a few turns, while the numbers stay small if that suffices.
func randomStation(taken int) int64 { return rand.Int64N(stations << min(2*taken, 32)) }

// callLocked notes that a call of a request may write a key; endCall ends that. The caller holds Driver.mu. Key
// returns the request's latest key.
func (d *Driver) callLocked(key, requestID string) {
	p := d.places[key]
	if p == nil {
		p = &place{}
		d.places[key] = p
	}
	p.requestID = requestID
	p.calls++
	d.requests[requestID] = key
}

// endCall ends the call of callLocked, and drops the key if it is no longer needed.
func (d *Driver) endCall(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.places[key].calls--
	d.tidyLocked(key)
}

// tidyLocked drops a place that is no longer needed: it has no hold, no call may write its key, no removal is under
// way, no transaction is under way to it or can still write late. It is called when one of the counts has been
// lowered. The caller holds Driver.mu.
func (d *Driver) tidyLocked(key string) {
	p := d.places[key]
	if p == nil || p.hold != nil || p.calls > 0 || p.removals > 0 || p.flights > 0 || len(p.doubts) > 0 {
		return
	}
	delete(d.places, key)
	if d.requests[p.requestID] == key {
		delete(d.requests, p.requestID)
	}
}

// settle gives a wish its key: the key that its request has in this driver, which is known then, or a free one. It
// counts as a call of the key, which endCall ends.
func (d *Driver) settle(w *wish) (known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w.key, known = d.requests[w.r.RequestID]
	if !known {
		w.key = d.freeKeyLocked(w.dir+w.use.part(), 0)
	}
	d.callLocked(w.key, w.r.RequestID)
	return known
}

// resettle gives a wish another key, because somebody else's stands there. The driver chooses another station for all
// later requests, since the other driver will be there for every name.
func (d *Driver) resettle(w *wish) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w.taken++
	// The same request, sent twice concurrently, may have moved already: then both use the same key.
	key := d.requests[w.r.RequestID]
	if key == w.key {
		d.station = randomStation(w.taken)
		key = d.freeKeyLocked(w.dir+w.use.part(), w.taken)
	}
	d.moveCallLocked(w, key)
}

// settleAt gives a wish the key at which its request was found.
func (d *Driver) settleAt(w *wish, key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if key != w.key {
		d.moveCallLocked(w, key)
	}
}

// moveCallLocked moves the call of a wish to another key. The earlier key is dropped if it is no longer needed.
func (d *Driver) moveCallLocked(w *wish, key string) {
	before := w.key
	w.key = key
	d.callLocked(key, w.r.RequestID)
	d.places[before].calls--
	d.tidyLocked(before)
}

// known reports whether this driver has a hold on key or a call that may write it. sweep and removeOne may delete
// other keys.
func (d *Driver) known(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.places[key]
	return p != nil && (p.hold != nil || p.calls > 0)
}

// calling reports whether a call may write key. If so, a removal waits for the end of the call.
func (d *Driver) calling(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.places[key]
	return p != nil && p.calls > 0
}

// vacant is true if there is no such key: etcd treats its create revision as 0.
func vacant(key string) clientv3.Cmp { return created(key, 0) }

// created is true if a key was created at that revision. No two lives of a key share one.
func created(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(key), "=", revision)
}

// standsFor is true if a key stands for a request. etcd compares whole values only, and by their order: the value lies
// between its known beginning with the quotation mark that ends the id, and the same with the next character.
func standsFor(key, requestID string) []clientv3.Cmp {
	begin := valueBegin + requestID
	return []clientv3.Cmp{
		clientv3.Compare(clientv3.Value(key), ">", begin+`"`), clientv3.Compare(clientv3.Value(key), "<", begin+"#"),
	}
}
