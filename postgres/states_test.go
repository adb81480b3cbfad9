package postgres_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

// refuser is a proxy that answers a request with an error in place of the server.
type refuser struct {
	t      testing.TB
	server string
	addr   string

	mu     sync.Mutex
	marker string // a text among the arguments of the request; empty: no request
	times  int    // the number of requests to refuse
	code   string
	says   string
	fatal  bool // the connection ends
	after  bool // the server executes the request
}

func newRefuser(t testing.TB, server string) *refuser {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &refuser{t: t, server: server, addr: listener.Addr().String()}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = client.Close() })
			all.Go(func() { r.serve(client) })
		}
	})
	t.Cleanup(func() { _ = listener.Close() })
	return r
}

// arm makes the next requests that have marker among their arguments fail, a number of times.
func (r *refuser) arm(times int, marker, code, says string, fatal, after bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times, r.marker, r.code, r.says, r.fatal, r.after = times, marker, code, says, fatal, after
}

// takes reports whether to refuse a request.
func (r *refuser) takes(request []byte) (answer []byte, fatal, after, yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.marker == "" || !bytes.Contains(request, []byte(r.marker)) {
		return nil, false, false, false
	}
	if r.times--; r.times == 0 {
		r.marker = ""
	}
	severity := "ERROR"
	if r.fatal {
		severity = "FATAL"
	}
	fields := []byte(fmt.Sprintf("S%s\x00V%s\x00C%s\x00M%s\x00\x00", severity, severity, r.code, r.says))
	answer = binary.BigEndian.AppendUint32([]byte{'E'}, uint32(len(fields)+4))
	return append(answer, fields...), r.fatal, r.after, true
}

// message reads one message of the protocol; the first one of a client has no type.
func message(from io.Reader, typed bool) ([]byte, error) {
	head := make([]byte, 4, 5)
	if typed {
		head = head[:5]
	}
	if _, err := io.ReadFull(from, head); err != nil {
		return nil, err
	}
	rest := make([]byte, binary.BigEndian.Uint32(head[len(head)-4:])-4)
	_, err := io.ReadFull(from, rest)
	return append(head, rest...), err
}

func (r *refuser) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", r.server)
	if err != nil {
		return
	}
	defer server.Close()
	first, err := message(client, false)
	if err != nil {
		return
	}
	if _, err := server.Write(first); err != nil {
		return
	}
	// swallow drops the answers to the next request.
	swallow := make(chan chan struct{}, 1)
	go func() {
		defer client.Close()
		var done chan struct{}
		for {
			m, err := message(server, true)
			if err != nil {
				return
			}
			select {
			case done = <-swallow:
			default:
			}
			if done == nil {
				if _, err := client.Write(m); err != nil {
					return
				}
			} else if m[0] == 'Z' {
				close(done)
				done = nil
			}
		}
	}()
	var request []byte
	for {
		m, err := message(client, true)
		if err != nil {
			return
		}
		// A request ends with Sync, or is a simple query.
		if request = append(request, m...); m[0] != 'S' && m[0] != 'Q' && m[0] != 'X' {
			continue
		}
		answer, fatal, after, yes := r.takes(request)
		if yes && after {
			done := make(chan struct{})
			swallow <- done
			if _, err := server.Write(request); err != nil {
				return
			}
			<-done
		}
		switch {
		case yes:
			if !fatal {
				answer = append(answer, 'Z', 0, 0, 0, 5, 'I')
			}
			if _, err := client.Write(answer); err != nil || fatal {
				return
			}
		default:
			if _, err := server.Write(request); err != nil {
				return
			}
		}
		request = nil
	}
}

// TestStates answers an acquire and a release with each SQLSTATE of the classes for connections, transactions and the
// server's operation, and with PgBouncer's errors, before the commit and after it. A call retries if another try may
// succeed, and returns the hold that was granted; a refusal has its class. No leftovers remain.
func TestStates(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	var rows []refusal
	add := func(fatal, only bool, want error, codes ...string) {
		for _, code := range codes {
			rows = append(rows, refusal{code: code, says: "injected", fatal: fatal, only: only, want: want})
		}
	}
	add(true, false, nil, "08000", "08003", "08006", "08007", "08P01")
	add(true, true, nil, "08001", "08004")
	add(false, true, backend.ErrUnavailable, "25000", "25001", "25002", "25003", "25004", "25005", "25006", "25007",
		"25008", "25P01")
	add(false, true, nil, "25P02")
	add(true, true, nil, "25P03", "25P04")
	add(false, true, nil, "40000", "40001", "40002", "40P01")
	add(false, false, nil, "40003")
	add(false, true, backend.ErrUnavailable, "53000", "53100", "53200", "53300", "53400")
	add(false, true, backend.ErrUnavailable, "55000", "55006", "55P02", "55P04")
	add(false, true, nil, "55P03", "57014", "23505")
	add(true, false, nil, "57000", "57P01", "57P02", "57P04")
	add(true, true, nil, "57P03", "57P05")
	add(false, true, backend.ErrMisconfigured, "28000", "28P01", "3D000", "3F000", "42501", "42P01", "0A000")
	add(false, false, nil, "XX000", "58030")
	for _, says := range []string{
		"client_idle_timeout", "query_wait_timeout", "client_login_timeout", "no more connections allowed (max_client_conn)",
		"pgbouncer cannot connect to server", "server login has been failing, try again later (server_login_retry)",
	} {
		rows = append(rows, refusal{code: "08P01", says: says, fatal: true, only: true})
	}
	for _, says := range []string{"server conn crashed?", "query_timeout", "server_lifetime"} {
		rows = append(rows, refusal{code: "08P01", says: says, fatal: true})
	}
	const clients = 4
	var all sync.WaitGroup
	for client := range clients {
		way := newRefuser(t, server.Addr())
		d := postgres.New(newPool(t, urlOf(way.addr)), nil)
		defer closeDriver(t, d)
		all.Go(func() {
			for i := client; i < len(rows); i += clients {
				refused(t, way, d, fmt.Sprint("state-", i), rows[i])
			}
		})
	}
	all.Wait()
	held := connect(t, server.URL()).QueryRow(soon(t, time.Minute), `select count(*) from fencelock.holds`)
	var left int
	if err := held.Scan(&left); err != nil || left != 0 {
		t.Errorf("%d holds are left, %v", left, err)
	}
}

// refusal is an error in place of the answer to a request, and the class of the call's error.
type refusal struct {
	code, says string
	fatal      bool  // the connection ends
	only       bool  // the server returns it only before the commit, and has no effect
	want       error // nil: the call retries
}

// refused has an acquire and a release of d refused, before the commit and after it.
func refused(t *testing.T, way *refuser, d *postgres.Driver, name string, row refusal) {
	for _, after := range []bool{false, true} {
		if after && row.only {
			continue
		}
		what := fmt.Sprintf("%s (%s), after the commit: %v", row.code, row.says, after)
		name := fmt.Sprintf("%s-%v", name, after)
		ctx := soon(t, time.Minute)
		// A refusal that another try may do better after is repeated by the driver, a few times for an attempt that does not
		// wait.
		tries := 1
		if errors.Is(row.want, backend.ErrUnavailable) {
			tries = 3
		}
		way.arm(tries, name, row.code, row.says, row.fatal, after)
		r := request(name, time.Minute)
		g, err := d.Acquire(ctx, r)
		if row.want == nil && err != nil || row.want != nil && !errors.Is(err, row.want) {
			t.Errorf("%s: acquire = %v, want %v", what, err, row.want)
		}
		if err != nil {
			if err := d.Release(ctx, r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("%s: releasing what it may have granted: %v", what, err)
			}
			if g, err = d.Acquire(ctx, request(name, time.Minute)); err != nil {
				t.Errorf("%s: the next acquire: %v", what, err)
				continue
			}
		}
		way.arm(1, name, row.code, row.says, row.fatal, after)
		err = d.Release(ctx, g)
		// A second answer "not held" is right: the first try was executed.
		if row.want == nil && err != nil && !(after && errors.Is(err, backend.ErrNotHeld)) ||
			row.want != nil && !errors.Is(err, row.want) {
			t.Errorf("%s: release = %v, want %v", what, err, row.want)
		}
		if err != nil && !errors.Is(err, backend.ErrNotHeld) {
			_ = d.Release(ctx, g)
		}
	}
}
