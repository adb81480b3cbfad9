package prom_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/observe/internal/scenario"
	"github.com/fencelock/fencelock/observe/prom"
)

func area(name string) string { before, _, _ := strings.Cut(name, "/"); return before }

// series returns what a registry exports: counts of histograms, and sums under "_sum". labels has all labels but the
// instrument's own.
func series(t *testing.T, reg *prometheus.Registry) (values map[[2]string]float64, labels map[string]map[string]string) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values, labels = map[[2]string]float64{}, map[string]map[string]string{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			own, all := "", map[string]string{}
			for _, l := range m.GetLabel() {
				switch l.GetName() {
				case "outcome", "end", "reason", "result":
					own = l.GetValue()
				default:
					all[l.GetName()] = l.GetValue()
				}
			}
			labels[family.GetName()] = all
			key := [2]string{family.GetName(), own}
			if h := m.GetHistogram(); h != nil {
				values[key] += float64(h.GetSampleCount())
				values[[2]string{family.GetName() + "_sum", own}] += h.GetSampleSum()
			} else {
				values[key] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return values, labels
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewPedanticRegistry()
		metrics, err := prom.New(reg, &prom.Options{Label: "area", Value: area})
		if err != nil {
			t.Fatal(err)
		}
		scenario.New(t).Run(t.Context(), metrics)
		got, labels := series(t, reg)
		for key, want := range scenario.Want {
			name := "fencelock_client_" + strings.ReplaceAll(key[0], ".", "_")
			switch {
			case strings.HasSuffix(key[0], ".duration"):
				name += "_seconds"
			case key[1] != "" || key[0] == "suspects":
				name += "_total"
			}
			if v, ok := got[[2]string{name, key[1]}]; !ok || v != want {
				t.Errorf("%s of %q is %v, exported: %t; want %v", name, key[1], v, ok, want)
			}
			delete(got, [2]string{name, key[1]})
		}
		for key, v := range got {
			if v != 0 && !strings.HasSuffix(key[0], "_sum") {
				t.Errorf("%s of %q is %v, want 0", key[0], key[1], v)
			}
		}
		for _, reason := range []string{"session-expired", "evicted", "history-lost", "replaced", "closed", "other"} {
			if _, ok := got[[2]string{"fencelock_client_losses_total", reason}]; !ok {
				t.Errorf("losses of %q are not exported as 0", reason)
			}
		}
		if v, want := got[[2]string{"fencelock_client_hold_duration_seconds_sum", "released"}], 4.0; v != want {
			t.Errorf("leases that were released were held for %v s, want %v", v, want)
		}
		if v, want := got[[2]string{"fencelock_client_wait_duration_seconds_sum", "acquired"}], 1.0; v != want {
			t.Errorf("waited for %v s, want %v", v, want)
		}
		full := map[string]string{"driver": "memory", "tier": "correctness", "kind": "exclusive", "area": "orders"}
		for name, all := range labels {
			want := full
			switch name {
			case "fencelock_client_forced_releases_total", "fencelock_client_abandoned_total":
				want = map[string]string{"driver": "memory", "tier": "correctness"}
			case "fencelock_client_dropped_events_total":
				want = map[string]string{}
			}
			if !maps.Equal(all, want) {
				t.Errorf("%s has the labels %v, want %v", name, all, want)
			}
		}
	})
}

// Gauges show what there is now.
func TestGauges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewPedanticRegistry()
		metrics, err := prom.New(reg, nil)
		if err != nil {
			t.Fatal(err)
		}
		c, _ := scenario.New(t).Client("worker", metrics)
		gauges := func() string {
			synctest.Wait()
			got, _ := series(t, reg)
			return fmt.Sprint(got[[2]string{"fencelock_client_leases"}], got[[2]string{"fencelock_client_waiters"}],
				got[[2]string{"fencelock_client_leaders"}])
		}
		ctx, leave := context.WithCancel(t.Context())
		resign, done := make(chan struct{}), make(chan error, 2)
		go func() {
			done <- c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { <-resign; return nil })
		}()
		synctest.Wait()
		go func() {
			_, err := c.Acquire(ctx, "x")
			done <- err
		}()
		time.Sleep(time.Second)
		if got := gauges(); got != "1 1 1" {
			t.Errorf("leases, waiters and leaders are %s, want 1 each", got)
		}
		leave()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		close(resign)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if got := gauges(); got != "0 0 0" {
			t.Errorf("leases, waiters and leaders are %s, want none", got)
		}
	})
}

// However many names there are, there are 100 values of the program's label, and "other".
func TestLabelIsBounded(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	metrics, err := prom.New(reg, &prom.Options{Label: "lock", Value: func(name string) string { return name }})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 250 {
		metrics.Observe(t.Context(), fencelock.Event{
			Type: fencelock.EventAcquired, Driver: "memory", Tier: fencelock.Efficiency, Name: fmt.Sprint("\xff", i),
		})
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	held := map[string]float64{}
	for _, family := range families {
		if family.GetName() == "fencelock_client_leases" {
			for _, m := range family.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "lock" {
						held[l.GetValue()] += m.GetGauge().GetValue()
					}
				}
			}
		}
	}
	if len(held) != 101 || held["other"] != 150 || held["\uFFFD7"] != 1 {
		t.Errorf("%d values, %v other, want 100 and other with 150", len(held), held["other"])
	}
}

func TestNew(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	first, err := prom.New(reg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := prom.New(reg, nil); err != nil || second != first {
		t.Errorf("a second one in the registry: %v, %v, want the first", second, err)
	}
	if _, err := prom.New(reg, &prom.Options{Label: "area", Value: area}); err == nil {
		t.Error("two sets of labels in one registry: no error")
	}
	for _, o := range []prom.Options{
		{Label: "area"}, {Value: area}, {Label: "a-b", Value: area}, {Label: "__a", Value: area}, {Label: "1", Value: area},
		{Label: "kind", Value: area}, {Label: "reason", Value: area},
	} {
		if _, err := prom.New(nil, &o); !errors.Is(err, fencelock.ErrInvalidOption) {
			t.Errorf("Label %q: error %v, want ErrInvalidOption", o.Label, err)
		}
	}
}
