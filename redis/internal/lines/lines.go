// Package lines carries the steps of the lock script to the servers that a client of go-redis reaches: one server, the
// master behind Sentinels, or the nodes of a cluster.
package lines

// This file finds the connection for a name. On one server all names share one line (internal/rediswire); on a cluster
// every node has its own, and the slot of a name selects it. The table of slots starts empty and is filled as names
// are used: from the client's own view of the cluster at first, and from MOVED answers afterwards.
//
// After a line fails its slots are forgotten, so that the next step asks the client where it is now. Behind Sentinels
// the master can change while its old connection still answers; Follow watches for that.

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

// Lines are the connections on which steps go. They are the driver's own, made from the client's options: retries and
// pooling of the client would hide whether a command was sent, which is the difference between ErrUnavailable and
// ErrUnknown. The client itself finds the nodes, answers INFO, and subscribes.
type Lines struct {
	// Of a client that was handed in; nil without one.
	hooks *hooks

	// For every line, without Connect.
	options rediswire.Options
	// The one line; nil on a cluster.
	one     *rediswire.Line
	cluster *goredis.ClusterClient
	// Sharded: names may be on different servers: the client is one of a cluster, or the server is a proxy before one. It
	// decides how the script pushes and how steps are grouped.
	Sharded atomic.Bool
	// Whether a step was sent since Follow looked last: an idle driver does not ask the Sentinels.
	used atomic.Bool
	// dialled is called for each new connection, which may lead to another server than the last one.
	dialled func()

	mu    sync.Mutex // protects the following fields
	nodes map[string]*rediswire.Line
	// The options of any one node: MOVED and ASK name an address, and the rest is the same for all.
	node goredis.Options
	// Lines made from now on are closed immediately.
	closed bool

	// The line of each slot, as far as it is known. Atomic, since every step of a cluster reads one.
	slots [redisscript.Slots]atomic.Pointer[rediswire.Line]
}

// New prepares the lines for client, and does not connect. suspect is called with every new connection, and when an
// answer casts doubt on the server.
func New(client goredis.UniversalClient, clock backend.Clock, prefix string, suspect func()) *Lines {
	ls := &Lines{nodes: map[string]*rediswire.Line{}, dialled: suspect}
	ls.options = rediswire.Options{
		Clock: clock, Channels: prefix, Sharded: ls.Sharded.Load,
		Report: func(f *redisconn.Failure) {
			if f != nil && !f.Fatal {
				suspect()
			}
		},
	}
	switch c := client.(type) {
	case *goredis.ClusterClient:
		ls.cluster = c
		ls.Sharded.Store(true)
	case interface{ Options() *goredis.Options }:
		ls.one = ls.line(*c.Options())
	}
	return ls
}

// line returns a new line to the server of opt.
func (ls *Lines) line(opt goredis.Options) *rediswire.Line {
	o := ls.options
	o.Connect = func() (*rediswire.Conn, error) {
		conn, err := rediswire.Connect(opt)
		if err == nil {
			ls.dialled()
		}
		return conn, err
	}
	return rediswire.NewLine(o)
}

// of returns the line for a lock. Without one on record it asks the cluster, for answerTime at most. The line may be
// wrong a moment later, when the slot moves: the node then answers MOVED, and redirect corrects the table.
func (ls *Lines) of(ctx context.Context, lock string) (*rediswire.Line, error) {
	if ls.one != nil {
		// A store only where it changes something: all callers write to the same cache line otherwise.
		if !ls.used.Load() {
			ls.used.Store(true)
		}
		return ls.one, nil
	}
	slot := redisscript.Slot(lock)
	if l := ls.slots[slot].Load(); l != nil {
		return l, nil
	}
	node, err := MasterOf(ctx, ls.cluster, lock)
	if err != nil {
		return nil, err
	}
	l := ls.to(*node.Options())
	ls.slots[slot].Store(l)
	return l, nil
}

// to returns the line to one node of a cluster, and makes it if necessary.
func (ls *Lines) to(opt goredis.Options) *rediswire.Line {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.nodes[opt.Addr]
	if l == nil {
		ls.node = opt
		l = ls.line(opt)
		ls.nodes[opt.Addr] = l
		if ls.closed {
			l.Close()
		}
	}
	return l
}

// forget removes the slots of a failed line from the table. It also makes the client reload its own table in the
// background. All slots of the line are searched, 16,384 compare-and-swaps, which happens once for a failed connection.
func (ls *Lines) forget(l *rediswire.Line) {
	for i := range ls.slots {
		ls.slots[i].CompareAndSwap(l, nil)
	}
	ls.cluster.ReloadState(context.Background()) // in the background
}

// maxHops bounds the number of nodes that one step visits. More than two hops need a cluster that is being rearranged
// while its nodes disagree.
const maxHops = 8

// redirect sends a step that has failed to the node that has its keys, if the answer names it, and reports whether it
// did. MOVED is permanent, so the slot's line changes; ASK is for this one step, which then goes with ASKING. If no
// answer came at all, the nodes are looked up again for the next attempt.
//
// It runs on the goroutine that reads the old node's connection. The step is submitted on a new goroutine, which ends
// with that call: submitting may write to the other connection, and two readers that wait for each other's writes would
// never end.
func (ls *Lines) redirect(s *Step) bool {
	if ls.cluster == nil {
		return false
	}
	text, answered := serverError(s.Err)
	if !answered {
		ls.forget(s.line.Load())
		return false
	}
	fields := strings.Fields(text)
	if len(fields) != 3 || fields[0] != "MOVED" && fields[0] != "ASK" || s.hops == maxHops {
		return false
	}
	host, port, err := net.SplitHostPort(fields[2])
	if err != nil {
		return false
	}
	ls.mu.Lock()
	opt := ls.node
	for addr, l := range ls.nodes {
		if l == s.line.Load() && host == "" { // it does not know its name, and means the address at which it was asked
			host, _, _ = net.SplitHostPort(addr)
		}
	}
	ls.mu.Unlock()
	opt.Addr = net.JoinHostPort(host, port)
	s.Step.Again()
	s.hops++
	to := ls.to(opt)
	s.Asking = fields[0] == "ASK"
	s.line.Store(to)
	if !s.Asking {
		ls.slots[redisscript.Slot(s.Keys.Lock)].Store(to)
		ls.cluster.ReloadState(context.Background()) // in the background
	}
	go to.Submit(&s.Step) // it may write, and this is a reader
	return true
}

// serverError returns the text of a server's error answer, which distinguishes MOVED and ASK from a broken connection.
func serverError(f *redisconn.Failure) (text string, answered bool) {
	answer, ok := f.Cause.(redisconn.ServerError)
	return string(answer), ok
}

// Close ends all lines; the channels tell when. A line made later by a step in progress is closed by to.
func (ls *Lines) Close() (ends []<-chan struct{}) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.closed = true
	if ls.one != nil {
		ends = append(ends, ls.one.Close())
	}
	for _, l := range ls.nodes {
		ends = append(ends, l.Close())
	}
	return ends
}

// masterEvery is the time between two look-ups of the master behind Sentinels while there are calls. A master that was
// replaced by a manual failover still answers until it has become a replica, and would grant locks unknown to the new
// master.
const masterEvery = time.Second

// Follow keeps the line on the master that the Sentinels name, until ctx ends. go-redis 9 asks the Sentinels inside the
// dialer of a failover client, so each look opens a connection and closes it; only its remote address counts. It polls
// and does not subscribe to the Sentinels' +switch-master: after a lost message the line would stay on the old master.
//
// It is one goroutine for each driver behind Sentinels, started by the first probe, and it ends when Close begins.
func (ls *Lines) Follow(ctx context.Context, opt goredis.Options) {
	tick := time.NewTicker(masterEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		before := ls.one.Addr()
		if before == nil || !ls.used.Swap(false) {
			continue
		}
		bounded, cancel := context.WithTimeout(ctx, answerTime)
		conn, err := opt.Dialer(bounded, opt.Network, opt.Addr)
		cancel()
		if err != nil {
			continue
		}
		// Another address is another master. The old connection finishes its requests, and carries no new ones.
		if conn.RemoteAddr().String() != before.String() {
			ls.one.Renew()
		}
		_ = conn.Close() // it was opened to see where it leads
	}
}
