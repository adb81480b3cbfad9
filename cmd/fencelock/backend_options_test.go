//go:build unix

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/testcert"
)

// optionTable returns the options in the table of "fencelock help backend": the common ones, and those of each
// driver.
func optionTable(t *testing.T) (common []string, own map[string][]string) {
	t.Helper()
	_, rest, _ := strings.Cut(backendHelp, "Every URL takes these options")
	every, further, found := strings.Cut(rest, "Further options:")
	if !found {
		t.Fatal("the help has no further options")
	}
	line := regexp.MustCompile(`(?m)^  ([a-z]+(?:-[a-z]+)*(?:, [a-z]+(?:-[a-z]+)*)*)  `)
	for _, m := range line.FindAllStringSubmatch(every, -1) {
		common = append(common, strings.Split(m[1], ", ")...)
	}
	further, _, _ = strings.Cut(further, `"acquire"`)
	own = map[string][]string{}
	driver := ""
	for text := range strings.Lines(further) {
		m := regexp.MustCompile(`^(?:  ([a-z]+) +|            )([a-z][a-z, -]*?)(?:  | as above|\n)(.*)`).FindStringSubmatch(text)
		if m == nil {
			continue
		}
		if m[1] != "" {
			driver = m[1]
		}
		if strings.HasPrefix(m[2], "and ") {
			continue // what libpq and pgxpool have
		}
		where := driver
		if strings.Contains(text, "with Sentinels") || strings.HasPrefix(m[2], "sentinel-") {
			where = "redis+sentinel"
		}
		own[where] = append(own[where], strings.Split(m[2], ", ")...)
	}
	for _, variant := range []string{"redis+sentinel", "redis+cluster"} {
		own[variant] = slices.Concat(own[variant], own["redis"])
	}
	own["https"] = own["http"]
	return common, own
}

// Every URL takes the options that the table gives it, and its error names an option of another service.
func TestURLsTakeTheOptionsOfTheTable(t *testing.T) {
	t.Parallel()
	common, own := optionTable(t)
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "client")
	values := map[string]string{
		"ca": authority.File, "cert": cert + "&key=" + key, "key": key + "&cert=" + cert, "server-name": "locks.example",
		"timeout": "100ms", "pool-size": "2", "protocol": "3", "db": "1", "sentinel-username": "ann",
		"sentinel-password": "secret", "sentinel-password-file": fileOf(t, "sentinel", "secret"), "replicas": "1", "replica-timeout": "1s&replicas=1", "replica-disk": "true&replicas=1",
		"allow-volatile-eviction": "true", "assume-version": "7.0", "assume-cluster": "true&assume-version=7.0",
		"node-timeout": "50ms", "max-ttl": "30s", "trust-fresh": "true", "wait-for-all": "true", "tick": "2s",
		"under": "AAAAAAAAAAAAAAAAAAAAAA", "schema": "locks", "no-listen": "true", "prefix": "test",
		"ignore-standbys": "archive", "password-file": fileOf(t, "password", "secret"),
		"credential": fileOf(t, "credential", principal.NewToken()) + "&server-name=locks.example",
	}
	all := map[string]bool{}
	for _, names := range append(slices.Collect(maps.Values(own)), common) {
		for _, name := range names {
			if all[name] = true; values[name] == "" {
				t.Fatalf("the table has the option %q, which this test does not know", name)
			}
		}
	}
	if len(all) != len(values) {
		t.Fatalf("the table has the options %v; want %v", slices.Sorted(maps.Keys(all)), slices.Sorted(maps.Keys(values)))
	}
	for scheme, rest := range map[string]string{
		"fencelock": "127.0.0.1:1", "redis": "127.0.0.1:1/0", "redis+sentinel": "127.0.0.1:1/main",
		"redis+cluster": "127.0.0.1:1", "redlock": "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "etcd": "ann@127.0.0.1:1",
		"zk": "ann@127.0.0.1:1", "postgres": "ann@127.0.0.1:1/locks", "http": "127.0.0.1:1", "https": "127.0.0.1:1",
	} {
		open := func(options string) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if !strings.Contains(options, "timeout=") {
				options += "&timeout=100ms"
			}
			if strings.HasPrefix(scheme, "http") {
				_, _, _, err := gatewayAt(scheme + "://" + rest + "?" + options)
				return err
			}
			d, err := backend.Open(ctx, scheme+"://"+rest+"?"+options)
			if err == nil { // with assume-version the driver asks nothing
				err = d.Close(ctx)
			}
			return err
		}
		t.Run(scheme, func(t *testing.T) {
			t.Parallel()
			takes := slices.Concat(common, own[scheme])
			for name := range all {
				value := values[name]
				switch {
				case name == "prefix" && scheme == "zk":
					value = "/test"
				case name == "prefix" && scheme == "etcd":
					value = "test/"
				case !slices.Contains(takes, name):
					value, _, _ = strings.Cut(value, "&") // without the option that it needs
				}
				err := open(name + "=" + value)
				switch refused := errors.Is(err, backend.ErrInvalidOption); {
				case slices.Contains(takes, name) && refused:
					t.Errorf("%s: %v", name, err)
				case slices.Contains(takes, name) || scheme == "postgres": // the server refuses unknown options
				case !refused || !strings.Contains(err.Error(), `unknown option "`+name+`"`):
					t.Errorf("%s: %v; want an error that names the option", name, err)
				}
			}
			if scheme == "postgres" {
				return
			}
			// The other direction: the table has every option of the driver.
			err := open("nothing=1")
			_, list, _ := strings.Cut(fmt.Sprint(err), "the options are ")
			list, _, _ = strings.Cut(list, "\n")
			got := strings.Split(list, ", ")
			slices.Sort(got)
			slices.Sort(takes)
			if !slices.Equal(got, takes) {
				t.Errorf("it takes %v; in the table %v: %v", got, takes, err)
			}
		})
	}
}

// A running client reads the certificate, the key and the authorities of its URL again when a file changes.
func TestFilesOfURLsAreReadAgain(t *testing.T) {
	t.Parallel()
	one := func(addr string) []string { return []string{addr} }
	for name, c := range map[string]struct {
		servers func(t *testing.T) []string
		url     string // with %s for the addresses
	}{
		"fencelock": {func(t *testing.T) []string { return one(strings.TrimPrefix(startServer(t), "fencelock://")) },
			"fencelock://%s?"},
		"redis": {func(t *testing.T) []string { return one(containers.Redis(t).Addr()) }, "redis://%s?"},
		"redlock": {func(t *testing.T) []string {
			return []string{containers.Redis(t).Addr(), containers.Redis(t).Addr(), containers.Redis(t).Addr()}
		}, "redlock://%s?trust-fresh=true&"},
		"etcd": {func(t *testing.T) []string { return one(containers.Etcd(t).Addr()) }, "etcd://%s?"},
		"zk": {func(t *testing.T) []string { return one(containers.ZooKeeper(t).Addr()) },
			fmt.Sprintf("zk://%%s?tick=%v&", containers.ZooKeeperTick)},
		"postgres": {func(t *testing.T) []string {
			server := containers.Postgres(t, containers.Args("-c", "fsync=on"))
			start(t, "postgres", "migrate", "--backend", server.URL()).expectExit(exitOK)
			return one(server.Addr())
		}, "postgres://postgres@%s/postgres?sslnegotiation=direct&"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			dir := t.TempDir()
			var serves atomic.Pointer[tls.Config]
			// replace makes a new authority, and with it the certificates of both sides.
			replace := func() {
				t.Helper()
				authority := testcert.New(t)
				cert, key := authority.Sign(t, "client")
				for from, to := range map[string]string{authority.File: "ca.pem", cert: "cert.pem", key: "key.pem"} {
					text, err := os.ReadFile(from)
					if err == nil {
						err = os.WriteFile(filepath.Join(dir, "next"), text, 0o600)
					}
					if err == nil {
						err = os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, to))
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				config := authority.Server(t, "locks.example")
				config.NextProtos = []string{"h2", "postgresql"}
				serves.Store(config)
			}
			replace()
			var addrs []string
			var links []*fault.Proxy
			for _, server := range c.servers(t) {
				link, err := fault.NewProxy(testcert.Terminate(t, &tls.Config{
					MinVersion:         tls.VersionTLS12,
					GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return serves.Load(), nil },
				}, server))
				if err != nil {
					t.Fatal(err)
				}
				defer link.Close()
				links, addrs = append(links, link), append(addrs, link.Addr())
			}
			url := fmt.Sprintf(c.url, strings.Join(addrs, ",")) + "timeout=20s&server-name=locks.example" +
				"&ca=" + dir + "/ca.pem&cert=" + dir + "/cert.pem&key=" + dir + "/key.pem"
			locks, err := fencelock.Open(ctx, url, fencelock.Efficiency, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer locks.Close(context.WithoutCancel(ctx))
			take := func() error {
				lease, err := locks.TryAcquire(ctx, "x")
				if err == nil {
					err = lease.Release(ctx)
				}
				return err
			}
			if err := take(); err != nil {
				t.Fatal(err)
			}
			replace()
			for _, link := range links {
				link.Reset()
			}
			for err = take(); err != nil; err = take() {
				if ctx.Err() != nil {
					t.Fatalf("after the files were replaced: %v", err)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
}
