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

// errNoConnection: no connection stands, and nothing was sent.
var errNoConnection = errors.New("no connection to ZooKeeper")

// do runs f, which makes one request, and returns its result, or earlier with the end of ctx or of the session. The
// library knows no contexts; a request that is left alone ends with its answer or with the connection. Late, if not
// nil, is then called with the result.
//
// While no connection stands nothing is sent: the library would keep the request until one does. What it kept all the
// same, because the connection had just broken, is errNoConnection when it is left, and may be sent later.
func do[T any](ctx context.Context, s *session, late func(T, error), f func(*zk.Conn) (T, error)) (T, error) {
	var none T
	if err := s.await(ctx); err != nil {
		return none, err
	}
	if !s.enterCall() {
		return none, errSessionLost
	}
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
	if errors.Is(r.err, zk.ErrSessionExpired) || s.Ended() && errors.Is(r.err, zk.ErrConnectionClosed) {
		return r.value, errSessionLost
	}
	if errors.Is(r.err, zk.ErrConnectionClosed) && s.written.Load() == before {
		return r.value, fmt.Errorf("%w: %w", errNoConnection, r.err)
	}
	return r.value, r.err
}

// enterCall counts a request in, unless the session has ended.
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

// await returns when a connection stands.
func (s *session) await(ctx context.Context) error {
	s.mu.Lock()
	up, isUp := s.up, s.isUp
	s.mu.Unlock()
	if isUp {
		return nil
	}
	timer := time.NewTimer(attemptTime)
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

// unconnected is errNoConnection with another error, if there is one, and why no connection came to stand.
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

// libraryLog passes on what the library reports. What matters of it reaches the callers as errors.
type libraryLog struct{ to *slog.Logger }

func (l libraryLog) Printf(format string, args ...any) {
	l.to.Debug("fencelock/zookeeper: " + fmt.Sprintf(format, args...))
}

// sideBySide calls f for 0 to n-1, some of them at once, and returns when all have returned.
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

// requestsAtOnce bounds how many requests one call has under way.
const requestsAtOnce = 64

// children returns the queue as the server of the session has it. After a write, and after a proof, of the same session
// it is not older than that.
func (s *session) children(ctx context.Context, dir string) ([]entry, error) {
	nodes, err := do(ctx, s, nil, func(c *zk.Conn) ([]string, error) {
		nodes, _, err := c.Children(dir)
		return nodes, err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil
	}
	return entriesOf(dir, nodes), err
}

// found is a node as it was read.
type found struct {
	value
	stat zk.Stat
}

// get reads a node. The error is zk.ErrNoNode if there is none.
func (s *session) get(ctx context.Context, path string) (found, error) {
	return do(ctx, s, nil, func(c *zk.Conn) (found, error) {
		data, stat, err := c.Get(path)
		if err != nil {
			return found{}, err
		}
		return found{value: decode(data, stat.Czxid), stat: *stat}, nil
	})
}

// stat reads what the server keeps about a node, or nil if there is none.
func (s *session) stat(ctx context.Context, path string) (*zk.Stat, error) {
	return do(ctx, s, nil, func(c *zk.Conn) (*zk.Stat, error) {
		there, stat, err := c.Exists(path)
		if !there {
			stat = nil
		}
		return stat, err
	})
}

// watch reads a node and watches it: see session.event. It does not use exists, which would leave a watch where there
// is nothing.
func (s *session) watch(ctx context.Context, path string) (found, error) {
	return do(ctx, s, nil, func(c *zk.Conn) (found, error) {
		data, stat, _, err := c.GetW(path)
		if err != nil {
			return found{}, err
		}
		return found{value: decode(data, stat.Czxid), stat: *stat}, nil
	})
}

// multi carries out all of some operations, or none. The error is that of the one that failed.
func (s *session) multi(ctx context.Context, ops ...any) error {
	_, err := do(ctx, s, nil, func(c *zk.Conn) (struct{}, error) { return struct{}{}, transaction(c, ops...) })
	return err
}

// transaction is one request of session.multi.
func transaction(c *zk.Conn, ops ...any) error {
	results, err := c.Multi(ops...)
	for _, r := range results {
		if err == nil || errors.Is(err, zk.ErrAPIError) {
			err = r.Error
		}
	}
	return err
}

// remove deletes a node. Repetitions after a lost connection are no danger, since no two nodes have one name; what was
// gone at a repetition was deleted by an earlier one. The error is zk.ErrNoNode if there was none at the first.
func (s *session) remove(ctx context.Context, path string) error {
	for sent := false; ; sent = true {
		_, err := do(ctx, s, nil, func(c *zk.Conn) (struct{}, error) { return struct{}{}, c.Delete(path, -1) })
		switch {
		case sent && errors.Is(err, zk.ErrNoNode):
			return nil
		case sent && errors.Is(err, errNoConnection):
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
		case !errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, errNoConnection):
			return err
		}
		if err := kit.Sleep(ctx, kit.RetryPause(s.ttl)/2); err != nil {
			return err
		}
	}
}
