package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// meter counts and times what callers do in a closed loop: a warm-up first, then what counts.
type meter struct {
	phase  atomic.Int32 // 0: warm-up, 1: counted, 2: over
	failed atomic.Pointer[error]

	mu        sync.Mutex
	latencies []time.Duration
}

func newMeter() *meter { return &meter{} }

func (m *meter) running() bool  { return m.phase.Load() < 2 && m.failed.Load() == nil }
func (m *meter) counting() bool { return m.phase.Load() == 1 }

// fail ends all loops.
func (m *meter) fail(err error) { m.failed.CompareAndSwap(nil, &err) }

// err is the first failure.
func (m *meter) err() error {
	if err := m.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// repeat is the loop of one caller. It returns when the measurement is over, or failed.
func (m *meter) repeat(op func() error) {
	mine := make([]time.Duration, 0, 1<<14)
	for m.running() {
		began := time.Now()
		if err := op(); err != nil {
			m.fail(err)
			break
		}
		if m.counting() {
			mine = append(mine, time.Since(began))
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.latencies = append(m.latencies, mine...)
}

// once is one operation of an open loop. It counts if it began while the measurement ran.
func (m *meter) once(op func() error) {
	counts, began := m.counting(), time.Now()
	if err := op(); err != nil {
		m.fail(err)
		return
	}
	if took := time.Since(began); counts {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.latencies = append(m.latencies, took)
	}
}

// measure lets the callers run for the warm-up and then for length, and returns what was spent in the latter. They have
// been started before, and have to be awaited after it.
func (m *meter) measure(ctx context.Context, l *lab, p peer, warmUp, length time.Duration) (spent, error) {
	sleep(ctx, warmUp)
	defer m.phase.Store(2)
	return l.spend(ctx, p, func() error {
		m.phase.Store(1)
		sleep(ctx, length)
		m.phase.Store(2)
		return nil
	})
}

// sample is what the callers' loops did, once all have returned.
func (m *meter) sample(d spent) sample {
	s := sample{"ops": float64(len(m.latencies)) / d.wall.Seconds()}
	d.perOp(s, float64(len(m.latencies)))
	s.latencies(m.latencies)
	return s
}
