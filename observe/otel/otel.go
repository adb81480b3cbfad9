// Package otel reports what happens to the locks of a client through OpenTelemetry: a span for each acquire, with a link
// to the trace of the holder that it waited for, and metrics. docs/OBSERVABILITY.md lists them.
//
//	traces, err := otel.New(nil)
//	...
//	locks, err := fencelock.ForEfficiency(driver, &fencelock.Options{Observer: traces})
//
// The span fencelock.acquire lasts from the call to its outcome, below the span of the caller's context. The caller's
// traceparent travels in the metadata of its hold (key "traceparent"), where the driver has CapMetadata; an acquire that
// waits for more than 50 ms looks who holds the lock, and links to that trace if the driver has CapInspect. What happens
// to the lease later is an event of the caller's span, while that records.
package otel

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/observe/internal/measure"
)

// scope names this package to the providers.
const scope = "github.com/fencelock/fencelock/observe/otel"

// traceparent is the key in the metadata of a hold.
const traceparent = "traceparent"

// Options configure New. Nil and the zero value mean the defaults.
type Options struct {
	// TracerProvider and MeterProvider get the spans and the metrics. Default: the program's, from package otel.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	// Label is one more attribute of the metrics, and Value returns its value for the name of a lock. After 100 values
	// Value's results are counted as "other". Default: no label. The name of a lock is an attribute of spans alone.
	Label string
	Value func(name string) string
}

// observer makes spans and metrics of events.
type observer struct {
	tracer   trace.Tracer
	recorder *measure.Recorder
}

var _ fencelock.MetadataObserver = (*observer)(nil)

// New returns an observer for any number of clients. The error is fencelock.ErrInvalidOption for a Label that is not a
// valid name for a label, or one of the observer's own, and the provider's if that cannot make an instrument.
func New(o *Options) (fencelock.MetadataObserver, error) {
	if o == nil {
		o = &Options{}
	}
	if err := measure.ValidateLabel(o.Label, o.Value); err != nil {
		return nil, fmt.Errorf("otel.New: %w", err)
	}
	tracers, meters := o.TracerProvider, o.MeterProvider
	if tracers == nil {
		tracers = otel.GetTracerProvider()
	}
	if meters == nil {
		meters = otel.GetMeterProvider()
	}
	build, err := instruments(meters.Meter(scope), o.Label)
	if err != nil {
		return nil, fmt.Errorf("otel.New: %w", err)
	}
	return &observer{tracer: tracers.Tracer(scope), recorder: measure.NewRecorder(build, o.Value)}, nil
}

// Metadata implements fencelock.MetadataObserver: the traceparent of ctx, if there is one.
func (o *observer) Metadata(ctx context.Context) map[string]string {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return nil
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	delete(carrier, "tracestate") // of use to the vendor of the holder's spans alone
	return carrier
}

// Observe implements fencelock.Observer.
func (o *observer) Observe(ctx context.Context, e fencelock.Event) {
	o.recorder.Observe(&e)
	switch e.Type {
	case fencelock.EventAcquired, fencelock.EventContended, fencelock.EventFailed:
		o.span(ctx, &e)
	case fencelock.EventSuspect, fencelock.EventLost, fencelock.EventElected, fencelock.EventDeposed,
		fencelock.EventForced, fencelock.EventAbandoned:
		if caller := trace.SpanFromContext(ctx); caller.IsRecording() {
			caller.AddEvent("fencelock."+string(e.Type),
				trace.WithTimestamp(e.Time), trace.WithAttributes(attributes(&e)...))
		}
	}
}

// span reports an acquire.
func (o *observer) span(ctx context.Context, e *fencelock.Event) {
	opts := []trace.SpanStartOption{
		trace.WithTimestamp(e.Time.Add(-e.Wait)), trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(attributes(e)...),
	}
	if holder := traceOf(e.Holder); holder.IsValid() {
		opts = append(opts, trace.WithLinks(trace.Link{
			SpanContext: holder,
			Attributes: []attribute.KeyValue{
				attribute.String("fencelock.link", "holder"),
				attribute.String("fencelock.holder.hold_id", e.Holder.HoldID),
			},
		}))
	}
	_, span := o.tracer.Start(ctx, "fencelock.acquire", opts...)
	if e.Type == fencelock.EventFailed {
		span.SetStatus(codes.Error, e.Err.Error())
	}
	span.End(trace.WithTimestamp(e.Time))
}

// traceOf returns the span in which a hold was acquired; invalid if it is not known.
func traceOf(h *fencelock.Holder) trace.SpanContext {
	if h == nil || h.Metadata[traceparent] == "" {
		return trace.SpanContext{}
	}
	carrier := propagation.MapCarrier{traceparent: h.Metadata[traceparent]}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
}

// attributes returns the event's fields about the lock. The name is here, since spans are not summed up.
func attributes(e *fencelock.Event) []attribute.KeyValue {
	all := []attribute.KeyValue{
		attribute.String("fencelock.driver", e.Driver),
		attribute.String("fencelock.tier", e.Tier.String()),
		attribute.String("fencelock.name", e.Name),
		attribute.String("fencelock.outcome", string(e.Type)),
		attribute.String("fencelock.owner", e.Owner),
		attribute.Bool("fencelock.contended", e.Contended),
	}
	text := func(key, value string) {
		if value != "" {
			all = append(all, attribute.String(key, value))
		}
	}
	if e.HoldID != "" {
		text("fencelock.kind", e.Kind.String())
		text("fencelock.hold_id", e.HoldID)
	}
	if e.Token.Valid() {
		text("fencelock.token", e.Token.String())
	}
	if e.Holder != nil {
		text("fencelock.holder.owner", e.Holder.Owner)
	}
	text("fencelock.reason", string(e.Reason))
	text("fencelock.by", e.By)
	text("fencelock.why", e.Why)
	if e.Err != nil {
		text("fencelock.error", e.Err.Error())
	}
	return all
}

// instruments returns what builds the series of a meter.
func instruments(m metric.Meter, label string) (
	build func(*measure.Key, *measure.Instrument, string) func(float64), err error,
) {
	makers := make(map[*measure.Instrument]func(metric.MeasurementOption) func(float64), len(measure.All))
	for i := range measure.All {
		if makers[&measure.All[i]], err = maker(m, &measure.All[i]); err != nil {
			return nil, fmt.Errorf("instrument %s: %w", nameOf(&measure.All[i]), err)
		}
	}
	return func(k *measure.Key, in *measure.Instrument, value string) func(float64) {
		names, values := in.Labels(label), k.Values(in, label, value)
		set := make([]attribute.KeyValue, len(names))
		for i := range names {
			set[i] = attribute.String("fencelock."+names[i], values[i])
		}
		return makers[in](metric.WithAttributeSet(attribute.NewSet(set...)))
	}, nil
}

// nameOf returns the name of an instrument as OpenTelemetry has it.
func nameOf(in *measure.Instrument) string { return "fencelock.client." + in.Name }

// maker makes an instrument, and returns what adds to it with a set of attributes.
func maker(m metric.Meter, in *measure.Instrument) (func(metric.MeasurementOption) func(float64), error) {
	ctx, name, help := context.Background(), nameOf(in), metric.WithDescription(in.Help)
	switch in.Type {
	case measure.Histogram:
		i, err := m.Float64Histogram(name, help, metric.WithUnit("s"),
			metric.WithExplicitBucketBoundaries(in.Buckets...))
		return func(of metric.MeasurementOption) func(float64) {
			opts := []metric.RecordOption{of}
			return func(v float64) { i.Record(ctx, v, opts...) }
		}, err
	case measure.Counter:
		i, err := m.Int64Counter(name, help)
		return adder(func(v int64, opts ...metric.AddOption) { i.Add(ctx, v, opts...) }), err
	}
	i, err := m.Int64UpDownCounter(name, help)
	return adder(func(v int64, opts ...metric.AddOption) { i.Add(ctx, v, opts...) }), err
}

// adder returns what adds whole numbers with a set of attributes. It adds 0 first, so that the series is exported.
func adder(add func(int64, ...metric.AddOption)) func(metric.MeasurementOption) func(float64) {
	return func(of metric.MeasurementOption) func(float64) {
		opts := []metric.AddOption{of}
		add(0, opts...)
		return func(v float64) { add(int64(v), opts...) }
	}
}
