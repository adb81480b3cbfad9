package redlock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

// url returns a URL of the servers, with user if it is not empty.
func (s servers) url(user, options string) string {
	var hosts []string
	for _, server := range s {
		hosts = append(hosts, server.Addr())
	}
	if user != "" {
		user += ":pw@"
	}
	return "redlock://" + user + strings.Join(hosts, ",") + "?" + options
}

func opened(t *testing.T, url string) (*Driver, error) {
	t.Helper()
	d, err := Open(within(t, 30*time.Second), url)
	if err == nil {
		t.Cleanup(func() { _ = d.Close(within(t, 5*time.Second)) })
	}
	return d, err
}

// Servers that evict keys with a time to live are refused unless an option accepts them. A driver notices changed
// settings, does not ask such servers for votes, and still renews and releases its holds.
func TestEvictionPolicies(t *testing.T) {
	t.Parallel()
	s := start(t, 3, "--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
	if _, err := opened(t, s.url("", "trust-fresh=true")); !errors.Is(err, backend.ErrMisconfigured) ||
		!strings.Contains(err.Error(), "allow-volatile-eviction") {
		t.Errorf("volatile-lru: %v", err)
	}
	d, err := opened(t, s.url("", "trust-fresh=true&allow-volatile-eviction=true"))
	if err != nil {
		t.Fatal(err)
	}
	g := take(t, d, request("held"))
	set := func(policy string, which ...int) {
		t.Helper()
		for _, i := range which {
			s.admin(t, i, func(ctx context.Context, c *goredis.Client) error {
				return c.ConfigSet(ctx, "maxmemory-policy", policy).Err()
			})
		}
		d.service.lookAt.Store(0)
	}
	acquires := func(want error) {
		t.Helper()
		eventually(t, "the settings are noticed", func() bool {
			r := request("free")
			free, err := d.Acquire(within(t, 30*time.Second), r)
			if err == nil {
				err = d.Release(within(t, 30*time.Second), free)
			}
			return errors.Is(err, want)
		})
	}
	set("allkeys-lru", 0, 1)
	acquires(backend.ErrMisconfigured)
	if err := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; err != nil {
		t.Errorf("a hold is not renewed: %v", err)
	}
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Errorf("a hold is not released: %v", err)
	}
	set("noeviction", 0)
	acquires(nil) // a minority does not matter
	waits := request("free")
	waits.Wait = true
	if _, err := d.Acquire(within(t, 30*time.Second), waits); err != nil {
		t.Errorf("a wait with an unfit minority: %v", err)
	}
}

// Without INFO locks work when the servers' version is stated.
func TestWithoutInfo(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	for i := range s {
		s.admin(t, i, func(ctx context.Context, c *goredis.Client) error {
			return c.ACLSetUser(ctx, "worker", "on", ">pw", "~fencelock:*", "&fencelock:*",
				"+@all", "-info", "-config").Err()
		})
	}
	if _, err := opened(t, s.url("worker", "trust-fresh=true")); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("without +info: %v", err)
	}
	for _, options := range []string{"assume-version=5.0", "assume-version=", "allow-volatile-eviction=1"} {
		if _, err := opened(t, s.url("worker", options)); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v", options, err)
		}
	}
	d, err := opened(t, s.url("worker", "assume-version=7.0"))
	if err != nil {
		t.Fatal(err)
	}
	g := take(t, d, request("n"))
	waits := request("n")
	waits.Wait = true
	next := make(chan error, 1)
	go func() {
		_, err := d.Acquire(within(t, 30*time.Second), waits)
		next <- err
	}()
	eventually(t, "it waits", func() bool {
		state, err := d.Look(within(t, 30*time.Second), "n")
		return err == nil && state.Waiters == 1
	})
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
	if err := <-next; err != nil {
		t.Errorf("the waiter: %v", err)
	}
}
