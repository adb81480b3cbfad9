package memory

import (
	"context"
	"strings"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

func init() { backend.Register("memory", open) }

// named are the stores that a URL has named, by name. They are never removed: a later driver may always name one, and
// a store that ended with its last driver would forget its tokens.
//
// NewStore does not enter a store here, so a test's own stores are never shared by chance.
var named sync.Map

// open returns a driver for memory://name, a store that all of the process shares and that lives as long as the
// process, or for memory://, a separate store.
//
// A memory URL has no settings. ctx is only looked at, since there is no connection. Errors wrap
// backend.ErrInvalidOption, or are ctx's.
func open(ctx context.Context, rawURL string) (backend.Driver, error) {
	if err := ctx.Err(); err != nil {
		return nil, &backend.CallError{Driver: "memory", Call: "open", Err: err}
	}
	_, name, _ := strings.Cut(rawURL, "://")
	if strings.ContainsAny(name, "/?#@") {
		return nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL),
			Why: "a memory URL is memory://name, without user, path, or settings",
		}
	}
	s := any(NewStore(nil))
	if name != "" {
		s, _ = named.LoadOrStore(name, s)
	}
	return s.(*Store).Driver(), nil
}
