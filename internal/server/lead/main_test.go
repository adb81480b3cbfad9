package lead

import (
	"testing"

	"go.uber.org/goleak"
)

// Every goroutine of a leadership ends with it.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
