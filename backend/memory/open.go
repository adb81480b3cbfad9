package memory

import (
	"context"
	"strings"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

func init() { backend.Register("memory", open) }

var named struct {
	mu     sync.Mutex // protects the following field
	stores map[string]*Store
}

// open returns a driver for memory://name, a store that all of the process shares and that lives as long as the
// process, or for memory://, a store of its own.
func open(ctx context.Context, rawURL string) (backend.Driver, error) {
	if err := ctx.Err(); err != nil {
		return nil, callError("open", "", err)
	}
	_, name, _ := strings.Cut(rawURL, "://")
	if strings.ContainsAny(name, "/?#@") {
		return nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL),
			Why: "a memory URL is memory://name, without user, path, or settings",
		}
	}
	if name == "" {
		return New(nil), nil
	}
	named.mu.Lock()
	defer named.mu.Unlock()
	if named.stores == nil {
		named.stores = map[string]*Store{}
	}
	s := named.stores[name]
	if s == nil {
		s = NewStore(nil)
		named.stores[name] = s
	}
	return s.Driver(), nil
}
