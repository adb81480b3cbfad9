package embedded_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/embedded"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t testing.TB, dir string) *embedded.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := embedded.Start(ctx, embedded.Options{DataDir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestTokensIncreaseAcrossStarts(t *testing.T) {
	dir := t.TempDir()
	var last uint64
	for range 3 {
		s := start(t, dir)
		locks, err := fencelock.ForCorrectness(s.Driver(nil), nil)
		if err != nil {
			t.Fatal(err)
		}
		lease, err := locks.Acquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		if token := uint64(lease.Token()); token <= last {
			t.Errorf("token %d after %d", token, last)
		} else {
			last = token
		}
		for _, closer := range []func(context.Context) error{lease.Release, locks.Close, s.Close} {
			if err := closer(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLeaseOutlivesARestart(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir)
	d := s.Driver(nil)
	r := backend.Request{Name: "x", Owner: "a", RequestID: backend.NewRequestID(), TTL: time.Minute}
	if _, err := d.Acquire(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	// The server ends first, as in a crash: the client cannot release its locks.
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	_ = d.Close(ctx)
	cancel()
	s = start(t, dir)
	defer s.Close(context.Background())
	d = s.Driver(nil)
	defer d.Close(context.Background())
	info, err := d.Look(t.Context(), "x")
	if err != nil || len(info.Holders) != 1 || info.Holders[0].HoldID != r.HoldID {
		t.Errorf("after a restart within the TTL the holder is %+v, %v", info, err)
	}
}

// cluster returns the options of three members that know each other.
func cluster(t *testing.T) []embedded.Options {
	t.Helper()
	addresses := freeport.Addresses(t, 6)
	authority := testcert.New(t)
	var all []embedded.Options
	for i := range 3 {
		c := authority.Server(t, "localhost")
		c.RootCAs, c.ServerName = c.ClientCAs, "localhost"
		all = append(all, embedded.Options{
			DataDir: t.TempDir(), Logger: slog.New(slog.DiscardHandler),
			Cluster: &embedded.Cluster{Members: addresses[:3], PeerListen: addresses[i], Listen: addresses[3+i], TLS: c},
		})
	}
	return all
}

func startMember(t *testing.T, o embedded.Options) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}

// Before most members run, calls wait until their contexts end. After that they are served, whichever member leads.
func TestClusterForms(t *testing.T) {
	t.Parallel()
	all := cluster(t)
	first := startMember(t, all[0])
	d := first.Driver(nil)
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	short, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	if _, err := d.Look(short, "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one of three answers %v before its caller gives up", err)
	}
	looked := make(chan error, 1)
	go func() {
		_, err := d.Look(t.Context(), "x")
		looked <- err
	}()
	second := startMember(t, all[1])
	startMember(t, all[2])
	select {
	case err := <-looked:
		if err != nil {
			t.Errorf("a call from before the cluster was there: %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the call is not answered")
	}
	if err := first.WaitLeader(t.Context()); err != nil {
		t.Error(err)
	}

	// Members see each other's locks, and keep working when one of them ends.
	r := backend.Request{Name: "x", Owner: "a", RequestID: backend.NewRequestID(), TTL: time.Minute}
	if _, err := d.Acquire(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	other := second.Driver(nil)
	t.Cleanup(func() { _ = other.Close(context.Background()) })
	for _, gone := range []*embedded.Server{nil, first} {
		if gone != nil {
			if err := gone.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if info, err := other.Look(t.Context(), "x"); err != nil || len(info.Holders) != 1 {
			t.Errorf("another member sees %+v, %v", info, err)
		}
	}
}

func TestClusterThatMakesNoSense(t *testing.T) {
	t.Parallel()
	for what, spoil := range map[string]func(*embedded.Cluster){
		"Members":    func(c *embedded.Cluster) { c.Members = c.Members[:2] },
		"PeerListen": func(c *embedded.Cluster) { c.PeerListen = "" },
		"Listen":     func(c *embedded.Cluster) { c.Listen = "" },
		"RootCAs":    func(c *embedded.Cluster) { c.TLS.RootCAs = nil },
		"a certificate": func(c *embedded.Cluster) {
			c.TLS.Certificates = nil
		},
		"JoinKey":         func(c *embedded.Cluster) { c.JoinKey = []byte("short") },
		"BootstrapExpect": func(c *embedded.Cluster) { c.PeerListen = "127.0.0.1:1" },
	} {
		o := cluster(t)[0]
		spoil(o.Cluster)
		if _, err := embedded.Start(t.Context(), o); !errors.Is(err, backend.ErrInvalidOption) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestNoFolder(t *testing.T) {
	if _, err := embedded.Start(t.Context(), embedded.Options{}); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("start without a folder: %v, want ErrInvalidOption", err)
	}
}

func Example() {
	dir, err := os.MkdirTemp("", "locks")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()
	server, err := embedded.Start(ctx, embedded.Options{DataDir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.Close(ctx)
	locks, err := fencelock.ForCorrectness(server.Driver(nil), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "accounts/42", func(_ context.Context, lease *fencelock.Lease) error {
		fmt.Println("fenced:", lease.Token().Exclusive())
		return nil
	})
	fmt.Println(err)
	// Output:
	// fenced: true
	// <nil>
}

func TestBackup(t *testing.T) {
	first := start(t, t.TempDir())
	token := func(s *embedded.Server) uint64 {
		t.Helper()
		locks, err := fencelock.ForCorrectness(s.Driver(nil), nil)
		if err != nil {
			t.Fatal(err)
		}
		lease, err := locks.Acquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(lease.Release(t.Context()), locks.Close(t.Context())); err != nil {
			t.Fatal(err)
		}
		return uint64(lease.Token())
	}
	var b bytes.Buffer
	if err := first.Backup(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	last := token(first)
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := first.Backup(t.Context(), &bytes.Buffer{}); err == nil {
		t.Error("a server that is closed makes a backup")
	}
	dir := filepath.Join(t.TempDir(), "restored")
	if _, err := embedded.Restore(dir, bytes.NewReader(b.Bytes()[:b.Len()-1]), embedded.RestoreOptions{}); !errors.Is(err, embedded.ErrNoBackup) {
		t.Errorf("a backup that is cut off: %v", err)
	}
	r, err := embedded.Restore(dir, &b, embedded.RestoreOptions{ClosedFor: -1})
	if err != nil || r.TokenSpace == "" || r.After <= last || r.ClosedFor != 0 {
		t.Fatalf("restored: %+v, %v", r, err)
	}
	second := start(t, dir)
	if next := token(second); next <= last {
		t.Errorf("token %d after the restore; %d was issued after the backup", next, last)
	}
	if err := second.Close(t.Context()); err != nil {
		t.Error(err)
	}

	// Recover works from a surviving disk as Restore does from a backup.
	if r, err = embedded.Recover(dir, embedded.RestoreOptions{}); err != nil || r.ClosedFor != time.Hour {
		t.Fatalf("recovered: %+v, %v", r, err)
	}
}

func TestLimits(t *testing.T) {
	s, err := embedded.Start(t.Context(), embedded.Options{
		DataDir: t.TempDir(), Limits: embedded.Limits{MetadataBytes: 3}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(context.Background())
	d := s.Driver(nil)
	defer d.Close(context.Background())
	r := backend.Request{
		Name: "x", Owner: "a", RequestID: backend.NewRequestID(), TTL: time.Minute, Metadata: map[string]string{"more": "than 3"},
	}
	if _, err := d.Acquire(t.Context(), r); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("beyond the limit: %v", err)
	}
}
