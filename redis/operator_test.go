package redis

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// dumped saves the data of a server, as of now, into a file of the folder.
func (s *testServer) dumped(t testing.TB) (file string) {
	t.Helper()
	admin, ctx := s.admin(t), within(t, 20*time.Second)
	if err := admin.Do(ctx, "SAVE").Err(); err != nil {
		t.Fatal(err)
	}
	folder, err := admin.ConfigGet(ctx, "dir").Result()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(folder["dir"], "dump.rdb")
}

// An old dump takes the place of a server's data, or a copy of the server takes its place. Its clients cannot
// detect that: the holder is notified by its next renewal. A released hold returns for its TTL at most.
func TestOldDataIsServed(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(*testing.T, *testServer, *fault.Proxy, string){
		"a dump": func(t *testing.T, s *testServer, _ *fault.Proxy, old string) {
			s.kill()
			if err := os.Rename(old, filepath.Join(filepath.Dir(old), "dump.rdb")); err != nil {
				t.Fatal(err)
			}
			s.start(t)
		},
		"a copy of the server": func(t *testing.T, _ *testServer, p *fault.Proxy, old string) {
			folder := t.TempDir()
			if err := os.Rename(old, filepath.Join(folder, "dump.rdb")); err != nil {
				t.Fatal(err)
			}
			p.SetUpstream(startServer(t, "--dir", folder).addr)
			p.Reset()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			p, err := fault.NewProxy(s.addr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Close() })
			d, rival := openAt(t, p.Addr()), openAt(t, p.Addr())
			const ttl = 4 * time.Second
			released := mustAcquire(t, d, request("released", ttl, false))
			saved := time.Now()
			old := filepath.Join(filepath.Dir(s.dumped(t)), "old")
			if err := os.Rename(s.dumped(t), old); err != nil {
				t.Fatal(err)
			}
			mustRelease(t, d, released)
			lost := make(chan backend.Reason, 4)
			r := request("forgotten", time.Minute, false)
			r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
			held := mustAcquire(t, d, r)
			replace(t, s, p, old)

			mustAcquire(t, rival, request("forgotten", time.Minute, true)) // beside the holder
			var gone *backend.NotHeldError
			eventually(t, "the holder is notified", func() bool {
				return errors.As(d.Renew(within(t, 30*time.Second), []backend.Grant{held})[0].Err, &gone)
			})
			if gone.Reason != backend.ReasonEvicted {
				t.Errorf("the reason is %q, want %q", gone.Reason, backend.ReasonEvicted)
			}
			if _, err := rival.Acquire(within(t, 30*time.Second), request("released", ttl, false)); err == nil &&
				time.Since(saved) < ttl {
				t.Error("what had been released is free at once: no old data are served")
			} else if err != nil && !errors.Is(err, backend.ErrHeld) {
				t.Errorf("what had been released: %v, want ErrHeld", err)
			}
			mustRelease(t, rival, mustAcquire(t, rival, request("released", ttl, true)))
			if took := time.Since(saved); took > 2*ttl+slack {
				t.Errorf("a hold that had been released stood for %v, with a TTL of %v", took, ttl)
			}
		})
	}
}

// An operator changes a server under a client with a hold: to another password, or into a replica of a server that does
// not know the hold. Until the server is as before, no renewal is confirmed and nothing is granted, and the calls name the
// setting. Then the hold is renewed, or its holder is notified that it is gone.
func TestServerChangesUnderAHold(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change, undo [][]any // commands
		want         error
		gone         bool
	}{
		"credentials": {
			[][]any{{"CONFIG", "SET", "requirepass", "secret"}, {"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"}},
			[][]any{{"CONFIG", "SET", "requirepass", ""}}, backend.ErrMisconfigured, false,
		},
		"role": { // as in a failover
			[][]any{{"REPLICAOF", "127.0.0.1", "master"}}, [][]any{{"REPLICAOF", "NO", "ONE"}}, backend.ErrUnavailable, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, master := startServer(t), startServer(t)
			d, admin, ctx := s.open(t), s.admin(t).Conn(), within(t, time.Minute)
			defer admin.Close()
			operate := func(commands [][]any) {
				t.Helper()
				for _, command := range commands {
					for i := range command {
						if command[i] == "master" {
							command[i] = strings.TrimPrefix(master.addr, "127.0.0.1:")
						}
					}
					if err := admin.Do(ctx, command...).Err(); err != nil {
						t.Fatal(err)
					}
				}
			}
			g := mustAcquire(t, d, request("held", 2*time.Minute, false))
			operate(test.change)
			if test.gone {
				eventually(t, "it follows the other server", func() bool {
					text, err := admin.Info(ctx, "replication").Result()
					return err == nil && strings.Contains(text, "master_link_status:up")
				})
			}
			changed := d.service.clock.Now()
			eventually(t, "the setting is named", func() bool {
				free, err := d.Acquire(ctx, request("free", time.Minute, false))
				if err == nil {
					t.Fatalf("granted: %+v", free)
				}
				return errors.Is(err, test.want) && strings.Contains(err.Error(), name)
			})
			if answer := d.Renew(ctx, []backend.Grant{g})[0]; answer.Err == nil && answer.SentAt > changed {
				t.Error("a renewal is confirmed")
			}
			operate(test.undo)
			eventually(t, "the renewal is answered", func() bool {
				err := d.Renew(ctx, []backend.Grant{g})[0].Err
				if gone := errors.Is(err, backend.ErrNotHeld); gone && !test.gone || err == nil && test.gone {
					t.Fatalf("Renew = %v", err)
				}
				return err == nil || errors.Is(err, backend.ErrNotHeld)
			})
			eventually(t, "names are granted again", func() bool {
				_, err := d.Acquire(ctx, request("free", time.Minute, false))
				return err == nil || errors.Is(err, backend.ErrHeld)
			})
		})
	}
}
