package server

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/conformance/fault"
)

// Every goroutine of a server ends with it.
func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{serverRole: serve})
	goleak.VerifyTestMain(m)
}
