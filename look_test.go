package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

func TestLooking(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{Namespace: "shop", Owner: "me"})
		before, err := c.Look(t.Context(), "stock/1")
		if err != nil || before.Held || before.Name != "stock/1" {
			t.Fatalf("Holder of a free name = %+v, %v", before, err)
		}
		one := mustAcquire(t, c, "stock/1")
		two := mustAcquire(t, c, "stock/2", fencelock.Permits(2, 3))
		mustAcquire(t, c, "other")
		info, err := c.Look(t.Context(), "stock/1")
		if err != nil || !info.Held || info.Name != "stock/1" || info.Holders[0].Owner != "me" ||
			info.Holders[0].Token != one.Token() {
			t.Errorf("Holder = %+v, %v", info, err)
		}
		var names []string
		for info, err := range c.List(t.Context(), "stock/") {
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, info.Name)
			if info.Name == "stock/2" && (info.Holders[0].Permits != 2 || info.Holders[0].Kind != backend.KindPermits) {
				t.Errorf("the holder of permits is shown as %+v", info.Holders[0])
			}
		}
		if slices.Sort(names); !slices.Equal(names, []string{"stock/1", "stock/2"}) {
			t.Errorf("List = %q", names)
		}
		if err := c.ForceRelease(t.Context(), "stock/1", "pod 7f9c is gone"); err != nil {
			t.Fatal(err)
		}
		lost := (*fencelock.LostError)(nil)
		<-one.Context().Done()
		if !errors.As(one.Err(), &lost) || lost.Reason != fencelock.ReasonForceReleased ||
			lost.Text != "pod 7f9c is gone" {
			t.Errorf("the victim gets %v", one.Err())
		}
		var changes []string
		for change, err := range c.Watch(t.Context(), "stock/1", fencelock.Since(before.Revision)) {
			if err != nil {
				t.Fatal(err)
			}
			changes = append(changes, change.Name+" "+string(change.Type)+" "+change.Reason)
			if len(changes) == 2 {
				break
			}
		}
		if want := []string{
			"stock/1 acquired ", "stock/1 force-released pod 7f9c is gone",
		}; !slices.Equal(changes, want) {
			t.Errorf("Watch = %q, want %q", changes, want)
		}
		wantErr(t, c.ForceRelease(t.Context(), "stock/1", "again"), fencelock.ErrNotHeld)
		release(t, two)
	})
}

// blind is the in-process driver without any of the optional capabilities.
type blind struct{ backend.Driver }

func (d blind) Describe() backend.Description {
	s := d.Driver.Describe()
	s.Capabilities = 0
	return s
}

func TestLookingNeedsACapability(t *testing.T) {
	c, err := fencelock.ForEfficiency(blind{memory.New(nil)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	ctx := t.Context()
	all := map[string]error{}
	_, all["holder"] = c.Look(ctx, "x")
	_, all["leader"] = c.Leader(ctx, "x")
	all["force-release"] = c.ForceRelease(ctx, "x", "test")
	for _, all["list"] = range c.List(ctx, "x") {
	}
	for _, all["watch"] = range c.Watch(ctx, "x") {
	}
	for _, all["leaders"] = range c.Leaders(ctx, "x") {
	}
	for _, opts := range [][]fencelock.AcquireOption{
		{fencelock.Shared()}, {fencelock.Permits(1, 2)}, {fencelock.Hierarchical()},
	} {
		_, err := c.TryAcquire(ctx, "x", opts...)
		wantErr(t, err, fencelock.ErrUnsupported)
	}
	for call, err := range all {
		if !errors.Is(err, fencelock.ErrUnsupported) {
			t.Errorf("%s: %v, want ErrUnsupported", call, err)
		}
	}
}

// looking is the in-process driver without a watch.
type looking struct{ *memory.Driver }

func (d looking) Describe() backend.Description {
	s := d.Driver.Describe()
	s.Capabilities &^= backend.CapWatch | backend.CapWatchReplay
	return s
}

// Without a watch in the driver, the client compares looks: ends come before beginnings, each once, without a
// revision, and Since is refused.
func TestWatchWithoutOne(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, err := fencelock.ForEfficiency(looking{b.store.Driver()}, &fencelock.Options{Owner: "one", Namespace: "ns"})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close(context.Background())
		for _, err := range c.Watch(t.Context(), "x", fencelock.Since(1)) {
			wantErr(t, err, fencelock.ErrUnsupported)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var changes []string
		var last error
		over := make(chan struct{})
		go func() {
			defer close(over)
			for change, err := range c.Watch(ctx, "x") {
				if last = err; err == nil {
					changes = append(changes, fmt.Sprintf("%s %s %s %d", change.Name, change.Type, change.Owner, change.Revision))
				}
			}
		}()
		time.Sleep(time.Minute)
		first := mustAcquire(t, c, "x")
		time.Sleep(time.Minute)
		release(t, first)
		second := mustAcquire(t, c, "x")
		time.Sleep(time.Minute)
		release(t, second)
		time.Sleep(time.Minute)
		cancel()
		<-over
		wantErr(t, last, context.Canceled)
		want := []string{"x acquired one 0", "x released one 0", "x acquired one 0", "x released one 0"}
		if !slices.Equal(changes, want) {
			t.Errorf("Watch = %q, want %q", changes, want)
		}
	})
}

func TestBadArgumentsOfLooking(t *testing.T) {
	c, err := fencelock.ForEfficiency(memory.New(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	ctx := t.Context()
	_, err = c.Look(ctx, "")
	wantErr(t, err, fencelock.ErrInvalidName)
	for _, reason := range []string{"", "a\nb", strings.Repeat("x", fencelock.MaxReasonBytes+1), "\xff"} {
		wantErr(t, c.ForceRelease(ctx, "x", reason), fencelock.ErrInvalidOption)
	}
	for _, err := range c.Watch(ctx, "x", fencelock.Since(1<<60)) {
		wantErr(t, err, fencelock.ErrInvalidOption)
	}
}
