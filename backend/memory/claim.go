package memory

import (
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// use is the way in which a request claims a name: as its kind says, or from below.
type use uint8

const (
	exclusive use = iota
	shared
	permits
	belowShared    // something below the name is claimed in shared mode
	belowExclusive // something below the name is claimed exclusively
	uses           = iota
)

// excludes tells which uses cannot be had at once. Permits are counted besides.
var excludes = [uses][uses]bool{
	exclusive:      {exclusive: true, shared: true, belowShared: true, belowExclusive: true},
	shared:         {exclusive: true, belowExclusive: true},
	belowShared:    {exclusive: true},
	belowExclusive: {exclusive: true, shared: true},
}

// claim is what one request wants of one name: of its own, or of an ancestor.
type claim struct {
	name    string
	request int // its index among those that are acquired together
	use     use
	permits int
	limit   int
	tree    bool
}

// appendClaims appends what the i-th request of a set wants: first of the ancestors, from the root down, then of the
// name.
func appendClaims(claims []claim, i int, r *backend.Request) []claim {
	own := claim{name: r.Name, request: i, use: exclusive, tree: r.Hierarchical}
	below := belowExclusive
	switch r.Kind {
	case backend.KindShared:
		own.use, below = shared, belowShared
	case backend.KindPermits:
		own.use, own.permits, own.limit = permits, r.Permits, r.Limit
	}
	if r.Hierarchical {
		eachAncestor(r.Name, func(ancestor string) {
			claims = append(claims, claim{name: ancestor, request: i, use: below, tree: true})
		})
	}
	return append(claims, own)
}

func eachAncestor(name string, do func(string)) {
	for i := 1; i < len(name); i++ {
		if name[i] == '/' {
			do(name[:i])
		}
	}
}

// contradiction refuses a set that could never be granted, since its own requests exclude each other.
func contradiction(rs []backend.Request, claims []claim) error {
	for i, a := range claims {
		for _, b := range claims[i+1:] {
			if a.request == b.request || a.name != b.name {
				continue
			}
			own := rs[a.request].Name == a.name && rs[b.request].Name == b.name
			if own || a.tree != b.tree || a.limit != b.limit || excludes[a.use][b.use] {
				return &backend.InvalidError{
					Kind: backend.ErrInvalidOption, What: "set of names",
					Value: fmt.Sprintf("%q and %q", rs[a.request].Name, rs[b.request].Name),
					Why:   "they exclude each other, so nobody can hold both",
				}
			}
		}
	}
	return nil
}
