package main

import (
	"context"
	"errors"
	"math"

	"github.com/fencelock/fencelock/backend/memory"
)

// memorySystem is the in-process driver. There is no peer: it shows what the core and a driver cost without a network.
type memorySystem struct{ store *memory.Store }

func startMemory(context.Context, string) (system, error) { return newMemory(), nil }

func newMemory() *memorySystem { return &memorySystem{memory.NewStore(nil)} }

func (s *memorySystem) name() string    { return "memory" }
func (s *memorySystem) version() string { return "memory (in process)" }
func (s *memorySystem) addr() string    { return "" }

func (s *memorySystem) peers() []peer {
	return []peer{{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal,
		open: func(o clientOptions) (client, error) { return newOurs(s.store.Driver(), o.ttl, func() {}) }}}
}

func (s *memorySystem) counters(context.Context) (counters, error) {
	return counters{commands: math.NaN(), trips: math.NaN()}, nil
}

func (s *memorySystem) reset(context.Context) error {
	s.store = memory.NewStore(nil)
	return nil
}

func (s *memorySystem) erase(_ context.Context, key string) error {
	if !s.store.Evict(key) {
		return errors.New("nobody holds it")
	}
	return nil
}

func (s *memorySystem) missing(context.Context, []string) (int, error) {
	return 0, errors.ErrUnsupported
}

func (s *memorySystem) pause() bool  { return false }
func (s *memorySystem) resume()      {}
func (s *memorySystem) close() error { return nil }
