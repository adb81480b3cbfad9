package redis

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

// lines are the connections on which steps go: one line to the server, or one to each node of a cluster. They are the
// driver's own, made from the client's options; the client itself finds the nodes, asks INFO, and subscribes.
type lines struct {
	options rediswire.Options // without Connect
	one     *rediswire.Line   // nil on a cluster
	cluster *goredis.ClusterClient
	sharded atomic.Bool // names may be on different servers; one may be a proxy before a cluster
	used    atomic.Bool // since follow has looked
	dialled func()      // told of each new connection

	mu     sync.Mutex // protects the following fields
	nodes  map[string]*rediswire.Line
	node   goredis.Options // of any one
	closed bool

	slots [redisscript.Slots]atomic.Pointer[rediswire.Line] // as far as they are known
}

func newLines(client goredis.UniversalClient, clock backend.Clock, prefix string, suspect func()) *lines {
	ls := &lines{nodes: map[string]*rediswire.Line{}, dialled: suspect}
	ls.options = rediswire.Options{
		Clock: clock, Channels: prefix, Sharded: ls.sharded.Load,
		Report: func(f *redisconn.Failure) {
			if f != nil && !f.Fatal {
				suspect()
			}
		},
	}
	switch c := client.(type) {
	case *goredis.ClusterClient:
		ls.cluster = c
		ls.sharded.Store(true)
	case interface{ Options() *goredis.Options }:
		ls.one = ls.line(*c.Options())
	}
	return ls
}

// line returns a new line to the server of opt.
func (ls *lines) line(opt goredis.Options) *rediswire.Line {
	o := ls.options
	o.Connect = func() (net.Conn, error) {
		conn, err := rediswire.Connect(opt)
		if err == nil {
			ls.dialled()
		}
		return conn, err
	}
	return rediswire.NewLine(o)
}

// of returns the line for a lock.
func (ls *lines) of(ctx context.Context, lock string) (*rediswire.Line, error) {
	if ls.one != nil {
		if !ls.used.Load() {
			ls.used.Store(true)
		}
		return ls.one, nil
	}
	slot := redisscript.Slot(lock)
	if l := ls.slots[slot].Load(); l != nil {
		return l, nil
	}
	node, err := masterOf(ctx, ls.cluster, lock)
	if err != nil {
		return nil, err
	}
	l := ls.to(*node.Options())
	ls.slots[slot].Store(l)
	return l, nil
}

// masterOf asks which node of a cluster has a lock.
func masterOf(ctx context.Context, cluster *goredis.ClusterClient, lock string) (*goredis.Client, error) {
	return question(ctx, func(ctx context.Context) (*goredis.Client, error) { return cluster.MasterForKey(ctx, lock) })
}

// to returns the line to one node of a cluster.
func (ls *lines) to(opt goredis.Options) *rediswire.Line {
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

// forget has the slots of a line that fails looked up again.
func (ls *lines) forget(l *rediswire.Line) {
	for i := range ls.slots {
		ls.slots[i].CompareAndSwap(l, nil)
	}
	ls.cluster.ReloadState(context.Background()) // in the background
}

// maxHops bounds how often a step is sent on from node to node.
const maxHops = 8

// redirect sends a step that has failed to the node that has its keys, if the answer says which. Where no answer came
// the nodes are looked up again, for the next attempt.
func (b *batcher) redirect(s *step) bool {
	ls := b.lines
	if ls.cluster == nil {
		return false
	}
	text, answered := serverError(s.Err)
	if !answered {
		ls.forget(s.line)
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
		if l == s.line && host == "" { // the node does not know its own name
			host, _, _ = net.SplitHostPort(addr)
		}
	}
	ls.mu.Unlock()
	opt.Addr = net.JoinHostPort(host, port)
	hops := s.hops + 1
	s.Step.Again()
	s.hops, s.Asking, s.line = hops, fields[0] == "ASK", ls.to(opt)
	if !s.Asking {
		ls.slots[redisscript.Slot(s.Keys.Lock)].Store(s.line)
		ls.cluster.ReloadState(context.Background()) // in the background
	}
	go s.line.Submit(&s.Step) // it may write, and this is a reader
	return true
}

// serverError returns the text of an answer.
func serverError(f *redisconn.Failure) (text string, answered bool) {
	answer, ok := f.Cause.(redisconn.ServerError)
	return string(answer), ok
}

// close ends all lines, and returns when they have ended, or with ctx.
func (ls *lines) close(ctx context.Context) error {
	ls.mu.Lock()
	ls.closed = true
	all := []*rediswire.Line{}
	if ls.one != nil {
		all = append(all, ls.one)
	}
	for _, l := range ls.nodes {
		all = append(all, l)
	}
	ls.mu.Unlock()
	var ends []<-chan struct{}
	for _, l := range all {
		ends = append(ends, l.Close())
	}
	for _, ended := range ends {
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// masterEvery is how often the master is looked up behind Sentinels while there are calls: one that was replaced may
// still answer.
const masterEvery = time.Second

// follow keeps the line to the master that Sentinels tell of, whom the dialer of opt finds, until ctx ends.
func (ls *lines) follow(ctx context.Context, opt goredis.Options) {
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
		if conn.RemoteAddr().String() != before.String() {
			ls.one.Renew()
		}
		_ = conn.Close() // it was opened to see where it leads
	}
}
