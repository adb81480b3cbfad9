package serverfault

import (
	"sync"

	"github.com/hashicorp/raft"
)

// SlowLog is a log store with writes that can be made to hang.
type SlowLog struct {
	raft.LogStore
	mu   sync.Mutex
	hang chan struct{} // nil: writes do not hang
}

// StoreLogs implements raft.LogStore.
func (l *SlowLog) StoreLogs(entries []*raft.Log) error {
	l.mu.Lock()
	hang := l.hang
	l.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return l.LogStore.StoreLogs(entries)
}

// IsMonotonic is that of the store.
func (l *SlowLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// Hang makes writes hang until goOn is called.
func (l *SlowLog) Hang() (goOn func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hang = make(chan struct{})
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		close(l.hang)
		l.hang = nil
	})
}
