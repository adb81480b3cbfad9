package zookeeper

import (
	"fmt"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

func permits(n, limit int) kit.Use {
	return kit.Use{Kind: backend.KindPermits, Permits: n, Limit: limit}
}

// shared is what a reader asks for; a writer asks for the zero use.
var shared = kit.Use{Kind: backend.KindShared}

func TestNodeNamesShowTheKind(t *testing.T) {
	t.Parallel()
	const id = "0123456789abcdef0123456789abcdef"
	seen := map[string]string{}
	for _, requestID := range []string{
		id, id + "-shared", id + "-exclusive", id + "-2of8", id + "-shared-shared", id + "-9of8",
		id + "-02of8", id + "-", id + "-of",
		"012345678-shared", "0123456789abcdef-shared", "-shared0123456789", "01234567-89ab-cdef-0123-456789abcdef",
	} {
		for _, u := range []kit.Use{{}, shared, permits(2, 8), permits(1, 1)} {
			r := backend.Request{RequestID: requestID, Kind: u.Kind, Permits: u.Permits, Limit: u.Limit}
			name, what := nodeName(r), fmt.Sprintf("%v of %q", u, requestID)
			if other, taken := seen[name]; taken {
				t.Errorf("%s and %s have the same node %q", what, other, name)
			}
			seen[name] = what
			e, ok := entryOf("/x", name+".0000000007")
			if !ok || e.requestID != requestID || e.Use != u {
				t.Errorf("the node %q of %s is read as %v of %q, %v", name, what, e.Use, e.requestID, ok)
			}
			if backend.ValidateRequestID(name) != nil {
				t.Errorf("the node %q of %s is no entry to those who know no kinds", name, what)
			}
		}
	}
}
