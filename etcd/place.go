package etcd

import (
	"math/rand/v2"
	"strconv"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// place is a key that a request of this driver has, or may come to have. As long as it is kept no other request of the
// driver gets the key; when it has gone, the next one does.
//
// etcd keeps a key that was deleted in its index until the next compaction, and a comparison of a range visits it. With
// a key of its own for each request, an acquire would cost what all earlier ones of the name have left: 22 ms after
// 65,000. So the keys are few, and used again and again. Which request one stands for is in its value.
type place struct {
	requestID string
	hold      *hold             // what was granted
	calls     int               // that may write the key
	removals  int               // under way
	flights   int               // transactions under way that write the key
	last      *flight           // of them
	doubts    map[*session]bool // on whose leases a transaction that was not answered may yet write it
}

// stations is how many keys of a name all drivers use, unless more of them want it at once.
const stations = 256

// freeKeyLocked returns a key below the directory within that no request of this driver has. The first choice is the
// same for all names, and changes when another driver turns out to use it: see attempt.resettle.
func (d *Driver) freeKeyLocked(within string, taken int) string {
	for n := d.station; ; taken++ {
		key := within + strconv.FormatInt(n, 16)
		if d.places[key] == nil {
			return key
		}
		n = randomStation(taken)
	}
}

// randomStation chooses among the more the more were found taken.
func randomStation(taken int) int64 { return rand.Int64N(stations << min(2*taken, 32)) }

// callLocked notes that a call of a request may write a key; endCall ends that.
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

func (d *Driver) endCall(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.places[key].calls--
	d.tidyLocked(key)
}

// tidyLocked gives a key free that nobody needs any more.
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

// settle gives a wish its key: the one that its request has in this driver, which is known then, or a free one.
func (d *Driver) settle(w *wish) (known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w.key, known = d.requests[w.r.RequestID]
	if !known {
		w.key = d.freeKeyLocked(w.dir+w.claim.part(), 0)
	}
	d.callLocked(w.key, w.r.RequestID)
	return known
}

// resettle gives a wish another key, because somebody else's stands there.
func (d *Driver) resettle(w *wish) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w.taken++
	key := d.requests[w.r.RequestID] // the same request, sent twice, may have moved
	if key == w.key {
		d.station = randomStation(w.taken)
		key = d.freeKeyLocked(w.dir+w.claim.part(), w.taken)
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

func (d *Driver) moveCallLocked(w *wish, key string) {
	before := w.key
	w.key = key
	d.callLocked(key, w.r.RequestID)
	d.places[before].calls--
	d.tidyLocked(before)
}

// known reports whether key is a hold, or may become one.
func (d *Driver) known(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.places[key]
	return p != nil && (p.hold != nil || p.calls > 0)
}

// calling reports whether a call may write key.
func (d *Driver) calling(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.places[key]
	return p != nil && p.calls > 0
}

// vacant is true if there is no such key.
func vacant(key string) clientv3.Cmp { return created(key, 0) }

// created is true if a key was created at that revision: no two lives of a key share one.
func created(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(key), "=", revision)
}

// standsFor is true if a key stands for a request. A comparison of text, since etcd has none of a part of a value.
func standsFor(key, requestID string) []clientv3.Cmp {
	begin := valueBegin + requestID
	return []clientv3.Cmp{
		clientv3.Compare(clientv3.Value(key), ">", begin+`"`), clientv3.Compare(clientv3.Value(key), "<", begin+"#"),
	}
}
