package postgres_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/postgres"
)

// pooler starts a PgBouncer in front of a server, and returns its address. As under a service manager, it listens on
// an inherited socket, and is restarted when it ends: version 1.18 (Debian 12) ends itself when a cancel request meets
// a connection that ends, see issues 801, 822 and 904 of pgbouncer/pgbouncer. The most frequent cause is a sender of
// the cancel request that closes its connection first, which toPooler prevents.
func pooler(t testing.TB, server *containers.PostgresServer, mode string) string {
	t.Helper()
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer"
		if _, err := os.Stat(program); err != nil {
			if os.Getenv("FENCELOCK_REQUIRE") == "all" {
				t.Fatal("pgbouncer is missing: install Debian's package pgbouncer")
			}
			t.Skip("pgbouncer is missing: install Debian's package pgbouncer")
		}
	}
	host, number, _ := strings.Cut(server.Addr(), ":")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	socket, err := listener.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(socket.Close(), listener.Close()) })
	dir := t.TempDir()
	config := filepath.Join(dir, "pgbouncer.ini")
	text := fmt.Sprintf("[databases]\n* = host=%s port=%s user=postgres\n[pgbouncer]\n"+
		"auth_type=any\npool_mode=%s\nmax_client_conn=900\ndefault_pool_size=%d\nunix_socket_dir=\nserver_login_retry=1\n",
		host, number, mode, map[string]int{"transaction": 20, "session": 600}[mode])
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for first := true; ; first = false {
			cmd, log := exec.Command("sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$1"`, program, config),
				&bytes.Buffer{}
			cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{socket}
			cmd.SysProcAttr = &syscall.SysProcAttr{}
			if os.Geteuid() == 0 {
				cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
			}
			if !first {
				sleepFor(t.Context(), 100*time.Millisecond)
			}
			ended, err := launch(cmd)
			if err != nil {
				t.Error(err)
				return
			}
			select {
			case <-ended:
				t.Logf("pgbouncer ended, %v:\n%s", cmd.ProcessState, log.Bytes()[max(0, log.Len()-2000):])
			case <-stop:
				_ = cmd.Process.Kill()
				<-ended
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-stopped
	})
	listen := toPooler(t, listener.Addr().String())
	pool := newPool(t, urlOf(listen))
	for ctx := soon(t, 60*time.Second); pool.Ping(ctx) != nil; {
		if ctx.Err() != nil {
			t.Fatal("pgbouncer does not answer")
		}
		time.Sleep(20 * time.Millisecond) // until it listens
	}
	return listen
}

// toPooler returns an address that leads to the pooler at addr. The connection of a cancel request stays open until
// the pooler ends it, even if the client has closed its own.
func toPooler(t testing.TB, addr string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	lead := func(from net.Conn) {
		defer from.Close()
		to, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		defer to.Close()
		first := make([]byte, 8) // the length and the code of the first message
		if _, err := io.ReadFull(from, first); err != nil {
			return
		}
		first = append(first, make([]byte, binary.BigEndian.Uint16(first[2:])-8)...)
		if _, err := io.ReadFull(from, first[8:]); err != nil {
			return
		}
		_, _ = to.Write(first) // in one write: 1.18 takes no part of it
		const cancel = 80877102
		asksToCancel := binary.BigEndian.Uint32(first[4:]) == cancel
		go func() {
			_, _ = io.Copy(to, from)
			if !asksToCancel {
				_ = to.Close()
			}
		}()
		_, _ = io.Copy(from, to)
		if asksToCancel {
			_, _ = io.Copy(io.Discard, to) // if from has closed
		}
	}
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			go lead(from)
		}
	}()
	return listener.Addr().String()
}

// launch starts a server that ends with the tests at the latest. The channel is closed when it has ended.
func launch(cmd *exec.Cmd) (<-chan struct{}, error) {
	dieWithParent(cmd.SysProcAttr)
	started, ended := make(chan error), make(chan struct{})
	go func() {
		// Linux sends the signal when the thread that started the child ends, so this thread stays as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
		close(ended)
	}()
	return ended, <-started
}

// pooled is a server behind a pooler.
type pooled struct {
	*containers.PostgresServer
	addr string
}

func (p pooled) Addr() string { return p.addr }

func (p pooled) NewLink(t testing.TB) (string, fault.Link) { return linkTo(t, p.addr) }

// linkTo returns an address that leads to another one, and the link between them.
func linkTo(t testing.TB, addr string) (string, fault.Link) {
	t.Helper()
	p, err := fault.NewProxy(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p.Addr(), p
}

// TestConformanceBehindAPooler runs the suite through PgBouncer. In transaction mode the driver declares that its
// waiters poll, and does not declare pushed losses; everything else is as without a pooler.
func TestConformanceBehindAPooler(t *testing.T) {
	testtier.Only(t)
	for mode, o := range map[string]*postgres.Options{"session": nil, "transaction": {NoListen: true}} {
		t.Run(mode, func(t *testing.T) {
			server := migrated(t)
			way := func(t testing.TB, addr string) backend.FencingDriver {
				return postgres.New(newPool(t, urlOf(addr)), o)
			}
			conformance.Run(t, harness(pooled{server, pooler(t, server, mode)}, way))
		})
	}
}
