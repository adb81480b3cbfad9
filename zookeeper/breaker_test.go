package zookeeper_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// breaker is the network of a driver, which breaks a connection at one step of the recipe.
type breaker struct {
	requestID string            // whose entries are the driver's own
	before    func(step string) // if not nil, is called before the request of a step is sent
	deaf      bool              // what the server tells about watches does not arrive

	mu    sync.Mutex // protects the following fields
	steps []string   // in the order in which they came, without repetitions
	at    string     // the step at which it breaks, once; empty: not at all
	how   loss
	broke bool
	conns []*brokenConn
	open  int // of conns

	arrived, deliver chan struct{} // of a reply that is held: closed when it has come, and to let it pass
}

// loss is what happens at the step.
type loss string

const (
	unsent      loss = "the request is not sent"
	requestLost loss = "the request is lost on its way"
	replyLost   loss = "the request is carried out and the reply is lost"
	replyHeld   loss = "the request is carried out and the reply is held back" // see breaker.deliver
)

var losses = []loss{unsent, requestLost, replyLost}

// Numbers of the protocol.
const (
	opDelete, opExists, opGetData, opGetChildren2, opMulti, opCreate, opCreateContainer = 2, 3, 4, 12, 14, 15, 19
)

// watchEvent is the number of what the server says about a watch.
const watchEvent = 1<<32 - 1

var kinds = map[int32]string{
	opCreate: "create", opDelete: "delete", opGetData: "get", opGetChildren2: "list",
	opExists: "look", opMulti: "replace", opCreateContainer: "make the name's node",
}

// step names a request by what it is for. Other requests, such as the proofs that come by the clock, have none.
func (b *breaker) step(frame []byte) string {
	if len(frame) < 16 {
		return ""
	}
	op := int32(binary.BigEndian.Uint32(frame[8:]))
	kind := kinds[op]
	switch op {
	case opMulti:
		if !strings.Contains(string(frame), b.requestID) {
			kind = "prove"
		}
	case opGetData:
		if frame[len(frame)-1] != 0 {
			kind = "watch"
		}
		fallthrough
	case opDelete:
		whose := " another's"
		if strings.Contains(string(frame), b.requestID) {
			whose = " one's own"
		}
		kind += whose
	}
	return kind
}

func (b *breaker) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c := &brokenConn{Conn: conn, b: b}
	b.conns = append(b.conns, c)
	b.open++
	return c, nil
}

// arm lets the connection break at a step.
func (b *breaker) arm(step string, how loss) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at, b.how = step, how
}

// rearm is arm once it has broken.
func (b *breaker) rearm(step string, how loss) {
	b.arm(step, how)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.broke = false
}

func (b *breaker) hasBroken() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.broke
}

// await waits for a step, broken or not.
func (b *breaker) await(ctx context.Context, step string) error {
	for {
		b.mu.Lock()
		came := slices.Contains(b.steps, step)
		b.mu.Unlock()
		if came {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the step %q did not come: %w", step, ctx.Err())
		}
		time.Sleep(time.Millisecond) // no event announces it
	}
}

// seen returns the steps so far, and forgets them.
func (b *breaker) seen() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	steps := b.steps
	b.steps = nil
	return steps
}

// happens notes a step, and tells how it breaks, if it does.
func (b *breaker) happens(step string) loss {
	if b.before != nil {
		b.before(step)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if step == "" {
		return ""
	}
	if !slices.Contains(b.steps, step) {
		b.steps = append(b.steps, step)
	}
	if b.broke || step != b.at {
		return ""
	}
	b.broke = true
	return b.how
}

// connections is how many are open.
func (b *breaker) connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open
}

// session returns the id and the password of the latest session, as the server told them. One that was only made to
// learn the server's tick is shorter than those that carry holds, and does not count.
func (b *breaker) session() (id uint64, password []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	longest := uint32(0)
	for _, c := range b.conns {
		if len(c.hello) == 0 {
			continue
		}
		if timeout := binary.BigEndian.Uint32(c.hello[8:]); timeout >= longest {
			longest, id, password = timeout, binary.BigEndian.Uint64(c.hello[12:]), c.hello[24:40]
		}
	}
	return id, password
}

// brokenConn is one connection through a breaker.
type brokenConn struct {
	net.Conn
	b *breaker

	greeted bool   // the connect request has been sent
	frame   []byte // of what was read, what has not been returned yet

	// Protected by b.mu.
	hello []byte // the answer to the connect request
	drop  uint32 // the number of the request whose reply is lost, or 0
	late  uint32 // the number of the request whose reply is held, or 0
	ended bool
}

// Close closes the connection.
func (c *brokenConn) Close() error {
	c.b.mu.Lock()
	if !c.ended {
		c.ended = true
		c.b.open--
	}
	c.b.mu.Unlock()
	return c.Conn.Close()
}

// Write takes whole requests.
func (c *brokenConn) Write(p []byte) (n int, err error) {
	if !c.greeted {
		c.greeted = true
		return c.Conn.Write(p)
	}
	for n < len(p) {
		request := p[n:][:4+binary.BigEndian.Uint32(p[n:])]
		switch c.b.happens(c.b.step(request)) {
		case unsent:
			c.Conn.Close()
			return n, os.NewSyscallError("write", syscall.ECONNRESET)
		case requestLost:
			c.Conn.Close()
			return len(p), nil
		case replyLost:
			c.b.mu.Lock()
			c.drop = binary.BigEndian.Uint32(request[4:])
			c.b.mu.Unlock()
		case replyHeld:
			c.b.mu.Lock()
			c.late = binary.BigEndian.Uint32(request[4:])
			c.b.mu.Unlock()
		}
		if _, err := c.Conn.Write(request); err != nil {
			return n, err
		}
		n += len(request)
	}
	return n, nil
}

// Read returns what the server sends, except a reply that is to be lost.
func (c *brokenConn) Read(p []byte) (int, error) {
	if len(c.frame) == 0 {
		var size [4]byte
		if _, err := io.ReadFull(c.Conn, size[:]); err != nil {
			return 0, err
		}
		frame := make([]byte, 4+binary.BigEndian.Uint32(size[:]))
		copy(frame, size[:])
		if _, err := io.ReadFull(c.Conn, frame[4:]); err != nil {
			return 0, err
		}
		if c.b.deaf && c.hello != nil && binary.BigEndian.Uint32(frame[4:]) == watchEvent {
			return c.Read(p)
		}
		c.b.mu.Lock()
		lost := c.drop != 0 && c.drop == binary.BigEndian.Uint32(frame[4:])
		held := c.late != 0 && c.late == binary.BigEndian.Uint32(frame[4:])
		if c.hello == nil {
			c.hello = frame
		}
		c.b.mu.Unlock()
		if lost {
			c.Conn.Close()
			return 0, io.ErrUnexpectedEOF
		}
		if held {
			close(c.b.arrived)
			<-c.b.deliver
		}
		c.frame = frame
	}
	n := copy(p, c.frame)
	c.frame = c.frame[n:]
	return n, nil
}
