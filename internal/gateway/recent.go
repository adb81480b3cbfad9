package gateway

import (
	"container/list"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Bounds of what a replica remembers of each kind: in all, and for one principal; and the minimum time.
const (
	finishedMost  = 1 << 16
	finishedOfOne = 1 << 13
	finishedTime  = time.Hour
)

// recent remembers values by key for some time, so that a late repetition does not acquire a second time. It forgets
// the oldest of each principal first, so that a busy principal is no cost to the others.
type recent[V any] struct {
	in    map[string]*list.Element // of order
	order list.List                // of *entry, the oldest first
	of    map[string]*list.List    // by principal, of elements of order
}

// remembered is the key and the principal of a value, and the instant until which it is remembered.
type remembered struct {
	key, principal string
	until          backend.Instant
}

type entry[V any] struct {
	remembered
	value V
	own   *list.Element
}

func (m *recent[V]) get(key string, now backend.Instant) (v V, ok bool) {
	if e := m.in[key]; e != nil {
		if x := e.Value.(*entry[V]); now < x.until {
			return x.value, true
		}
		m.remove(e)
	}
	return v, false
}

func (m *recent[V]) has(key string, now backend.Instant) bool {
	_, ok := m.get(key, now)
	return ok
}

func (m *recent[V]) add(r remembered, v V) {
	if m.in == nil {
		m.in, m.of = map[string]*list.Element{}, map[string]*list.List{}
	}
	if e := m.in[r.key]; e != nil {
		m.remove(e)
	}
	if own := m.of[r.principal]; own != nil && own.Len() >= finishedOfOne {
		m.remove(own.Front().Value.(*list.Element))
	}
	if m.order.Len() >= finishedMost {
		m.remove(m.order.Front())
	}
	if m.of[r.principal] == nil {
		m.of[r.principal] = list.New()
	}
	x := &entry[V]{remembered: r, value: v}
	e := m.order.PushBack(x)
	x.own = m.of[r.principal].PushBack(e)
	m.in[r.key] = e
}

func (m *recent[V]) remove(e *list.Element) {
	x := m.order.Remove(e).(*entry[V])
	delete(m.in, x.key)
	own := m.of[x.principal]
	own.Remove(x.own)
	if own.Len() == 0 {
		delete(m.of, x.principal)
	}
}
