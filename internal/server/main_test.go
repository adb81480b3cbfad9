package server

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/deep"
)

// Every goroutine of a server ends with it.
func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{serverRole: serve})
	deep.Wide(8)
	goleak.VerifyTestMain(m)
}
