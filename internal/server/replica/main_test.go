package replica

import (
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/internal/testtier"
)

// Every goroutine of a replica ends with it.
func TestMain(m *testing.M) {
	testtier.Wide(8)
	goleak.VerifyTestMain(m)
}

// patience is the maximum time that a test waits for an expected event: the machine may be slow.
const patience = 30 * time.Second

// quiet is a logger for tests: the test reports failures.
func quiet(t testing.TB) *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
	return slog.New(slog.DiscardHandler)
}

// testWriter writes to the test's log until the test has ended.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(text []byte) (int, error) {
	if w.t.Context().Err() == nil {
		w.t.Logf("%s", text)
	}
	return len(text), nil
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}
