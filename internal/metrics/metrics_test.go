package metrics_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/metrics"
	"github.com/fencelock/fencelock/internal/server"
)

// journal keeps what a server logs.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) line(message string) string {
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(j.text.String()) {
		if strings.Contains(line, `msg="`+message+`"`) {
			return line
		}
	}
	return ""
}

// member is a server with its metrics.
type member struct {
	*server.Server
	metrics *metrics.Metrics
	log     *journal
}

func start(t testing.TB, dir string) *member {
	t.Helper()
	m := startMember(t, server.Config{
		DataDir: dir, Listen: "127.0.0.1:0", MinTTL: 100 * time.Millisecond,
		Limits: machine.Limits{Waits: 2, ClientShare: 100},
	})
	settles(t, "the server leads", m.Leads)
	return m
}

// startMember starts a server, which does not lead yet.
func startMember(t testing.TB, c server.Config) *member {
	t.Helper()
	m := &member{metrics: metrics.New("v1"), log: &journal{}}
	c.Log = slog.New(slog.NewTextHandler(m.log, nil))
	m.metrics.Configure(&c)
	if err := freeport.Again(func() (err error) {
		m.Server, err = server.Start(context.Background(), c)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close(context.Background()) })
	m.metrics.Server(m.Server)
	return m
}

func (m *member) client(t *testing.T, owner string, ttl time.Duration) *fencelock.Client {
	t.Helper()
	d := builtin.New([]string{m.Addr().String()}, nil)
	c, err := fencelock.ForCorrectness(d, &fencelock.Options{Owner: owner, TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// scrape returns what is exported.
func (m *member) scrape(t testing.TB) map[string]*dto.MetricFamily {
	t.Helper()
	w := httptest.NewRecorder()
	m.metrics.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	parser := expfmt.NewTextParser(model.LegacyValidation)
	all, err := parser.TextToMetricFamilies(w.Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("status %d, %v", w.Code, err)
	}
	return all
}

// value returns a sample: the count of a histogram, else the value. labels are pairs.
func value(all map[string]*dto.MetricFamily, name string, labels ...string) (v float64, found bool) {
	for _, x := range all[name].GetMetric() {
		matches := 0
		for _, l := range x.Label {
			for i := 0; i < len(labels); i += 2 {
				if l.GetName() == labels[i] && l.GetValue() == labels[i+1] {
					matches++
				}
			}
		}
		if matches*2 == len(labels) {
			found = true
			v += x.GetCounter().GetValue() + x.GetGauge().GetValue() + float64(x.GetHistogram().GetSampleCount())
		}
	}
	return v, found
}

// patience bounds every wait for something that must happen.
const patience = time.Minute

// wants waits until a sample has its value.
func (m *member) wants(t *testing.T, want float64, name string, labels ...string) {
	t.Helper()
	m.awaits(t, func(v float64) bool { return v == want }, name, labels...)
}

// counts waits until something was counted. The leader counts after it has answered.
func (m *member) counts(t *testing.T, name string, labels ...string) {
	t.Helper()
	m.awaits(t, func(v float64) bool { return v > 0 }, name, labels...)
}

func (m *member) awaits(t *testing.T, is func(v float64) bool, name string, labels ...string) {
	t.Helper()
	settles(t, fmt.Sprintf("%s%v has its value", name, labels), func() bool {
		v, found := value(m.scrape(t), name, labels...)
		return found && is(v)
	})
}

// logs waits until the log has a line with a message, and checks that the line has the parts. The leader counts first.
func (m *member) logs(t *testing.T, message string, parts ...string) {
	t.Helper()
	line := m.log.line(message)
	for deadline := time.Now().Add(patience); line == "" && time.Now().Before(deadline); line = m.log.line(message) {
		time.Sleep(5 * time.Millisecond)
	}
	for _, part := range parts {
		if !strings.Contains(line, part) {
			t.Errorf("the log has %q of a %s, want %s", line, message, part)
		}
	}
}

const prefix = "fencelock_server_"

func must[T any](t *testing.T) func(T, error) T {
	return func(x T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
}

// The leader counts each acquire, wait and end once, and logs who did what.
func TestLeader(t *testing.T) {
	t.Parallel()
	m := start(t, t.TempDir())
	a, b := m.client(t, "a", time.Minute), m.client(t, "b", time.Minute)
	lease := must[*fencelock.Lease](t)
	ctx := t.Context()

	x := lease(a.Acquire(ctx, "x"))
	if _, err := b.TryAcquire(ctx, "x"); !errors.Is(err, fencelock.ErrHeld) {
		t.Fatal(err)
	}
	waiting := make(chan *fencelock.Lease)
	go func() { l, _ := b.Acquire(ctx, "x"); waiting <- l }()
	m.wants(t, 1, prefix+"waiters", "kind", "exclusive")
	m.wants(t, 1, prefix+"longest_queue")
	m.wants(t, 1, prefix+"holds", "kind", "exclusive")
	if v, _ := value(m.scrape(t), prefix+"oldest_hold_seconds", "kind", "exclusive"); v <= 0 {
		t.Errorf("the oldest hold is %v s old", v)
	}
	if err := b.ForceRelease(ctx, "x", "a test"); err != nil {
		t.Fatal(err)
	}
	y := <-waiting
	_ = x.Release(ctx)
	m.wants(t, 1, prefix+"acquire_duration_seconds", "kind", "exclusive", "outcome", "granted", "waited", "no")
	m.wants(t, 1, prefix+"acquire_duration_seconds", "kind", "exclusive", "outcome", "granted", "waited", "yes")
	m.wants(t, 1, prefix+"acquire_duration_seconds", "kind", "exclusive", "outcome", "held", "waited", "no")
	m.wants(t, 1, prefix+"holds_ended_total", "kind", "exclusive", "end", "forced")
	m.wants(t, 0, prefix+"waiters", "kind", "exclusive")
	m.wants(t, 0, prefix+"longest_queue")
	m.logs(t, "forced release", "name=x", "owner=a", "reason=\"a test\"", "from=\"address 127.0.0.1\"")
	m.logs(t, "lock changed its owner", "name=x", "from=a", "to=b")

	// A cycle of two, and a shared hold.
	under := lease(a.Acquire(ctx, "y", fencelock.Shared())).Context()
	m.wants(t, 1, prefix+"holds", "kind", "shared")
	go func() { _, _ = b.Acquire(y.Context(), "y") }()
	m.wants(t, 1, prefix+"waiters", "kind", "exclusive")
	if _, err := a.Acquire(under, "x"); !errors.Is(err, fencelock.ErrDeadlock) {
		t.Fatal(err)
	}
	m.wants(t, 1, prefix+"acquire_duration_seconds", "outcome", "deadlock")

	// The limit of two waits.
	go func() { _, _ = a.Acquire(ctx, "x") }()
	m.wants(t, 2, prefix+"waiters", "kind", "exclusive")
	if _, err := a.Acquire(ctx, "x"); !errors.Is(err, fencelock.ErrUnavailable) {
		t.Fatal(err)
	}
	m.counts(t, prefix+"limit_refusals_total", "limit", "Waits")

	// A release of a token that is not held. A client may send a release twice, which makes it stale too.
	d := builtin.New([]string{m.Addr().String()}, nil)
	defer d.Close(context.Background())
	r := backend.Request{Name: "z", Owner: "c", RequestID: backend.NewRequestID(), TTL: time.Minute}
	g := must[backend.Grant](t)(d.Acquire(ctx, r))
	for range 2 { // the second client does not know that the first has released it
		d := builtin.New([]string{m.Addr().String()}, nil)
		_ = d.Release(ctx, g)
		if err := d.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
	m.counts(t, prefix+"stale_releases_total")
	if err := m.Backup(ctx, &bytes.Buffer{}); err != nil {
		t.Fatal(err)
	}

	leaf := &x509.Certificate{NotAfter: time.Now().Add(time.Hour)}
	m.metrics.Certificate("clients", func() *x509.Certificate { return leaf })
	m.metrics.Audit(func() uint64 { return 0 })
	m.metrics.Request("GET", "/v1/locks/{name}", 200, time.Millisecond)
	all := m.scrape(t)
	if v, _ := value(all, "fencelock_certificate_expiry_timestamp_seconds", "use", "clients"); int64(v) != leaf.NotAfter.Unix() {
		t.Errorf("the certificate expires at %v, want %d", v, leaf.NotAfter.Unix())
	}
	for _, want := range metrics.All() {
		f := all[want.Name]
		if f == nil {
			t.Errorf("%s is not exported", want.Name)
			continue
		}
		if strings.ToLower(f.GetType().String()) != string(want.Type) {
			t.Errorf("%s is a %v, want %s", want.Name, f.GetType(), want.Type)
		}
		for _, x := range f.GetMetric() {
			for _, l := range x.Label {
				values := want.Values[l.GetName()]
				if !slices.Contains(want.Labels, l.GetName()) || values != nil && !slices.Contains(values, l.GetValue()) {
					t.Errorf("%s has %s=%s, which the table lacks", want.Name, l.GetName(), l.GetValue())
				}
			}
		}
	}
	for name := range all {
		known := slices.ContainsFunc(metrics.All(), func(x metrics.Metric) bool { return x.Name == name })
		if !known && !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			t.Errorf("%s is exported, and the table lacks it", name)
		}
	}
}

// What the log has from before a start is not counted again, and what stands is known.
func TestReplayIsNotCounted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := start(t, dir)
	d := builtin.New([]string{first.Addr().String()}, nil)
	for _, name := range []string{"x", "y"} {
		r := backend.Request{Name: name, Owner: "a", RequestID: backend.NewRequestID(), TTL: 10 * time.Second}
		g := must[backend.Grant](t)(d.Acquire(t.Context(), r))
		if name == "y" {
			if err := d.Release(t.Context(), g); err != nil {
				t.Fatal(err)
			}
		}
	}
	first.wants(t, 1, prefix+"holds_ended_total", "end", "released")
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = d.Close(t.Context())
	second := start(t, dir)
	second.wants(t, 1, prefix+"holds", "kind", "exclusive")
	second.wants(t, 0, prefix+"holds_ended_total", "end", "released")
	second.wants(t, 0, prefix+"acquire_duration_seconds", "outcome", "granted")
	// Nobody renews the session of x.
	second.wants(t, 1, prefix+"holds_ended_total", "end", "expired")
	second.wants(t, 0, prefix+"holds", "kind", "exclusive")
	second.logs(t, "held lock expired", "name=x", "owner=a")
}

// A member exports its counters under its ID also while it does not lead, and then nothing that the cluster has at an instant.
func TestCountersNameTheirLeader(t *testing.T) {
	t.Parallel()
	addresses := freeport.Addresses(t, 3)
	alone := startMember(t, server.Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", PeerListen: addresses[0], Join: addresses, BootstrapExpect: 3,
	})
	leads := start(t, "")
	for _, m := range []*member{alone, leads} {
		all := m.scrape(t)
		for _, x := range metrics.All() {
			if x.Where != metrics.Leader || x.Name == prefix+"hold_duration_seconds" { // which has series once a hold ended
				continue
			}
			_, found := value(all, x.Name, "leader", m.ID())
			if want := m == leads || x.Type != metrics.Gauge; found != want {
				t.Errorf("leads %t: %s with the ID of the member: %t, want %t", m == leads, x.Name, found, want)
			}
		}
	}
}

// settles waits until something is so.
func settles(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
	}
}

// BenchmarkScrape is one scrape of a leader with 100,000 holds.
func BenchmarkScrape(b *testing.B) {
	const holds = 100_000
	m := start(b, "")
	d := builtin.New([]string{m.Addr().String()}, nil)
	defer d.Close(context.Background())
	var callers sync.WaitGroup
	for i := range 64 {
		callers.Go(func() {
			for n := i; n < holds; n += 64 {
				r := backend.Request{
					Name: fmt.Sprint(n), Owner: "a", RequestID: backend.NewRequestID(), TTL: time.Minute, Fresh: true,
				}
				if _, err := d.Acquire(b.Context(), r); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	callers.Wait()
	if v, _ := value(m.scrape(b), prefix+"holds", "kind", "exclusive"); v != holds {
		b.Fatalf("%v holds", v)
	}
	for b.Loop() {
		w := httptest.NewRecorder()
		m.metrics.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	}
}
