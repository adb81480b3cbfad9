// Package memory has the parts that guards share for their stores' memories: the choice of one, and the contents of
// format 1.
package memory

import (
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/fencelock/fencelock/fencing"
)

// Pin is the ID of the memory that a guard uses: that of Options.ID, or else the first one seen. Nil does
// not pin. It is safe for concurrent use.
type Pin struct{ id atomic.Pointer[fencing.Nonce] }

// NewPin returns a Pin of the ID; zero: of the first ID that Check sees.
func NewPin(id fencing.Nonce) *Pin {
	p := &Pin{}
	if id != (fencing.Nonce{}) {
		p.id.Store(&id)
	}
	return p
}

// Check returns an error that wraps fencing.ErrGuardID if the terms belong to another memory.
func (p *Pin) Check(t fencing.Terms) error {
	if p == nil || p.id.CompareAndSwap(nil, &t.ID) {
		return nil
	}
	if want := *p.id.Load(); want != t.ID {
		return fmt.Errorf("%w: its ID is %v, want %v", fencing.ErrGuardID, t.ID, want)
	}
	return nil
}

// ID returns the pinned ID; zero before the first.
func (p *Pin) ID() fencing.Nonce {
	if id := p.id.Load(); id != nil {
		return *id
	}
	return fencing.Nonce{}
}

// Older is the error about a memory of format 1.
func Older() error { return &fencing.VersionError{Found: 1, Want: fencing.Format} }

// OlderTerms returns the terms that format 1 kept, with a new ID.
func OlderTerms(epoch, floor, space string) (fencing.Terms, error) {
	e, err := strconv.ParseUint(epoch, 10, 63)
	f, err2 := strconv.ParseUint(floor, 10, 63)
	if err != nil || err2 != nil {
		text := strings.Join([]string{epoch, floor, space}, " ")
		return fencing.Terms{}, &fencing.VersionError{Text: text, Want: fencing.Format}
	}
	t := fencing.NewTerms()
	t.Epoch, t.Floor, t.Pinned, t.Space = e, fencing.Token(f), true, space
	return t, nil
}

// OlderSeen returns the memory of a resource in format 1.
func OlderSeen(epoch, token, sequence string) (fencing.Seen, error) {
	return fencing.ParseSeen(strings.Join([]string{epoch, "0", token, "-", sequence}, " "))
}
