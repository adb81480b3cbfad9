package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"

	"github.com/fencelock/fencelock/fencing"
)

// register is the holders' resource, behind a guard. It counts the rivals' grants and errors, and keeps the findings.
type register struct {
	guard fencing.Guard

	mu        sync.Mutex                 // protects the following fields
	stale     map[string][]fencing.Token // by name: of lost holds, which write late
	refused   int                        // refused late writes
	confirmed int                        // successful inspections by holders whose hold was still valid afterwards
	turns     map[turn]int               // number of grants so far
	failures  map[string]int             // number of errors, by call
	found     []string                   // findings
	changed   chan struct{}              // closed at the next grant
}

// turn is a client that was granted a name.
type turn struct {
	client int
	name   string
}

func newRegister() *register {
	return &register{
		guard: new(fencing.Memory), stale: map[string][]fencing.Token{}, turns: map[turn]int{},
		failures: map[string]int{},
		changed:  make(chan struct{}),
	}
}

// granted counts a turn.
func (r *register) granted(t turn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turns[t]++
	close(r.changed)
	r.changed = make(chan struct{})
}

// write makes a holder write, and then all holders that have lost the lock before, as if they had not noticed.
// believes is the holder's Lease.Err.
func (r *register) write(name string, token fencing.Token, believes func() error) {
	err := r.guard.Check(context.Background(), fencing.Claim{Resource: name, Token: token})
	own := believes() // read after the write: a holder that still holds now held then
	r.mu.Lock()
	late := r.stale[name]
	r.stale[name] = nil
	if err != nil && own == nil {
		r.foundLocked("the holder of %s with token %v was refused: %v", name, token, err)
	}
	r.mu.Unlock()
	if err != nil {
		return
	}
	for _, old := range late {
		err := r.guard.Check(context.Background(), fencing.Claim{Resource: name, Token: old})
		r.mu.Lock()
		if errors.Is(err, fencing.ErrStale) {
			r.refused++
		} else if old < token {
			r.foundLocked("a late write of %s with token %v after %v: %v", name, old, token, err)
		}
		r.mu.Unlock()
	}
}

func (r *register) foundLocked(format string, args ...any) {
	r.found = append(r.found, fmt.Sprintf(format, args...))
}

// lost records a lost hold.
func (r *register) lost(name string, token fencing.Token) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stale[name] = append(r.stale[name], token)
}

// answered counts a successful inspection by a holder.
func (r *register) answered() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.confirmed++
}

// failed counts an error, and records a finding unless a fault explains the error.
func (r *register) failed(call string, err error, explained bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !explained {
		r.foundLocked("%s: unexpected error: %v", call, err)
	}
	r.failures[call]++
}

// alarm returns the findings so far as an error.
func (r *register) alarm() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.found) == 0 {
		return nil
	}
	return errors.New(strings.Join(r.found, "\n"))
}

// count returns a copy of the grants so far, and a channel that is closed at the next grant.
func (r *register) count() (map[turn]int, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.turns), r.changed
}
