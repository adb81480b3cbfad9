package zookeeper_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

const (
	opSetData = 5
	opCreate2 = 15 // what the driver makes of the library's opCreate

	throttled = -127 // the code of a server that has too much to do, and has not begun with the request
)

// answers is a network on which the server answers some kinds of requests with an error code, and does not do them.
type answers struct {
	mu    sync.Mutex // protects the following fields
	ops   []int32
	code  int32
	once  bool
	given int // how often
}

// give lets requests of some kinds be answered with a code, all or the first one, until pass.
func (a *answers) give(code int32, once bool, ops ...int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ops, a.code, a.once = ops, code, once
}

// pass ends give, and returns how many requests were answered.
func (a *answers) pass() (given int) {
	a.give(0, false)
	a.mu.Lock()
	defer a.mu.Unlock()
	given, a.given = a.given, 0
	return given
}

// of returns the code with which a request is answered, or 0.
func (a *answers) of(op int32) int32 {
	a.mu.Lock()
	defer a.mu.Unlock()
	code := a.code
	if code == 0 || !slices.Contains(a.ops, op) {
		return 0
	}
	if a.given++; a.once {
		a.code = 0
	}
	return code
}

// front returns the address of a listener that connects clients with a server through a.
func (a *answers) front(t testing.TB, server string) (addr string) {
	return peer(t, func(c net.Conn) {
		defer c.Close()
		s, err := a.dial(context.Background(), "tcp", server)
		if err != nil {
			return
		}
		defer s.Close()
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, s)
		}()
		_, _ = io.Copy(s, c)
	})
}

func (a *answers) dial(ctx context.Context, network, address string) (net.Conn, error) {
	server, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	near, client := net.Pipe()
	var mu sync.Mutex
	codes := map[uint32]int32{} // by the number of the request; protected by mu
	pass := func(from, to net.Conn, change func(frame []byte) []byte) {
		defer from.Close()
		defer to.Close()
		for first := true; ; first = false {
			var size [4]byte
			if _, err := io.ReadFull(from, size[:]); err != nil {
				return
			}
			frame := append(size[:], make([]byte, binary.BigEndian.Uint32(size[:]))...)
			if _, err := io.ReadFull(from, frame[4:]); err != nil {
				return
			}
			if !first {
				frame = change(frame)
			}
			if _, err := to.Write(frame); err != nil {
				return
			}
		}
	}
	go pass(near, server, func(frame []byte) []byte {
		code := a.of(int32(binary.BigEndian.Uint32(frame[8:])))
		if code == 0 {
			return frame
		}
		mu.Lock()
		defer mu.Unlock()
		codes[binary.BigEndian.Uint32(frame[4:])] = code
		// The server is asked for something else, so that the answers keep their order.
		look := append([]byte{0, 0, 0, 4 + 4 + 4 + 1 + 1}, frame[4:8]...)
		return append(append(binary.BigEndian.AppendUint32(look, opExists), 0, 0, 0, 1), '/', 0)
	})
	go pass(server, near, func(frame []byte) []byte {
		mu.Lock()
		defer mu.Unlock()
		number := binary.BigEndian.Uint32(frame[4:])
		code, ok := codes[number]
		if !ok {
			return frame
		}
		delete(codes, number)
		return binary.BigEndian.AppendUint32(append([]byte{0, 0, 0, 4 + 8 + 4}, frame[4:16]...), uint32(code))
	})
	return client, nil
}

// The classes of the servers' codes of versions 3.5 to 3.9, by what was done.
var (
	notDone = []int32{
		-8, -12, -13, -14, -100, -103, -108, -110, -111, -118, -119, -121, -123, -127,
	}
	notDoneBefore = []int32{-6, -102, -114, -115, -120, -124, -125} // somebody changes a setting or a right
	mayBeDone     = []int32{-1, -2, -3, -4, -5, -7, -9, -113, -116, -117, -122}
)

// TestErrorCodes answers the creation of an entry, and the deletion of a hold, with each code, and with the numbers
// between them, which no version has.
func TestErrorCodes(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	network := &answers{}
	d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: network.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 20*time.Second)) })
	held := func(n int) backend.Request {
		r := request(fmt.Sprintf("code %d", n), false)
		r.TTL = ttl
		return r
	}
	release(t, d, take(t, d, held(0)))
	for code := int32(-1); code >= -130; code-- {
		switch code {
		case -101:
			continue // says that the name's node is missing, or the entry
		case -112: // the session has ended, and the attempt has another one
			network.give(code, true, opCreate2)
			release(t, d, take(t, d, held(int(code))))
			if network.pass() == 0 {
				t.Fatalf("code %d was not given", code)
			}
			continue
		}
		want, known := backend.ErrUnknown, slices.Contains(mayBeDone, code)
		switch {
		case slices.Contains(notDone, code):
			want, known = backend.ErrUnavailable, true
		case slices.Contains(notDoneBefore, code):
			want, known = backend.ErrMisconfigured, true
		}
		judge := func(call string, err error) {
			t.Helper()
			for _, class := range []error{backend.ErrUnknown, backend.ErrUnavailable, backend.ErrMisconfigured} {
				if errors.Is(err, class) != errors.Is(want, class) {
					t.Errorf("code %d: %s = %v, want %v alone", code, call, err, want)
				}
			}
			text := fmt.Sprint(err)
			if known == strings.Contains(text, "do not define") || strings.Contains(text, "unknown error") {
				t.Errorf("code %d: %s = %v, want words for it", code, call, err)
			}
		}
		patience, enough := 20*time.Second, 1
		if errors.Is(want, backend.ErrUnknown) { // the acquire repeats until its context ends
			patience, enough = 150*time.Millisecond, 2 // so that the client has read the first answer
		}
		for given := false; !given; patience *= 2 {
			r := held(int(code))
			network.give(code, false, opCreate2)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			_, err := d.Acquire(ctx, r)
			cancel()
			if given = network.pass() >= enough; given {
				judge("Acquire", err)
			} else if patience > 10*time.Second {
				t.Fatalf("code %d was not given", code)
			}
			if errors.Is(want, backend.ErrUnknown) {
				_ = d.Release(soon(t, 20*time.Second), r.Grant()) // as the core does
			}
		}
	}
}

// TestThrottledRelease has the server throttle the deletion of a hold once: it was not done, and is repeated.
func TestThrottledRelease(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	network := &answers{}
	d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: network.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 20*time.Second)) })
	g := take(t, d, request("throttled", false))
	network.give(throttled, true, opDelete)
	release(t, d, g)
	if network.pass() != 1 {
		t.Error("the deletion was not throttled")
	}
	rival := driver(t, server.Addr())
	release(t, rival, take(t, rival, request("throttled", false)))
}

// TestQuota uses up a quota that the servers enforce: the error says what to do, holds go on, and releases work.
func TestQuota(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t, containers.Settings("enforceQuota=true"))
	admin, d := newAdmin(t, server.Addr()), driver(t, server.Addr())
	r := request("quota", false)
	g := take(t, d, r)
	limit := "/zookeeper/quota" + rootNode
	admin.create(t, limit)
	const used = "count=3,bytes=-1;byteHardLimit=-1;countHardLimit=3" // the root, the name and the hold
	for _, node := range []string{"/zookeeper_limits", "/zookeeper_stats"} {
		if err := admin.try(func() error {
			_, err := admin.Create(limit+node, []byte(used), 0, zk.WorldACL(zk.PermAll))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"quota", "another"} {
		_, err := d.Acquire(soon(t, 20*time.Second), request(name, false))
		if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), "enforceQuota") {
			t.Errorf("Acquire(%q) beyond the quota = %v, want ErrMisconfigured with the setting", name, err)
		}
	}
	if err := d.Renew(soon(t, 20*time.Second), []backend.Grant{g})[0].Err; err != nil {
		t.Errorf("Renew = %v", err)
	}
	release(t, d, g)
	release(t, d, take(t, d, request("quota", false)))
}
