package observe_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/observe/internal/measure"
	"github.com/fencelock/fencelock/observe/internal/scenario"
	"github.com/fencelock/fencelock/observe/logs"
	"github.com/fencelock/fencelock/observe/otel"
	"github.com/fencelock/fencelock/observe/prom"
)

// All three observers get all events of one client.
func TestCombined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		spans := tracetest.NewInMemoryExporter()
		reg := prometheus.NewPedanticRegistry()
		metrics, err := prom.New(reg, nil)
		if err != nil {
			t.Fatal(err)
		}
		traces, err := otel.New(&otel.Options{
			TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans)),
			MeterProvider:  sdkmetric.NewMeterProvider(),
		})
		if err != nil {
			t.Fatal(err)
		}
		l := slog.New(slog.NewTextHandler(&out, nil))
		scenario.New(t).Run(t.Context(), fencelock.Observers(logs.New(l), metrics, traces))
		families, err := reg.Gather()
		if err != nil || len(families) != len(measure.All) {
			t.Errorf("%d metrics, %v, want %d", len(families), err, len(measure.All))
		}
		if n := len(spans.GetSpans()); n != 7 {
			t.Errorf("%d spans, want 7", n)
		}
		if n := strings.Count(out.String(), "lock lost"); n != 2 {
			t.Errorf("%d losses in the log, want 2", n)
		}
	})
}

// docs/OBSERVABILITY.md has each metric with its label, and no other.
func TestDocumentation(t *testing.T) {
	doc, err := os.ReadFile("../docs/OBSERVABILITY.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(fencelock_client_[a-z_]+)` \\|.*$").FindAllSubmatch(doc, -1) {
		listed[string(row[1])] = true
		row := string(row[0])
		for i := range measure.All {
			in := &measure.All[i]
			if !strings.Contains(row, "`fencelock.client."+in.Name+"`") {
				continue
			}
			for _, value := range in.Values {
				if !strings.Contains(row, "`"+value+"`") {
					t.Errorf("the row of %s lacks %s", in.Name, value)
				}
			}
			listed[in.Name] = true
		}
	}
	for i := range measure.All {
		if !listed[measure.All[i].Name] {
			t.Errorf("docs/OBSERVABILITY.md has no row of %s", measure.All[i].Name)
		}
	}
	reg := prometheus.NewPedanticRegistry()
	if _, err := prom.New(reg, nil); err != nil {
		t.Fatal(err)
	}
	if want := 2 * len(measure.All); len(listed) != want {
		t.Errorf("%d names are listed, want %d", len(listed), want)
	}
}

// BenchmarkCycle is an acquire and a release on the memory driver, until all their events have been delivered.
func BenchmarkCycle(b *testing.B) {
	metrics, err := prom.New(prometheus.NewRegistry(), nil)
	if err != nil {
		b.Fatal(err)
	}
	traces, err := otel.New(&otel.Options{
		TracerProvider: sdktrace.NewTracerProvider(), MeterProvider: sdkmetric.NewMeterProvider(),
	})
	if err != nil {
		b.Fatal(err)
	}
	l := slog.New(slog.NewTextHandler(io.Discard, nil))
	for _, way := range []struct {
		name     string
		observer fencelock.Observer
	}{
		{"none", nil}, {"logs", logs.New(l)}, {"prom", metrics}, {"otel", traces},
		{"logs+prom", fencelock.Observers(logs.New(l), metrics)},
	} {
		b.Run(way.name, func(b *testing.B) {
			observer := way.observer
			if observer != nil {
				observer = fencelock.Observers(observer, fencelock.ObserverFunc(func(_ context.Context, e fencelock.Event) {
					if e.Type == fencelock.EventShed {
						b.Errorf("%d events were dropped", e.Count)
					}
				}))
			}
			c, err := fencelock.ForCorrectness(memory.New(nil), &fencelock.Options{Observer: observer})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				lease, err := c.Acquire(b.Context(), "x")
				if err == nil {
					err = lease.Release(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			if err := c.Close(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}
