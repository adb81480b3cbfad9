package containers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/testtier"
)

// recorder is a testing.TB that records its outcome.
type recorder struct {
	testing.TB
	text            string
	skipped, failed bool
}

func TestMain(m *testing.M) {
	testtier.Wide(8)
	os.Exit(m.Run())
}

func (r *recorder) Skip(args ...any)             { r.skipped = true; r.end(fmt.Sprint(args...)) }
func (r *recorder) Fatal(args ...any)            { r.failed = true; r.end(fmt.Sprint(args...)) }
func (r *recorder) Fatalf(f string, args ...any) { r.failed = true; r.end(fmt.Sprintf(f, args...)) }
func (r *recorder) end(text string)              { r.text = text; panic(r) }

// outcome returns the outcome of a start that must fail.
func outcome(t *testing.T, start func(testing.TB)) (r *recorder) {
	t.Helper()
	r = &recorder{TB: t}
	defer func() {
		if got := recover(); got != r {
			t.Fatalf("the server was started, or: %v", got)
		}
	}()
	start(r)
	return r
}

func noEngine(context.Context, spec) (node, string, error) { return nil, "", errNoEngine }
func brokenContainer(context.Context, spec) (node, string, error) {
	return nil, "", errors.New("no such image")
}
func brokenProcess(context.Context, spec) (node, string, error) { return nil, "", exec.ErrNotFound }

func TestWithNothingInstalled(t *testing.T) {
	start := func(t testing.TB) { run(t, redisSpec, nil, noEngine, brokenProcess) }
	t.Setenv("FENCELOCK_REQUIRE", "")
	r := outcome(t, start)
	if !r.skipped || !strings.Contains(r.text, "install a Docker engine") || !strings.Contains(r.text, "redis-server") {
		t.Errorf("skipped: %v, with: %q", r.skipped, r.text)
	}
	t.Setenv("FENCELOCK_REQUIRE", "all")
	if r := outcome(t, start); !r.failed {
		t.Errorf("FENCELOCK_REQUIRE=all: failed: %v, with: %q", r.failed, r.text)
	}
}

func TestFallBackToAProcess(t *testing.T) {
	needRedis(t)
	for _, c := range []struct {
		name, require string
		newContainer  create
		falls         bool
	}{
		{"no engine", "", noEngine, true},
		{"no engine, required", "all", noEngine, true},
		{"no image", "", brokenContainer, true},
		{"no image, required", "all", brokenContainer, false}, // an engine answers, so its container must start
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("FENCELOCK_REQUIRE", c.require)
			if c.falls {
				s := run(t, redisSpec, nil, c.newContainer, newProcess)
				if !strings.Contains(s.String(), "process") || !redisReady(t.Context(), s.Addr()) {
					t.Errorf("%s does not answer, or is no process", s)
				}
				return
			}
			r := outcome(t, func(t testing.TB) { run(t, redisSpec, nil, c.newContainer, newProcess) })
			if !r.failed || !strings.Contains(r.text, "no such image") {
				t.Errorf("failed: %v, with: %q", r.failed, r.text)
			}
		})
	}
}

func needRedis(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath(redisSpec.binary); err != nil {
		t.Skip("REDIS CANNOT BE STARTED AS A PROCESS: install redis-server")
	}
}

// A server that cannot start must soon report its own error message.
func TestServerExitsAtStart(t *testing.T) {
	needRedis(t)
	t.Setenv("FENCELOCK_REQUIRE", "all")
	start := time.Now()
	r := outcome(t, func(t testing.TB) { Redis(t, AsProcess(), Args("--no-such-setting", "1")) })
	if !r.failed || !strings.Contains(r.text, "no-such-setting") {
		t.Errorf("failed: %v, with: %q", r.failed, r.text)
	}
	if took := time.Since(start); took > startTimeout/2 {
		t.Errorf("it took %v to notice", took)
	}
}

func TestImageThatIsMissing(t *testing.T) {
	t.Setenv("FENCELOCK_REQUIRE", "")
	r := outcome(t, func(t testing.TB) { Redis(t, AsContainer(), Image("127.0.0.1:1/no/such/image:1")) })
	if !r.skipped || !strings.Contains(r.text, "pull image") && !strings.Contains(r.text, errNoEngine.Error()) {
		t.Errorf("skipped: %v, with: %q", r.skipped, r.text)
	}
}
