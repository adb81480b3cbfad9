package builtin

// Finding the leader. One goroutine, maintain, does it for the whole driver while anybody needs a connection: it asks
// all members, one shortly after the other, serves the connection to the one that leads until that ends, and begins
// again. It ends with Close.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/bell"
)

// protocol is the version of the protocol that is spoken here: see Welcome in lock.proto.
const protocol = 2

// Looking for the leader.
const (
	// nextDial is when the next member is asked beside one that has not answered yet.
	nextDial = 100 * time.Millisecond
	// firstRetry is the pause between two rounds over all members. It doubles each time, up to a quarter of the
	// patience.
	firstRetry = 25 * time.Millisecond
	// While members answer that nobody leads, the pause stays at electionPause at most for usualElection: the next
	// grant of everybody waits for it. An election that takes longer is none, or one among members that are not enough.
	electionPause = 100 * time.Millisecond
	usualElection = 3 * time.Second
	// lasting is for how long a connection must have lasted to count as one that worked.
	lasting = time.Second
	// roundTime bounds one round over all members.
	roundTime = 2 * time.Second
	// electionTime, silentTime and refusedTime are how long a call waits for the members to elect a leader, for a
	// network that says nothing, and for members that refuse to talk: the last may be one that is just being started.
	// Those who wait for a lock wait on.
	electionTime = 10 * time.Second
	silentTime   = 5 * time.Second
	refusedTime  = 500 * time.Millisecond
)

// The bounds of patience.
const (
	leastPatience = 500 * time.Millisecond
	mostPatience  = 3 * time.Second
)

// patience is how long a server may be silent before another one is asked: a quarter of the shortest TTL that is in
// use, so that a session outlives a silent leader. The caller holds d.mu.
//
// With no session in use it is mostPatience. It is reckoned anew each time, since a session with a short TTL may come
// or go.
func (d *Driver) patience() time.Duration {
	shortest := 4 * mostPatience
	for _, s := range d.byID {
		shortest = min(shortest, s.ttl)
	}
	return max(shortest/4, leastPatience)
}

// maintain keeps a connection to the leader while somebody needs one. It pauses between rounds, and longer each time,
// so that a cluster which is down is not flooded; a connection that has lasted resets that.
//
//	a leader was found, and served for lasting       begin again at once
//	it was served for less                           pause; the next pause is twice as long
//	nobody leads, but members answer                 the same, but electionPause at most for usualElection
//	nobody answers                                   the same, up to a quarter of the patience
//
// Only calls that waited through a whole round are ended by one that failed (nobodyLeads). want starts it, as one of
// Driver.lines, with the first call; it ends with lineCtx and never before.
func (d *Driver) maintain() {
	retry := firstRetry
	var leaderless backend.Instant // since when rounds have failed; zero: the last one did not
	for d.awaitDemand() {
		began := d.clock.Now()
		c, err := d.findLeader()
		if c != nil {
			leaderless = 0
			began = d.clock.Now()
			d.serve(c)
			if d.clock.Now().Sub(began) > lasting {
				retry = firstRetry
				continue
			}
		} else {
			d.nobodyLeads(began, err)
			if leaderless == 0 {
				leaderless = began
			}
		}
		if kit.Sleep(d.lineCtx, spread(retry)) != nil { // not pause: connections outlive the beginning of Close
			return
		}
		d.mu.Lock()
		longest := d.patience() / 4
		d.mu.Unlock()
		if errors.Is(err, errElecting) && d.clock.Now().Sub(leaderless) < usualElection {
			longest = min(longest, electionPause)
		}
		retry = min(2*retry, longest)
	}
}

// awaitDemand returns true once a connection is needed, and false when the driver is closed.
//
// A driver whose last session has ended keeps its connection, and asks for another one only when it is needed again.
// wake may have rung for what was done since, which costs one look.
func (d *Driver) awaitDemand() bool {
	for {
		d.mu.Lock()
		wanted := len(d.calls) > 0 || len(d.byID) > 0 || len(d.watches) > 0
		d.mu.Unlock()
		if d.lineCtx.Err() != nil || wanted {
			return d.lineCtx.Err() == nil
		}
		select {
		case <-d.wake:
		case <-d.lineCtx.Done():
		}
	}
}

// errElecting: members answer, and none of them leads.
var errElecting = errors.New("the members have no leader now")

// nobodyLeads ends the calls that saw a whole round fail, which began at that instant, once they have waited for as
// long as such a failure may last in a healthy cluster. A call that is younger than the round may find the next one
// better.
//
//	a member answered, and none leads     electionTime
//	a member said nothing                 silentTime
//	all refused                           refusedTime
//
// Callers that wait in a queue are not ended here (patient), but by their contexts: giving up a place because of an
// outage would put them at the end of the queue after it.
func (d *Driver) nobodyLeads(began backend.Instant, err error) {
	if d.forming != nil && d.forming() {
		return
	}
	hope := refusedTime
	switch {
	case errors.Is(err, errElecting):
		hope = electionTime
	case errors.Is(err, errSilent):
		hope = silentTime
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, x := range d.inOrder() {
		if x.started > began || x.patient || d.clock.Now().Sub(x.started) < hope {
			continue
		}
		d.finish(x, nil, x.unanswered(err))
	}
}

// candidates returns the addresses to ask, the likeliest first: the last leader, or the one that a member named, then
// the addresses that the user gave, then those that members told. Each address comes once.
func (d *Driver) candidates() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []string
	for _, a := range slices.Concat([]string{d.leader}, d.addresses, d.members) {
		if a != "" && !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// greeting is what one member answered: conn, or err. findLeader, which receives it, returns conn or cancels it.
type greeting struct {
	conn *conn
	err  error
}

// findLeader asks all members, one after the other, the next one when the one before does not answer at once, and
// returns a connection to the one that leads.
//
// Asking all at the same moment would find it no sooner where the first one leads, which is the usual case, and would
// have every client connect to every member after each election. Asking each after the answer of the one before would
// spend the round on a member that is frozen. So the next one is asked after nextDial, or at once when one has
// answered.
//
// It returns when no greeting is under way: of two members that both say that they lead, the first to answer is taken,
// and the other is hung up. The errors of all members are joined, with errElecting if one answered that does not lead.
func (d *Driver) findLeader() (*conn, error) {
	round, cancel := context.WithTimeoutCause(d.lineCtx, roundTime, errSilent)
	defer cancel()
	pending := d.candidates()
	asked := slices.Clone(pending)
	greetings := make(chan greeting)
	running := 0
	var found *conn
	var errs []error
	electing := false
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
			d.lines.Go(func() { greetings <- d.greet(round, address) })
			next.Reset(nextDial)
		case g := <-greetings:
			running--
			switch {
			case g.err != nil:
				errs = append(errs, g.err)
			case !g.conn.welcome.Leader || found != nil:
				electing = true
				g.conn.cancel(errDeposed)
				hint := g.conn.welcome.LeaderAddress
				if found == nil && hint != "" && !slices.Contains(asked, hint) {
					asked, pending = append(asked, hint), slices.Insert(pending, 0, hint)
				}
			default:
				found = g.conn
				cancel() // the others need not answer any more
			}
			next.Reset(0)
		}
	}
	switch {
	case found != nil:
		return found, nil
	case electing:
		return nil, errors.Join(append(errs, errElecting)...)
	}
	return nil, errors.Join(errs...)
}

// greet connects to one member and says hello. round bounds that; the connection outlives it. Each greeting is received
// by findLeader, which waits for all that it has begun: none is left open unused.
//
// The context of the stream is not round's child, because the connection would end with the round. Instead the end of
// round cancels it until the greeting is over; unhook tells whether that came first, also in the moment between the
// two.
func (d *Driver) greet(round context.Context, address string) greeting {
	ctx, cancel := context.WithCancelCause(d.lineCtx)
	unhook := context.AfterFunc(round, func() { cancel(context.Cause(round)) })
	welcome, stream, err := d.hello(ctx, address)
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
		d: d, stream: stream, address: address, welcome: welcome,
		ctx: ctx, cancel: cancel, wake: bell.New(),
	}}
}

// hello opens a stream and has the member introduce itself. A member of another protocol, or of another cluster, is
// refused here, before anything is asked of it.
//
// Only a leader's word on the cluster counts (learn): a member that lags may not know of a change, and one that was
// never taken into the cluster has none.
func (d *Driver) hello(ctx context.Context, address string) (*lockpb.Welcome, Stream, error) {
	stream, err := d.dialer(ctx, address)
	if err != nil {
		return nil, nil, err
	}
	hello := &lockpb.Request{Number: 1, Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{Client: clientName}}}
	err = stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{hello}})
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	} // after io.EOF, Recv tells the reason
	m, err := stream.Recv()
	if err != nil {
		return nil, nil, err
	}
	var w *lockpb.Welcome
	if len(m.Replies) == 1 {
		w = m.Replies[0].GetWelcome()
	}
	switch {
	case w == nil:
		return nil, nil, errors.New("it does not answer as a Fencelock server")
	case w.Protocol != protocol:
		return nil, nil, &backend.ConfigError{
			Setting: "protocol", Value: fmt.Sprint(w.Protocol), Want: fmt.Sprint(protocol),
			Why: "client and server do not understand each other",
		}
	case w.Leader:
		err = d.learn(w)
	}
	return w, stream, err
}

// clientName is what the server's log calls this client.
const clientName = "fencelock-go"
