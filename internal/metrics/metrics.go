package metrics

import (
	"crypto/x509"
	"net/http"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// Metrics are the metrics of one process, with their own registry. All methods are safe for concurrent use.
type Metrics struct {
	registry *prometheus.Registry
	requests *prometheus.HistogramVec
	counts   *counts
	server   atomic.Pointer[server.Server]
}

// New returns the metrics of a process that serves HTTP; version is the program's.
func New(version string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(), requests: histogram(&requests),
	}
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: build.Name, Help: build.Help}, build.Labels)
	info.WithLabelValues(version, runtime.Version()).Set(1)
	m.registry.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		m.requests, info)
	return m
}

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Request counts an HTTP request.
func (m *Metrics) Request(method, route string, status int, took time.Duration) {
	switch method {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodHead:
	default:
		method = "other"
	}
	if route == "" || route == "/" {
		route = "other"
	}
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Observe(took.Seconds())
}

// Certificate exports when a certificate of the process expires; use is clients or members, and leaf returns the present
// one.
func (m *Metrics) Certificate(use string, leaf func() *x509.Certificate) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: certificate.Name, Help: certificate.Help, ConstLabels: prometheus.Labels{certificate.Labels[0]: use},
	}, func() float64 { return float64(leaf().NotAfter.Unix()) }))
}

// Audit exports how many audit events were dropped.
func (m *Metrics) Audit(dropped func() uint64) {
	m.registry.MustRegister(prometheus.NewCounterFunc(
		prometheus.CounterOpts{Name: auditDropped.Name, Help: auditDropped.Help},
		func() float64 { return float64(dropped()) }))
}

// Configure has a server report its counts to m. Server follows once it has started.
func (m *Metrics) Configure(c *server.Config) {
	appended := prometheus.NewHistogram(
		prometheus.HistogramOpts{Name: appends.Name, Help: appends.Help, Buckets: appends.Buckets})
	m.registry.MustRegister(appended)
	m.counts = newCounts()
	c.Meter, c.Appended = m.counts, func(took time.Duration) { appended.Observe(took.Seconds()) }
}

// Server exports how a server is, which Configure was called for.
func (m *Metrics) Server(s *server.Server) {
	m.server.Store(s)
	leader := prometheus.Labels{leaderLabel: s.ID()}
	c := m.counts
	prometheus.WrapRegistererWith(leader, m.registry).MustRegister(c.acquires, c.holds, c.ended, c.limited, c.stale)
	m.registry.MustRegister(&exported{m, leader})
}

// state is the source of a member's gauges.
type state struct{ server.Measurement }

func flag(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

func histogram(of *Metric) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(
		prometheus.HistogramOpts{Name: of.Name, Help: of.Help, Buckets: of.Buckets}, of.Labels)
}

func counter(of *Metric) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: of.Name, Help: of.Help}, of.Labels)
}

// counts are a member's counts as the leader. The values stay when another member leads, and continue when this one
// leads later.
type counts struct {
	acquires, holds       *prometheus.HistogramVec
	ended, limited, stale *prometheus.CounterVec
}

var _ lead.Meter = (*counts)(nil)

// newCounts returns counters that are exported as 0 from the start, so that rate sees the first increment.
func newCounts() *counts {
	c := &counts{
		acquires: histogram(&acquires), holds: histogram(&holds), ended: counter(&ended), limited: counter(&limited),
		stale: counter(&stale),
	}
	for _, kind := range Kinds {
		for _, end := range ends {
			c.ended.WithLabelValues(kind, end)
		}
		for _, outcome := range outcomes {
			c.acquires.WithLabelValues(kind, outcome, "no")
		}
		c.acquires.WithLabelValues(kind, lead.OutcomeGranted, "yes")
		c.acquires.WithLabelValues(kind, lead.OutcomeCancelled, "yes")
	}
	for _, limit := range limited.Values["limit"] {
		c.limited.WithLabelValues(limit)
	}
	c.stale.WithLabelValues()
	return c
}

// Acquired implements lead.Meter.
func (c *counts) Acquired(kind machine.Kind, outcome string, waited bool, took time.Duration) {
	w := "no"
	if waited {
		w = "yes"
	}
	c.acquires.WithLabelValues(Kinds[kind], outcome, w).Observe(took.Seconds())
}

// Ended implements lead.Meter.
func (c *counts) Ended(kind machine.Kind, end string, held time.Duration) {
	c.ended.WithLabelValues(Kinds[kind], end).Inc()
	if held >= 0 {
		c.holds.WithLabelValues(Kinds[kind], end).Observe(held.Seconds())
	}
}

// Limited implements lead.Meter.
func (c *counts) Limited(limit string) { c.limited.WithLabelValues(limit).Inc() }

// StaleRelease implements lead.Meter.
func (c *counts) StaleRelease() { c.stale.WithLabelValues().Inc() }

// exported collects the state of a member, and, while it leads, of the cluster.
type exported struct {
	of     *Metrics
	leader prometheus.Labels
}

// Describe has no effect: the exported metrics depend on the leader.
func (e *exported) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (e *exported) Collect(to chan<- prometheus.Metric) {
	s := state{e.of.server.Load().Measure()}
	labels := prometheus.Labels(nil)
	send := func(m *Metric, v float64, values ...string) {
		to <- prometheus.MustNewConstMetric(
			prometheus.NewDesc(m.Name, m.Help, m.Labels, labels), prometheus.GaugeValue, v, values...)
	}
	for i := range gauges {
		send(&gauges[i].Metric, gauges[i].value(&s))
	}
	standing := s.Standing
	if standing == nil {
		return
	}
	labels = e.leader
	for kind, name := range Kinds {
		send(&held, float64(standing.Holds[kind]), name)
		send(&waiters, float64(standing.Waits[kind]), name)
		send(&oldestHold, standing.OldestHold[kind].Seconds(), name)
		send(&oldestWait, standing.OldestWait[kind].Seconds(), name)
	}
	send(&longest, float64(standing.LongestQueue))
	send(&sessions, float64(standing.Sessions))
	send(&limits, float64(standing.Limits.Sessions), "sessions")
	send(&limits, float64(standing.Limits.Holds), "holds")
	send(&limits, float64(standing.Limits.Waits), "waits")
}
