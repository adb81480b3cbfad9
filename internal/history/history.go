// Package history records the changes that a lock service has acknowledged, to detect their loss. It is for callers of
// a driver: the core, and the gateway.
package history

import (
	"errors"
	"hash/maphash"
	"strconv"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Tokens are the greatest exclusive token of each name, and the space that the tokens belong to. The zero value is
// ready. It is safe for concurrent use.
type Tokens struct {
	mu    sync.Mutex // protects the following fields
	seq   uint64     // counts what was noted
	last  map[string]noted
	space string
	lost  error // set once the service has forgotten; grants fail from then on
}

type noted struct {
	token   fencing.Token
	request uint64 // hash of the request id
	at      uint64 // Tokens.seq when it was noted
}

// maxNoted bounds the names in Tokens.last. Any name makes room for a new one beyond that.
const maxNoted = 1 << 16

// ErrOvertaken: a later request was granted and is noted already, so this grant is over.
var ErrOvertaken = errors.New("the grant was overtaken by a later one")

var seed = maphash.MakeSeed()

// Now returns the moment for a request that is about to be sent, and the reason why it may not be sent.
func (t *Tokens) Now() (seq uint64, lost error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seq, t.lost
}

// Lose notes that the service has lost its history, and reports whether that is news.
func (t *Tokens) Lose(err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := t.lost == nil
	if first {
		t.lost = err
	}
	return first
}

// Judge notes the token of a grant whose request was sent at sent. A token that is no greater than what was noted
// before that for another request is a *backend.HistoryError; a token that was noted later has overtaken it.
func (t *Tokens) Judge(sent uint64, g *backend.Grant, space string) error {
	if !g.Token.Valid() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if space != "" {
		if t.space != "" && t.space != space {
			return &backend.HistoryError{What: "token space", Was: t.space, Now: space}
		}
		t.space = space
	}
	if !g.Token.Exclusive() {
		return nil
	}
	before, known := t.last[g.Name]
	request := maphash.String(seed, g.RequestID)
	switch {
	case !known || g.Token > before.token:
	case g.Token == before.token && request == before.request:
		return nil // the same hold once more
	case before.at <= sent:
		return &backend.HistoryError{
			What: "token of " + strconv.Quote(g.Name), Was: before.token.String(), Now: g.Token.String(),
		}
	default:
		return ErrOvertaken
	}
	if t.last == nil {
		t.last = map[string]noted{}
	}
	if !known && len(t.last) >= maxNoted {
		for name := range t.last {
			delete(t.last, name)
			break
		}
	}
	t.seq++
	t.last[g.Name] = noted{g.Token, request, t.seq}
	return nil
}
