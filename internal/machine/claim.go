package machine

import (
	"slices"
	"strings"
)

// modes are the ways in which a name is claimed. A hierarchical request leaves intentions on the ancestors of its name.
type modes uint8

const (
	exclusive modes = 1 << iota
	shared
	permits
	intentShared    // something below is wanted in shared mode
	intentExclusive // something below is wanted exclusively

	modeCount = 5
)

// claim is the use of one name that one or several requests have or want.
type claim struct {
	name    string
	modes   modes
	permits uint32
	limit   uint32 // of permits; zero for all other modes
	tree    bool   // hierarchical
}

// compatible reports whether two claims of one name can be held concurrently. It alone defines exclusion. Claims that
// do not mix never meet here: see entry.mixes.
func compatible(a, b claim) bool {
	switch {
	case a.modes == 0 || b.modes == 0:
		return true
	case (a.modes|b.modes)&exclusive != 0:
		return false
	case a.modes&shared != 0 && b.modes&intentExclusive != 0, a.modes&intentExclusive != 0 && b.modes&shared != 0:
		return false
	case a.modes&permits != 0:
		return uint64(a.permits)+uint64(b.permits) <= uint64(a.limit)
	}
	return true
}

// own returns the claim of r for its own name.
func (r *Request) own() claim {
	c := claim{name: r.Name, modes: exclusive, tree: r.Hierarchical}
	switch r.Kind {
	case Shared:
		c.modes = shared
	case Permits:
		c.modes, c.permits, c.limit = permits, r.Permits, r.Limit
	}
	return c
}

// intent returns the claim of r, which is hierarchical, on its ancestors.
func (r *Request) intent() modes {
	if r.Kind == Shared {
		return intentShared
	}
	return intentExclusive
}

// appendClaims appends all claims of r: the ancestors from the root down, then its own name.
func appendClaims(dst []claim, r *Request) []claim {
	if r.Hierarchical {
		for i := 1; i < len(r.Name); i++ {
			if r.Name[i] == '/' {
				dst = append(dst, claim{name: r.Name[:i], modes: r.intent(), tree: true})
			}
		}
	}
	return append(dst, r.own())
}

// levels returns the number of claims that appendClaims appends.
func (r *Request) levels() int {
	if !r.Hierarchical {
		return 1
	}
	return 1 + strings.Count(r.Name[1:], "/")
}

// mergeClaims appends the claims of all requests, one per name. It reports false if they exclude each other
// or name one lock twice: no such acquire could ever be granted.
func mergeClaims(dst []claim, requests []Request) ([]claim, bool) {
	for i := range requests {
		dst = appendClaims(dst, &requests[i])
	}
	if len(requests) == 1 {
		return dst, true
	}
	slices.SortStableFunc(dst, func(a, b claim) int { return strings.Compare(a.name, b.name) })
	merged := dst[:0]
	for _, c := range dst {
		if n := len(merged); n > 0 && merged[n-1].name == c.name {
			last := &merged[n-1]
			if last.tree != c.tree || last.limit != c.limit || !compatible(*last, c) || last.isOwn() && c.isOwn() {
				return dst, false
			}
			last.modes |= c.modes
			continue
		}
		merged = append(merged, c)
	}
	return merged, true
}

// isOwn reports whether the name itself is wanted, and not only names below it.
func (c *claim) isOwn() bool { return c.modes&(exclusive|shared|permits) != 0 }
