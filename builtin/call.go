package builtin

// Calls: one request to the service, until its answer. A call outlives connections, so its caller need not handle
// their ends: the driver repeats the call on the next connection, and its sequence makes a second execution harmless.
//
// There are two ways to call the service. ask sends one request, repeats it while the service cannot serve, and
// returns the answer; almost all callers use it. Attempts and leftovers start their calls themselves, because they may
// have to withdraw or overtake them while they wait.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/principal"
)

// call is one request to the service, until it is answered. It outlives connections.
//
//	start ─► route ─► queue of a connection ─► sent ─► receive ─► finish
//	           ▲                                │
//	           └──── the connection ended ◄─────┘   (once: finish, as unknown)
//
// finish ends it: with an answer; with an event that ends all calls of its kind (the end of its session, the loss of
// the cluster's past, a round over all members without a leader); when its caller gives up; or, if once is set, with
// its connection. Attempts and watches may remove theirs from Driver.calls instead; then is not called in that case,
// and no caller waits for done.
type call struct {
	// request has no number, session, sequence or acknowledgement; it never changes, because a connection may be
	// writing it.
	request *lockpb.Request
	// session is the session of the request; nil if it needs no session.
	session *session
	// sequence makes a repetition harmless; zero: the call has no sequence, and is harmless or sent once.
	sequence uint64
	// once: it is not repeated when its connection ends, because a second execution would have an effect (ForceRelease),
	// because the next connection begins with a new call (Attach), or because the caller has sent a newer request
	// meanwhile (overtake).
	once bool
	// looks: it only reads, or its effect is harmless, so a lost answer is not an unknown outcome.
	looks bool
	// waits: it waits for a lock. Once the request has been sent, the call survives a time without a leader, because it
	// may have a place in the queue.
	waits bool
	// attaches: it opens, attaches or closes the session, and may be sent on a connection to which the session is not
	// attached. The session's other calls wait for the attachment.
	attaches bool
	// then handles the answer or the error. It runs once, under Driver.mu, before done is closed, and must not block.
	// It may be nil.
	then func(*lockpb.Reply, error)

	// The following fields are protected by Driver.mu.

	number uint64
	// size is that of the request, in bytes.
	size int
	// started is the instant of the first start. Repetitions keep it and so share the time of one call: otherwise the
	// driver would ask a busy server indefinitely.
	started backend.Instant
	// on is the connection that has it in its queue, or on which it was sent; nil before that.
	on *conn
	// sent is the instant just before it was sent on that connection; zero: not yet. The proof of its answer counts from
	// here.
	sent backend.Instant
	// seen is the greatest known revision just before it was sent: an answer with a smaller one shows that the service
	// has lost changes.
	seen uint64
	// left is the instant just before it was first sent, on any connection: its effects are not earlier.
	left backend.Instant
	// doubt: it may have taken effect already, on an earlier connection or on a server that cannot confirm it.
	doubt bool
	// patient: it survives any time without a leader.
	patient bool

	// The following fields are valid once done is closed.

	done  chan struct{}
	reply *lockpb.Reply
	err   error
}

// mostBytes bounds one request. The server's bound is lower, and its error is more precise; this bound keeps one
// request from breaking the shared connection.
const mostBytes = 256 << 10

// start sends c, or lets it wait for a connection. start finishes a call that cannot be sent, and so calls c.then,
// before it returns. The caller holds d.mu.
//
// start does not block, so it may be called from then. A call must not be started twice: repetitions are copies,
// because the first one may still be in a connection's queue.
func (d *Driver) start(c *call) {
	d.last++
	c.number, c.started, c.done = d.last, cmp.Or(c.started, d.clock.Now()), make(chan struct{})
	c.on, c.sent = nil, 0
	d.calls[c.number] = c
	if c.request != keepAlive { // the most frequent request
		c.size = proto.Size(c.request)
	}
	err := d.past.lost
	switch {
	case c.size > mostBytes:
		err = kit.InvalidOption("request", fmt.Sprintf("of %d bytes", c.size),
			fmt.Sprintf("the server takes no more than %d", mostBytes))
		if c.request.GetAcquireAll() != nil {
			err = fmt.Errorf("%w: in one step: %v", backend.ErrUnsupported, err) // but one after the other
		}
	case err == nil && c.session != nil && c.session.Ended() && !c.attaches:
		err = errSessionEnded
	}
	if err != nil {
		d.finish(c, nil, err)
		return
	}
	d.route(c)
	if d.conn == nil {
		d.want()
	}
}

// route gives c to the connection, if there is one and the session of c is attached to it. The server refuses a
// session's requests on another connection, and a session's calls are queued in the order in which they were started.
// The caller holds d.mu.
//
// Other calls stay in d.calls: install routes them to the next connection, and attached routes calls that waited for
// their session.
func (d *Driver) route(c *call) {
	if d.conn == nil || c.session != nil && !c.attaches && c.session.on != d.conn {
		return
	}
	c.on, c.sent = d.conn, 0
	d.conn.push(c)
}

// want makes maintain connect, and starts it for the first call: an unused driver has no goroutines. The caller holds
// d.mu.
//
// After Close it does not start maintain, but a running maintain continues, so that sessions can be ended on its
// connection.
func (d *Driver) want() {
	if !d.running && d.ctx.Err() == nil {
		d.running = true
		d.lines.Go(d.maintain)
	}
	d.wake.Notify()
}

// finish ends c with a reply or an error, once: c is in d.calls until then. then runs under d.mu, in the order in
// which answers come, before any caller that waits for c continues. The caller holds d.mu.
//
// An answer to a finished call has no effect. The service may still have executed the call; the caller that abandoned
// it undoes that: see leave.go.
func (d *Driver) finish(c *call, reply *lockpb.Reply, err error) {
	if d.calls[c.number] != c {
		return
	}
	delete(d.calls, c.number)
	c.reply, c.err = reply, err
	if c.then != nil {
		c.then(reply, err)
	}
	close(c.done)
}

// unanswered returns the error of a call that ends without an answer: the error shows whether the call may have taken
// effect. The caller holds d.mu.
//
//	it was sent, and changes something    backend.ErrUnknown
//	a setting, or the token, is wrong     the error as it is (backend.ErrMisconfigured, backend.ErrDenied)
//	otherwise                             backend.ErrUnavailable: no change was made
func (c *call) unanswered(err error) error {
	doubt := (c.doubt || c.sent != 0) && !c.looks
	if !doubt && (errors.Is(err, backend.ErrMisconfigured) || errors.Is(err, errToken)) {
		return err
	}
	return fmt.Errorf("%w: %w", noAnswer(doubt), err)
}

// noAnswer returns the class of a call without an answer. doubt: it may have taken effect.
func noAnswer(doubt bool) error {
	if doubt {
		return backend.ErrUnknown
	}
	return backend.ErrUnavailable
}

// await waits for the answer. When ctx ends first, c is abandoned, and a later answer is ignored. The error then shows
// whether c may have taken effect, except after Close: then it is ErrClosed alone.
//
// await also returns when d.ctx ends, so Close does not wait for unanswered calls. It returns an answer that has come
// even if ctx has ended by then: c.then has handled the answer, and the caller must get the same result.
func (d *Driver) await(ctx context.Context, c *call) (*lockpb.Reply, error) {
	var err error
	select {
	case <-c.done:
		return c.reply, c.err
	case <-ctx.Done():
		err = ctx.Err()
	case <-d.ctx.Done():
		err = backend.ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !errors.Is(err, backend.ErrClosed) {
		err = c.unanswered(err)
	}
	d.finish(c, nil, err) // no effect if the answer has come meanwhile
	return c.reply, c.err
}

// busyPause is the mean pause before a server that could not serve is asked again; spread makes it random. busyTime
// bounds all repetitions together: it exceeds the longest election while most members work.
const (
	busyPause = 50 * time.Millisecond
	busyTime  = 10 * time.Second
)

// ask sends a request and returns its answer. It repeats the request with the same sequence if the answer was lost,
// unless once is set, and if the server could not serve. It returns an error of the server as replyError converts it.
//
// The server's answers and their results:
//
//	an answer        it is returned
//	UNAVAILABLE      asked again until busyTime is over; then backend.ErrUnavailable
//	UNKNOWN          the same, but then backend.ErrUnknown; with once, immediately
//	other errors     returned, as replyError says
//
// Each round is a new call with the same sequence, so the server executes only one of them. doubt stays set in all
// later rounds: a later UNAVAILABLE does not undo an UNKNOWN.
func (d *Driver) ask(ctx context.Context, c call) (*lockpb.Reply, error) {
	began := d.clock.Now()
	for {
		each := c
		d.mu.Lock()
		d.start(&each)
		d.mu.Unlock()
		reply, err := d.await(ctx, &each)
		if err != nil {
			return nil, err
		}
		wire := reply.GetError()
		switch {
		case wire == nil:
			return reply, nil
		case !isBusy(wire):
			return nil, replyError(wire)
		}
		c.doubt = c.doubt || wire.Code == lockpb.Code_CODE_UNKNOWN
		err = fmt.Errorf("%w: %s", noAnswer(c.doubt), wire.Message)
		if c.doubt && c.once || d.clock.Now().Sub(began) >= busyTime {
			return nil, err
		}
		if end := d.pause(ctx, busyPause); end != nil {
			return nil, fmt.Errorf("%w: %w", err, end)
		}
	}
}

// onBehalf adds the principal to a request, if the caller is a gateway, and returns it.
func onBehalf(ctx context.Context, r *lockpb.Request) *lockpb.Request {
	r.OnBehalfOf = string(principal.CallsFor(ctx))
	return r
}

// isBusy reports whether the server could not serve, or does not know whether it did: the request may be repeated.
func isBusy(e *lockpb.Error) bool {
	return e != nil && (e.Code == lockpb.Code_CODE_UNAVAILABLE || e.Code == lockpb.Code_CODE_UNKNOWN)
}

// later runs f under d.mu after busyPause, unless the driver is closed before. It is work of the gate. f must not
// block, and has to check whether it is still needed.
func (d *Driver) later(f func()) {
	d.background(func() {
		if d.pause(d.ctx, busyPause) != nil {
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		f()
	})
}

// pause waits for a random time around t. It is cut short by ctx, with its error, and by Close, with backend.ErrClosed.
func (d *Driver) pause(ctx context.Context, t time.Duration) error {
	bound, free := d.gate.Bind(ctx)
	defer free()
	return kit.Sleep(bound, spread(t))
}

// spread returns a random time between t/2 and 3t/2: clients that lost a leader at the same moment must not return at
// the same moment.
func spread(t time.Duration) time.Duration { return t/2 + rand.N(t) }
