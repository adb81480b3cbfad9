package otel_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/observe/internal/scenario"
	"github.com/fencelock/fencelock/observe/otel"
)

// process is what a program has of OpenTelemetry.
type process struct {
	spans   *tracetest.InMemoryExporter
	tracers *sdktrace.TracerProvider
	reader  *sdkmetric.ManualReader
	locks   fencelock.MetadataObserver
}

func start(t *testing.T, o otel.Options) *process {
	t.Helper()
	p := &process{spans: tracetest.NewInMemoryExporter(), reader: sdkmetric.NewManualReader()}
	p.tracers = sdktrace.NewTracerProvider(sdktrace.WithSyncer(p.spans))
	o.TracerProvider, o.MeterProvider = p.tracers, sdkmetric.NewMeterProvider(sdkmetric.WithReader(p.reader))
	var err error
	if p.locks, err = otel.New(&o); err != nil {
		t.Fatal(err)
	}
	return p
}

// work returns a context with a span of the program.
func (p *process) work(ctx context.Context, name string) (context.Context, trace.Span) {
	return p.tracers.Tracer("test").Start(ctx, name)
}

// named returns the spans of a name that have ended.
func (p *process) named(name string) (some []tracetest.SpanStub) {
	for _, s := range p.spans.GetSpans() {
		if s.Name == name {
			some = append(some, s)
		}
	}
	return some
}

func attributeOf(all []attribute.KeyValue, key string) string {
	for _, kv := range all {
		if string(kv.Key) == key {
			return kv.Value.AsString()
		}
	}
	return ""
}

// The span of a waiter, in one process, links to the trace of the holder, in another.
func TestWaiterLinksToHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		service, one, two := scenario.New(t), start(t, otel.Options{}), start(t, otel.Options{})
		holder, _ := service.Client("holder", one.locks)
		waiter, _ := service.Client("waiter", two.locks)
		holding, holderSpan := one.work(t.Context(), "holder's work")
		lease, err := holder.Acquire(holding, "orders/1", fencelock.Metadata(map[string]string{"ticket": "OPS-12"}))
		if err != nil {
			t.Fatal(err)
		}
		state, err := holder.Look(t.Context(), "orders/1")
		if err != nil || len(state.Holders[0].Metadata) != 2 || state.Holders[0].Metadata["ticket"] != "OPS-12" {
			t.Errorf("holders %+v, %v, want metadata with traceparent and ticket", state.Holders, err)
		}
		waiting, waiterSpan := two.work(t.Context(), "waiter's work")
		_, err = waiter.Acquire(waiting, "orders/1", fencelock.WaitAtMost(time.Second))
		if !errors.Is(err, fencelock.ErrHeld) {
			t.Fatal(err)
		}
		time.AfterFunc(time.Second, func() { _ = lease.Release(t.Context()) })
		if _, err := waiter.Acquire(waiting, "orders/1"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond) // events wait for others for a moment
		synctest.Wait()
		spans := two.named("fencelock.acquire")
		if len(spans) != 2 {
			t.Fatalf("spans %+v, want two", spans)
		}
		for i, outcome := range []string{"contended", "acquired"} {
			s := spans[i]
			if s.Parent.SpanID() != waiterSpan.SpanContext().SpanID() || attributeOf(s.Attributes, "fencelock.name") != "orders/1" ||
				attributeOf(s.Attributes, "fencelock.outcome") != outcome {
				t.Errorf("span below %v with %v, want below the waiter's, for orders/1, %s", s.Parent, s.Attributes, outcome)
			}
			if d := s.EndTime.Sub(s.StartTime).Round(time.Millisecond); d != time.Second {
				t.Errorf("%s span of %v, want from call to outcome, 1s", outcome, d)
			}
			if len(s.Links) != 1 || s.Links[0].SpanContext.TraceID() != holderSpan.SpanContext().TraceID() ||
				s.Links[0].SpanContext.SpanID() != holderSpan.SpanContext().SpanID() {
				t.Errorf("%s span links to %+v, want the holder's span", outcome, s.Links)
			}
		}
		first := one.named("fencelock.acquire")
		if len(first) != 1 || len(first[0].Links) != 0 {
			t.Errorf("the holder's spans are %+v, want one without a link", first)
		}
	})
}

// Without a trace nothing travels with the hold, and a holder without one is not linked to.
func TestNoTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		service, p := scenario.New(t), start(t, otel.Options{})
		c, _ := service.Client("worker", p.locks)
		lease, err := c.Acquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		state, err := c.Look(t.Context(), "x")
		if err != nil || len(state.Holders[0].Metadata) != 0 {
			t.Errorf("holders %+v, %v, want no metadata", state.Holders, err)
		}
		_, err = c.Acquire(t.Context(), "x", fencelock.WaitAtMost(time.Second))
		if !errors.Is(err, fencelock.ErrHeld) {
			t.Fatal(err)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, s := range p.spans.GetSpans() {
			if len(s.Links) != 0 || s.Parent.IsValid() {
				t.Errorf("span %+v, want a root without links", s)
			}
		}
	})
}

// What happens to a lease is an event of the caller's span; a failed acquire is an error.
func TestEventsOfTheCallersSpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, otel.Options{})
		ctx, span := p.work(t.Context(), "work")
		scenario.New(t).Run(ctx, fencelock.Observers(p.locks))
		span.End()
		var got []string
		for _, e := range p.named("work")[0].Events {
			got = append(got, strings.TrimPrefix(e.Name, "fencelock."))
		}
		if want := "elected deposed forced lost forced suspect lost"; strings.Join(got, " ") != want {
			// The loss may be noticed before the call that caused it has returned.
			if strings.Join(got, " ") != "elected deposed lost forced forced suspect lost" {
				t.Errorf("events %q, want %q", got, want)
			}
		}
		failed := 0
		for _, s := range p.named("fencelock.acquire") {
			if s.Status.Code == codes.Error {
				failed++
			}
		}
		if failed != 1 {
			t.Errorf("%d spans are errors, want the deadlock", failed)
		}
	})
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, otel.Options{
			Label: "area", Value: func(name string) string { before, _, _ := strings.Cut(name, "/"); return before },
		})
		scenario.New(t).Run(t.Context(), p.locks)
		got := p.measured(t)
		for key, want := range scenario.Want {
			key[0] = "fencelock.client." + key[0]
			if v, ok := got[key]; !ok || v != want {
				t.Errorf("%s of %q is %v, exported: %t; want %v", key[0], key[1], v, ok, want)
			}
			delete(got, key)
		}
		for key, v := range got {
			if v != 0 {
				t.Errorf("%s of %q is %v, want 0", key[0], key[1], v)
			}
		}
	})
}

// measured returns what the meter exports, with counts of histograms, and checks the attributes.
func (p *process) measured(t *testing.T) map[[2]string]float64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := p.reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	got := map[[2]string]float64{}
	add := func(name string, set attribute.Set, v float64) {
		key := [2]string{name, ""}
		for _, kv := range set.ToSlice() {
			switch k := string(kv.Key); k {
			case "fencelock.outcome", "fencelock.end", "fencelock.reason", "fencelock.result":
				key[1] = kv.Value.AsString()
			case "fencelock.driver", "fencelock.tier", "fencelock.kind", "fencelock.area":
			default:
				t.Errorf("%s has the attribute %s", name, k)
			}
		}
		got[key] += v
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Histogram[float64]:
				for _, point := range data.DataPoints {
					add(m.Name, point.Attributes, float64(point.Count))
				}
			case metricdata.Sum[int64]:
				for _, point := range data.DataPoints {
					add(m.Name, point.Attributes, float64(point.Value))
				}
			default:
				t.Errorf("%s is a %T", m.Name, data)
			}
		}
	}
	return got
}

func TestNewRefusesLabels(t *testing.T) {
	if _, err := otel.New(&otel.Options{Label: "kind", Value: strings.ToUpper}); !errors.Is(err, fencelock.ErrInvalidOption) {
		t.Errorf("error %v, want ErrInvalidOption", err)
	}
}
