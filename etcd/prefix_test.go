package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

func TestPrefixIsValidated(t *testing.T) {
	t.Parallel()
	for prefix, good := range map[string]bool{
		"": true, "a/": true, "/registry/locks/": true, "a+b/": true, "日本/": true,
		"a": false, "locks:": false, "+a/": false, "a/+b/": false, "a/b\n/": false, "\xff/": false,
		strings.Repeat("x", backend.MaxNameBytes) + "/": false,
	} {
		d := New(dial(t, "127.0.0.1:1"), &Options{KeyPrefix: prefix})
		defer d.Close(t.Context())
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := d.Acquire(ctx, request("x", false))
		invalid := (*backend.InvalidError)(nil)
		if good {
			if err == nil || errors.Is(err, backend.ErrInvalidOption) {
				t.Errorf("%.40q: Acquire without a server = %v", prefix, err)
			}
			continue
		}
		if !errors.As(err, &invalid) || !errors.Is(err, backend.ErrInvalidOption) || invalid.What != "KeyPrefix" {
			t.Errorf("%.40q: Acquire = %v", prefix, err)
		}
	}
}

// FuzzPrefixesAreApart: no key of one prefix is in a range that another prefix reads.
func FuzzPrefixesAreApart(f *testing.F) {
	f.Add("locks/", "locks/orders/", "orders", "17")
	f.Add("team/", "team/+locks/", "1y", "y")
	f.Add("a/", "a/+locks/b/", "b", "+shared")
	f.Fuzz(func(t *testing.T, one, two, name, other string) {
		if one == two || badPrefix(one) != "" || badPrefix(two) != "" {
			return
		}
		a, b := &service{prefix: one}, &service{prefix: two}
		for _, key := range []string{b.spaceKey(), b.dir(other) + backend.NewRequestID(), b.forcedKey(other)} {
			if strings.HasPrefix(key, a.locksDir()) || key == a.spaceKey() || strings.HasPrefix(key, a.dir(name)) {
				t.Errorf("%q of prefix %q lies in prefix %q", key, two, one)
			}
		}
	})
}

func TestPrefixesNeverMeet(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	prefixes := []string{"locks/", "locks/orders/", "locks/orders/17/", "lock/"}
	names := []string{"orders", "17", "orders/17", "+locks", "s/orders"}
	var drivers []*Driver
	for _, prefix := range prefixes {
		d := New(dial(t, server.Addr()), &Options{KeyPrefix: prefix})
		defer d.Close(t.Context())
		drivers = append(drivers, d)
	}
	grants := make([]map[string]backend.Grant, len(drivers))
	for i, d := range drivers {
		grants[i] = map[string]backend.Grant{}
		for _, name := range names {
			grants[i][name] = mustAcquire(t, d, request(name, false))
		}
	}
	for i, d := range drivers {
		listed := 0
		for info, err := range d.List(t.Context(), "") {
			if err != nil {
				t.Fatal(err)
			}
			listed++
			if len(info.Holders) != 1 || info.Waiters != 0 || info.Holders[0].Token != grants[i][info.Name].Token {
				t.Errorf("%s lists %+v", prefixes[i], info)
			}
		}
		if listed != len(names) {
			t.Errorf("%s lists %d names, want %d", prefixes[i], listed, len(names))
		}
	}
	if err := drivers[0].ForceRelease(t.Context(), backend.ForceRequest{Name: "orders", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	for i, d := range drivers {
		for _, name := range names {
			err := d.Renew(t.Context(), []backend.Grant{grants[i][name]})[0].Err
			if victim := i == 0 && name == "orders"; errors.Is(err, backend.ErrNotHeld) != victim ||
				err != nil && !victim {
				t.Errorf("%s %s after a ForceRelease of locks/ orders: %v", prefixes[i], name, err)
			}
		}
	}
}

// A user whose role covers only the prefix can do everything.
func TestPrefixIsAllThatARoleNeeds(t *testing.T) {
	t.Parallel()
	server := secured(t)
	d, err := open(t, "etcd://ann:secret@"+server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	first := mustAcquire(t, d, request("x", false))
	next := acquireLater(t, d, request("x", true))
	if d.Describe().TokenSpace == "" {
		t.Error("no token space")
	}
	for range d.List(t.Context(), "") {
	}
	if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "test"}); err != nil {
		t.Error(err)
	}
	second := mustGet(t, next)
	if second.Token <= first.Token {
		t.Errorf("token %v after %v", second.Token, first.Token)
	}
	if r := d.Renew(t.Context(), []backend.Grant{second})[0]; r.Err != nil {
		t.Error(r.Err)
	}
	mustRelease(t, d, second)
}

// The visible data of a hold do not permit other clients to move it.
func TestRequestIDsAreHidden(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d, other := newDriver(t, server.Addr()), newDriver(t, server.Addr())
	before, err := other.Look(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	r := request("x", false)
	r.HoldID = "the-hold" // not derived from the request id, so it is stored
	mustAcquire(t, d, r)
	var seen []any
	_, err = other.Acquire(t.Context(), request("x", false))
	held := (*backend.HeldError)(nil)
	if !errors.As(err, &held) || held.HoldID != r.HoldID {
		t.Errorf("Acquire = %+v", err)
	}
	info, err := other.Look(t.Context(), "x")
	if err != nil || len(info.Holders) != 1 || info.Holders[0].HoldID != r.HoldID {
		t.Errorf("Look = %+v, %v", info, err)
	}
	seen = append(seen, held, info)
	for info, err := range other.List(t.Context(), "") {
		seen = append(seen, info, err)
	}
	if err := other.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	for change, err := range other.Watch(t.Context(), "x", before.Revision) {
		seen = append(seen, change, err)
		if change.Type != backend.ChangeAcquired {
			break
		}
	}
	if text := fmt.Sprintf("%+v", seen); strings.Contains(text, r.RequestID) {
		t.Errorf("the request id is shown: %s", text)
	}
}

func TestNoClientIsAnError(t *testing.T) {
	t.Parallel()
	for name, client := range map[string]*clientv3.Client{
		"nil": nil, "zero": {}, "without a connection": clientv3.NewCtxClient(t.Context()),
	} {
		d := New(client, nil)
		for call, err := range map[string]error{
			"Ping": d.Ping(t.Context()), "Release": d.Release(t.Context(), request("x", false).Grant()),
			"Renew":        d.Renew(t.Context(), make([]backend.Grant, 1))[0].Err,
			"ForceRelease": d.ForceRelease(t.Context(), backend.ForceRequest{Name: "x"}),
			"Acquire":      func() error { _, err := d.Acquire(t.Context(), request("x", false)); return err }(),
			"AcquireAll": func() error {
				_, err := d.AcquireAll(t.Context(), []backend.Request{request("x", false)})
				return err
			}(),
			"Look": func() error { _, err := d.Look(t.Context(), "x"); return err }(),
		} {
			if !errors.Is(err, backend.ErrInvalidOption) || strings.Contains(err.Error(), "%!") {
				t.Errorf("%s client: %s = %v", name, call, err)
			}
		}
		for _, err := range d.Watch(t.Context(), "x", 0) {
			if !errors.Is(err, backend.ErrInvalidOption) {
				t.Errorf("%s client: Watch = %v", name, err)
			}
		}
		if d.Describe().Name == "" {
			t.Error("no description")
		}
		if err := d.Close(t.Context()); err != nil {
			t.Errorf("%s client: Close = %v", name, err)
		}
	}
}
