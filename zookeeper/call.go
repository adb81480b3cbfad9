// This file makes single requests to ZooKeeper. All of them go through do, which gives the client library's blocking
// calls a context, knows whether a request was sent, and never lets one wait for a connection. The other functions are
// the requests themselves, each with the meaning of a missing answer.
//
// Every request ends in one of four ways, and callers act on it: with the server's answer; with errNoConnection, and
// the request was not sent; with errSessionLost, after which the session has no nodes and none of its requests will be
// executed; or with zk.ErrConnectionClosed or the end of ctx, which leave the outcome open.

package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// errNoConnection: there is no connection, and the request was not sent.
var errNoConnection = errors.New("no connection to ZooKeeper")

// do runs f, which makes one request, and returns its result, or earlier with the end of ctx or of the session. The
// library knows no contexts; after its caller has left, a request continues in its goroutine and ends with its answer
// or with the connection, and late, if not nil, is then called with the result. The requests of a session are counted
// in calls, for which its end waits, and in busy, from which slotFor reads the load of the session.
//
// Without a connection, do sends no request: the library would keep it until it connects, and send it long after its
// caller has left. The library may still keep a request because the connection had just broken: that is
// errNoConnection when its caller leaves, since the request had not been written by then; it may be sent later.
// errNoConnection therefore means that the request had not been sent when the call ended, and not that it never will
// be.
//
// The goroutine hands its result over without a buffer, or sees that left is closed, which happens when the caller
// returns: exactly one of the two gets the result, and the goroutine lasts no longer than f and late do.
func do[T any](ctx context.Context, s *session, late func(T, error), f func(*zk.Conn) (T, error)) (T, error) {
	var none T
	if err := s.await(ctx); err != nil {
		return none, err
	}
	if !s.enterCall() {
		return none, errSessionLost
	}
	// before is read before the library gets the request: if written is the same at the end, the request was not sent.
	before := s.written.Load()
	type result struct {
		value T
		err   error
	}
	results, left := make(chan result), make(chan struct{})
	defer close(left)
	go func() {
		defer s.calls.Done()
		defer s.busy.Add(-1)
		v, err := f(s.conn)
		err = named(err)
		select {
		case results <- result{v, err}:
		case <-left:
			if late != nil {
				late(v, err)
			}
		}
	}()
	var r result
	select {
	case r = <-results:
	case <-ctx.Done():
		if s.written.Load() == before {
			return none, fmt.Errorf("%w: %w", errNoConnection, kit.Ended(ctx))
		}
		return none, kit.Ended(ctx)
	case <-s.Over():
		return none, errSessionLost
	}
	// The library returns "connection closed" or "closing" for all requests in progress when the session ends.
	if errors.Is(r.err, zk.ErrSessionExpired) || s.Ended() && isOneOf(r.err, zk.ErrConnectionClosed, zk.ErrClosing) {
		return r.value, errSessionLost
	}
	// No byte of the request was sent: the connection had broken before.
	if errors.Is(r.err, zk.ErrConnectionClosed) && s.written.Load() == before {
		return r.value, fmt.Errorf("%w: %w", errNoConnection, r.err)
	}
	return r.value, r.err
}

// enterCall counts a request in, unless the session has ended. calls must not grow once closeAfterEnd waits for it,
// after the end; hence the mutex, which end also takes.
func (s *session) enterCall() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Ended() {
		return false
	}
	s.calls.Add(1)
	s.busy.Add(1)
	return true
}

// await returns when there is a connection, immediately if there is one. It waits for callTime at most, so that a
// caller without a deadline gets the reason why there is no connection.
func (s *session) await(ctx context.Context) error {
	s.mu.Lock()
	up, isUp := s.up, s.isUp
	s.mu.Unlock()
	if isUp {
		return nil
	}
	timer := time.NewTimer(callTime)
	defer timer.Stop()
	select {
	case <-up:
		return nil
	case <-s.Over():
		return errSessionLost
	case <-ctx.Done():
		return s.unconnected(kit.Ended(ctx))
	case <-timer.C:
		return s.unconnected(nil)
	}
}

// unconnected returns errNoConnection with the reason why connecting failed, and with err, if there is one. An
// operator who mistypes a port should read "connection refused" and not only a timeout.
func (s *session) unconnected(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := errNoConnection
	for _, e := range []error{s.trouble, err} {
		if e != nil {
			all = fmt.Errorf("%w: %w", all, e)
		}
	}
	return all
}

// libraryLog passes on the library's messages, at level debug. Relevant messages reach the callers as errors; by
// default the library prints all of them to the program's standard error.
type libraryLog struct{ to *slog.Logger }

func (l libraryLog) Printf(format string, args ...any) {
	l.to.Debug("fencelock/zookeeper: " + fmt.Sprintf(format, args...))
}

// sideBySide calls f for 0 to n-1, some of them concurrently, and returns when all have returned. The library sends
// concurrent requests in one stream, so that n requests take about one round trip and not n.
func sideBySide(n int, f func(i int)) {
	var all sync.WaitGroup
	seats := make(chan struct{}, requestsAtOnce)
	for i := range n {
		seats <- struct{}{}
		all.Go(func() {
			defer func() { <-seats }()
			f(i)
		})
	}
	all.Wait()
}

// requestsAtOnce bounds the concurrent requests, and goroutines, of one call.
const requestsAtOnce = 64

// run is do for a request without a result.
func (s *session) run(ctx context.Context, f func(*zk.Conn) error) error {
	_, err := do(ctx, s, nil, func(c *zk.Conn) (struct{}, error) { return struct{}{}, f(c) })
	return err
}

// names returns the names of the nodes below a node, in no particular order. For a missing node the list is empty.
func (s *session) names(ctx context.Context, node string) ([]string, error) {
	names, err := do(ctx, s, nil, func(c *zk.Conn) ([]string, error) {
		names, _, err := c.Children(node)
		return names, err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil
	}
	return names, err
}

// children returns the queue on the session's server, which may lag behind the leader. After a write or a proof on the
// same session the queue is not older than that, because a server executes the requests of a session in order and
// answers a write once it has applied it. A name without a node has an empty queue.
func (s *session) children(ctx context.Context, dir string) ([]entry, error) {
	nodes, err := s.names(ctx, dir)
	return entriesOf(dir, nodes), err
}

// content is a node as it was read: its data, and its metadata on the server.
type content struct {
	data []byte
	stat zk.Stat
}

// read reads a node. The error is zk.ErrNoNode if it does not exist. With watch it sets a watch on the node, too,
// which fires once: see session.event. It does not use exists, which would leave a useless watch on the server for a
// missing node.
func (s *session) read(ctx context.Context, path string, watch bool) (content, error) {
	return do(ctx, s, nil, func(c *zk.Conn) (content, error) {
		get := c.Get
		if watch {
			get = func(path string) ([]byte, *zk.Stat, error) {
				data, stat, _, err := c.GetW(path)
				return data, stat, err
			}
		}
		data, stat, err := get(path)
		if err != nil {
			return content{}, err
		}
		return content{data, *stat}, nil
	})
}

// found is an entry's node as it was read.
type found struct {
	value
	stat zk.Stat
}

// get reads the node of an entry, as read does.
func (s *session) get(ctx context.Context, path string, watch bool) (found, error) {
	node, err := s.read(ctx, path, watch)
	if err != nil {
		return found{}, err
	}
	return found{decode(node.data, node.stat.Czxid), node.stat}, nil
}

// stat reads a node's metadata, or returns nil if the node does not exist.
func (s *session) stat(ctx context.Context, path string) (*zk.Stat, error) {
	return do(ctx, s, nil, func(c *zk.Conn) (*zk.Stat, error) {
		there, stat, err := c.Exists(path)
		if !there {
			stat = nil
		}
		return stat, err
	})
}

// multi executes operations in one transaction, all or nothing. The error is that of the failed operation.
func (s *session) multi(ctx context.Context, ops ...any) error {
	return s.run(ctx, func(c *zk.Conn) error { return transaction(c, ops...) })
}

// transaction is one request of session.multi. The library answers a failed transaction with ErrAPIError, or with the
// error of the last operation, and with one result for each; the useful error is the first in the results.
func transaction(c *zk.Conn, ops ...any) error {
	results, err := c.Multi(ops...)
	for _, r := range results {
		if err == nil || errors.Is(err, zk.ErrAPIError) {
			err = r.Error
		}
	}
	return err
}

// anyVersion is the version of a request to delete a node of any version.
const anyVersion = -1

// remove deletes a node, and repeats that until it has an answer or ctx ends. Repetitions after a lost connection are
// safe: no two nodes have one name, since it contains a request's random id and the server's number. If the node is
// missing at a repetition, an earlier try has deleted it, so that this is success. The error is zk.ErrNoNode if there
// was no node at the first try, and ErrUnknown if a try may have reached the server and the client did not reconnect.
//
// With a version other than anyVersion it deletes the node of this session only: a repeat of the request moves the
// node to another session, with another version (move), and the moved node counts as no node. A write of another
// client also changes the version; remove then reads the node.
func (s *session) remove(ctx context.Context, path string, version int32) error {
	for sent, n := false, 1; ; n++ {
		err := s.run(ctx, func(c *zk.Conn) error { return c.Delete(path, version) })
		if errors.Is(err, zk.ErrBadVersion) {
			var stat *zk.Stat
			if stat, err = s.stat(ctx, path); err == nil {
				if stat != nil && stat.EphemeralOwner == s.id {
					version = stat.Version
					continue
				}
				err = zk.ErrNoNode
			}
		}
		switch {
		case sent && errors.Is(err, zk.ErrNoNode):
			return nil
		case sent && errors.Is(err, errNoConnection):
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
		case throttled(err) && n < tries:
		case !errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, errNoConnection):
			return err
		default:
			sent = true
		}
		if err := kit.Sleep(ctx, kit.RetryPause(s.ttl)/2); err != nil {
			return err
		}
	}
}
