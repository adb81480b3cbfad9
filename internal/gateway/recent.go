package gateway

import (
	"container/list"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// finishedMost bounds the values that a replica remembers of each kind, and finishedOfOne those of one principal.
// finishedTime is the minimum time for which it remembers them within these bounds.
const (
	finishedMost  = 1 << 16
	finishedOfOne = 1 << 13
	finishedTime  = time.Hour
)

// recent remembers values by key for some time, so that a late retry does not acquire a second time. A principal that
// reaches its own bound loses its own oldest value, so that a busy principal does not displace the values of others.
type recent[V any] struct {
	in    map[string]*list.Element // the elements of order
	order list.List                // *entry, the oldest first
	of    map[string]*list.List    // elements of order by principal
}

// remembered is the key, the principal and the expiry of a value.
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
