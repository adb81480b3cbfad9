package server

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/deep"
)

// Every goroutine of a server ends with it, but for one that raft keeps waiting: it forgets entries that are on their
// way to a state machine that hangs when it shuts down, see landing in package replica, and some of these tests have it
// hang.
func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{serverRole: serve})
	deep.Wide(8)
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/fencelock/fencelock/internal/server/replica.landing.func1"))
}
