package builtin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/notify"
)

// protocol is the version of the protocol that this driver speaks: see Welcome in lock.proto.
const protocol = 2

const (
	// nextDial is the pause before the next member is asked in parallel to an unresponsive one.
	nextDial = 100 * time.Millisecond
	// firstRetry is the pause between two rounds over all members. It doubles each time, up to a quarter of the
	// patience, and while members report no leader to electionPause: the next grant of every client waits for it. After
	// usualElection there probably is no election, or there are too few members for one.
	firstRetry    = 25 * time.Millisecond
	electionPause = 100 * time.Millisecond
	usualElection = 3 * time.Second
	// lasting is the minimum duration of a connection that resets the pause, and roundTime the maximum of a round.
	lasting   = time.Second
	roundTime = 2 * time.Second
	// electionTime, silentTime and refusedTime bound the wait for an election, for a network without responses, and for
	// members that refuse connections, which may be starting.
	electionTime = 10 * time.Second
	silentTime   = 5 * time.Second
	refusedTime  = 500 * time.Millisecond
	// The bounds of the patience method.
	minPatience = 500 * time.Millisecond
	maxPatience = 3 * time.Second
)

// patience returns the maximum time without a response before another server is asked: a quarter of the shortest TTL
// in use, so that a session outlives a leader that does not answer. The caller holds s.mu.
func (s *service) patience() time.Duration {
	shortest := 4 * maxPatience
	for _, own := range s.sessions {
		shortest = min(shortest, own.ttl)
	}
	return max(shortest/4, minPatience)
}

// maintain keeps a connection to the leader while a step needs one. It pauses between rounds, and longer each time, so
// that a cluster that is down is not flooded. The first step starts it, and it ends only with lineCtx.
func (s *service) maintain() {
	retry := firstRetry
	var leaderless backend.Instant // the beginning of the first of the failed rounds; zero: the last round succeeded
	for {
		idle := s.clock.Now()
		if !s.awaitDemand() {
			return
		}
		began := s.clock.Now()
		if began.Sub(idle) > roundTime { // longer than between two tries of a step
			leaderless, retry = 0, firstRetry
		}
		c, err := s.findLeader()
		if c != nil {
			leaderless = 0
			began = s.clock.Now()
			s.serve(c)
			if s.clock.Now().Sub(began) > lasting {
				retry = firstRetry
				continue
			}
		} else {
			if leaderless == 0 {
				leaderless = began
			}
			s.nobodyLeads(began, s.clock.Now().Sub(leaderless), err)
		}
		if !s.rest(retry) {
			return
		}
		s.mu.Lock()
		longest := s.patience() / 4
		s.mu.Unlock()
		if errors.Is(err, errElecting) && s.clock.Now().Sub(leaderless) < usualElection {
			longest = min(longest, electionPause)
		}
		retry = min(2*retry, longest)
	}
}

// rest pauses between two rounds. A step that begins to wait shortens the pause. It returns false when the driver is
// closed.
func (s *service) rest(retry time.Duration) bool {
	pause := time.NewTimer(spread(retry))
	defer pause.Stop()
	if kit.Sleep(s.lineCtx, retry/4) != nil {
		return false
	}
	select {
	case <-pause.C:
	case <-s.wake:
	case <-s.lineCtx.Done():
	}
	return true
}

// awaitDemand returns true once a step or a session needs a connection, and false when the driver is closed.
func (s *service) awaitDemand() bool {
	for {
		s.mu.Lock()
		wanted := s.waiting > 0 || len(s.sessions) > 0
		s.mu.Unlock()
		if s.lineCtx.Err() != nil || wanted {
			return s.lineCtx.Err() == nil
		}
		select {
		case <-s.wake:
		case <-s.lineCtx.Done():
		}
	}
}

// errElecting: members answer, but no member is the leader.
var errElecting = errors.New("the members have no leader at present")

// nobodyLeads handles the failure of a round that began at the instant began, and the present search so long ago. It
// ends the wait of steps that waited through all of the round, once the search lasts as long as such a failure may last
// in a healthy cluster; the engine repeats the steps of waiters:
//
//	a member answered, and nobody leads   electionTime
//	a member did not answer               silentTime
//	all refused                           refusedTime
//	one serves nobody for longer (closed) not at all
//
// An invalid token or setting is no outage, and ends waiters, too: but a member with an older file of principals may
// refuse a token that the next leader accepts.
func (s *service) nobodyLeads(began backend.Instant, search time.Duration, err error) {
	if s.forming != nil && s.forming() {
		return
	}
	hope := refusedTime
	var closed *ClosedError
	passing := true
	switch {
	case errors.As(err, &closed) && time.Until(closed.Until) > electionTime:
		hope = 0
	case errors.Is(err, errElecting), closed != nil:
		hope = electionTime
	case errors.Is(err, errSilent):
		hope = silentTime
	default:
		passing = !errors.Is(err, errToken) && !errors.Is(err, backend.ErrMisconfigured)
	}
	if search < hope {
		return
	}
	switch {
	case passing && errors.Is(err, errToken):
		err = fmt.Errorf("%w: %v", backend.ErrUnavailable, err)
	case passing:
		err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outage, s.outageAt = err, began
	s.signal()
}

// candidates returns the addresses to ask, without duplicates: the last leader or the leader that a member named, then
// the user's addresses, then the addresses that members reported.
func (s *service) candidates() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, a := range slices.Concat([]string{s.leader}, s.addresses, s.members) {
		if a != "" && !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// greeting is one member's answer: conn or err.
type greeting struct {
	conn *conn
	err  error
}

// findLeader asks the members in turn, each after nextDial or an answer of an earlier one, and returns a connection to
// the leader. Usually the first member leads, so concurrent requests would gain nothing; strictly sequential ones would
// spend the round on a frozen member. It returns when no greeting is in progress. It joins the errors of all members,
// with errElecting if a member answered that does not lead; a cluster that serves no clients yet is a *ClosedError alone.
func (s *service) findLeader() (*conn, error) {
	round, cancel := context.WithTimeoutCause(s.lineCtx, roundTime, errSilent)
	defer cancel()
	pending := s.candidates()
	asked := slices.Clone(pending)
	greetings := make(chan greeting)
	running := 0
	var found *conn
	var errs []error
	electing := false
	var closed error
	next := time.NewTimer(0)
	defer next.Stop()
	for running > 0 || len(pending) > 0 && found == nil {
		select {
		case <-next.C:
			if len(pending) == 0 || found != nil || round.Err() != nil {
				pending = nil
				break
			}
			address := pending[0]
			pending = pending[1:]
			running++
			s.lines.Go(func() { greetings <- s.greet(round, address) })
			next.Reset(nextDial)
		case g := <-greetings:
			running--
			switch {
			case g.err != nil:
				errs = append(errs, g.err)
			case !g.conn.welcome.Leader || found != nil:
				electing = true
				closed = cmp.Or(closed, closedError(g.conn.welcome.ClosedNanos))
				g.conn.cancel(errDeposed)
				hint := g.conn.welcome.LeaderAddress
				if found == nil && hint != "" && !slices.Contains(asked, hint) {
					asked, pending = append(asked, hint), slices.Insert(pending, 0, hint)
				}
			default:
				found = g.conn
				cancel() // the other members need not answer
			}
			next.Reset(0)
		}
	}
	switch {
	case found != nil:
		return found, nil
	case closed != nil:
		return nil, closed
	case electing:
		return nil, errors.Join(append(errs, errElecting)...)
	}
	return nil, errors.Join(errs...)
}

// greet connects to one member and calls hello, bounded by round. The connection outlives round, so the context of the
// stream is not its child: the end of round cancels it during the greeting, and unhook returns false if that has happened.
func (s *service) greet(round context.Context, address string) greeting {
	ctx, cancel := context.WithCancelCause(s.lineCtx)
	unhook := context.AfterFunc(round, func() { cancel(context.Cause(round)) })
	welcome, stream, err := s.hello(ctx, address)
	if !unhook() && err == nil {
		err = context.Cause(round)
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		cancel(err)
		return greeting{err: fmt.Errorf("%s: %w", address, err)}
	}
	return greeting{conn: &conn{
		s: s, stream: stream, address: address, welcome: welcome,
		ctx: ctx, cancel: cancel, wake: notify.New(), gone: make(chan struct{}), last: 1,
		calls: map[uint64]*call{}, kept: map[uint64][]kept{}, watches: map[uint64]*feed{},
	}}
}

// hello opens a stream and asks the member for its welcome. It refuses a server of another protocol, and a leader of
// another cluster. Only a leader's report on the cluster counts: other members may lack changes.
func (s *service) hello(ctx context.Context, address string) (*lockpb.Welcome, Stream, error) {
	stream, err := s.dialer(ctx, address)
	if err != nil {
		return nil, nil, deniedToken(err)
	}
	hello := &lockpb.Request{Number: 1, Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{Client: clientName}}}
	err = stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{hello}})
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	} // after io.EOF, Recv returns the reason
	m, err := stream.Recv()
	if err != nil {
		return nil, nil, deniedToken(err)
	}
	var w *lockpb.Welcome
	if len(m.Replies) == 1 {
		w = m.Replies[0].GetWelcome()
	}
	switch {
	case w == nil:
		return nil, nil, errors.New("it is not a Fencelock server")
	case w.Protocol != protocol:
		return nil, nil, &backend.ConfigError{
			Setting: "protocol", Value: fmt.Sprint(w.Protocol), Want: fmt.Sprint(protocol),
			Why: "client and server do not understand each other",
		}
	case w.Leader:
		err = s.learn(w)
	}
	return w, stream, err
}

// clientName is the name of this client in the server's log.
const clientName = "fencelock-go"
