package server

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// Every goroutine of a server ends with it, unless it waits for raft: at shutdown raft forgets entries on
// their way to a state machine that hangs, see landing in package replica. Some of these tests make it hang.
func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{serverRole: serve})
	testtier.Wide(8)
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/fencelock/fencelock/internal/server/replica.landing.func1"))
}
