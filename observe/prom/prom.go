// Package prom exports what happens to the locks of a client as Prometheus metrics. docs/OBSERVABILITY.md lists them.
//
//	metrics, err := prom.New(prometheus.DefaultRegisterer, nil)
//	...
//	locks, err := fencelock.ForEfficiency(driver, &fencelock.Options{Observer: metrics})
package prom

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/observe/internal/measure"
)

// Options configure New. Nil and the zero value mean the defaults.
type Options struct {
	// Label is the name of one more label, and Value returns its value for the name of a lock: the part before the first
	// slash, for example. Names of locks are never labels themselves: each label value is a time series that stays.
	// After 100 values Value's results are counted as "other". Both are set or neither.
	Label string
	Value func(name string) string
}

// Observer counts events. It is a fencelock.Observer for any number of clients, and a prometheus.Collector.
type Observer struct {
	recorder *measure.Recorder
	vectors  []prometheus.Collector
}

var (
	_ fencelock.Observer   = (*Observer)(nil)
	_ prometheus.Collector = (*Observer)(nil)
)

// New returns an Observer that is registered with reg; nil: unregistered, so that the caller registers it. If reg has
// one with the same label already, New returns that one, so that several clients share the metrics. The label driver
// distinguishes them.
//
// The error is fencelock.ErrInvalidOption for a Label that is not a valid name for a label, or one of the observer's
// own. It is reg's if that has other metrics of the same names.
func New(reg prometheus.Registerer, o *Options) (*Observer, error) {
	if o == nil {
		o = &Options{}
	}
	if err := measure.ValidateLabel(o.Label, o.Value); err != nil {
		return nil, fmt.Errorf("prom.New: %w", err)
	}
	observer := newObserver(o)
	if reg == nil {
		return observer, nil
	}
	err := reg.Register(observer)
	if already := (prometheus.AlreadyRegisteredError{}); errors.As(err, &already) {
		if existing, ok := already.ExistingCollector.(*Observer); ok {
			return existing, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("prom.New: %w", err)
	}
	return observer, nil
}

// nameOf returns the name of an instrument as Prometheus has it.
func nameOf(in *measure.Instrument) string {
	name := "fencelock_client_" + strings.ReplaceAll(in.Name, ".", "_")
	switch in.Type {
	case measure.Histogram:
		return name + "_seconds"
	case measure.Counter:
		return name + "_total"
	}
	return name
}

func newObserver(o *Options) *Observer {
	p := &Observer{}
	adders := make(map[*measure.Instrument]func(values []string) func(float64), len(measure.All))
	for i := range measure.All {
		in := &measure.All[i]
		vector, adder := vectorOf(in, in.Labels(o.Label))
		p.vectors, adders[in] = append(p.vectors, vector), adder
		if in.NoLabels {
			adder(nil) // exported as 0 from the start
		}
	}
	build := func(k *measure.Key, in *measure.Instrument, value string) func(float64) {
		return adders[in](k.Values(in, o.Label, value))
	}
	p.recorder = measure.NewRecorder(build, o.Value)
	return p
}

// vectorOf returns the vector of an instrument, and what returns the adder of one of its series.
func vectorOf(in *measure.Instrument, labels []string) (prometheus.Collector, func([]string) func(float64)) {
	name := nameOf(in)
	switch in.Type {
	case measure.Histogram:
		v := prometheus.NewHistogramVec(
			prometheus.HistogramOpts{Name: name, Help: in.Help, Buckets: in.Buckets}, labels)
		return v, func(values []string) func(float64) { return v.WithLabelValues(values...).Observe }
	case measure.Counter:
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: in.Help}, labels)
		return v, func(values []string) func(float64) { return v.WithLabelValues(values...).Add }
	}
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: in.Help}, labels)
	return v, func(values []string) func(float64) { return v.WithLabelValues(values...).Add }
}

// Observe implements fencelock.Observer.
func (p *Observer) Observe(_ context.Context, e fencelock.Event) { p.recorder.Observe(&e) }

// Describe implements prometheus.Collector.
func (p *Observer) Describe(to chan<- *prometheus.Desc) {
	for _, v := range p.vectors {
		v.Describe(to)
	}
}

// Collect implements prometheus.Collector.
func (p *Observer) Collect(to chan<- prometheus.Metric) {
	for _, v := range p.vectors {
		v.Collect(to)
	}
}
