package builtin

// Calls: one request to the service on its way to its answer. A call outlives connections, so that its caller need not
// know of them: it is sent again on the next one, with the number that makes it harmless to carry it out twice.
//
// Two things call the service. ask sends one request, repeats it while the service cannot serve, and returns the
// answer; almost everything uses it. Attempts and leftovers start their calls themselves, because they may have to be
// taken back or overtaken while they wait.

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
)

// call is one request to the service, until it is answered. It outlives connections.
//
//	start ─► route ─► queue of a connection ─► sent ─► receive ─► finish
//	           ▲                                │
//	           └──── the connection ended ◄─────┘   (once: finish, as unknown)
//
// It ends by finish: with an answer; with what ends all calls of its kind (its session, the cluster's past, a round
// over all members that found no leader); when its caller gives up; or, if once is set, with its connection. Attempts
// and watches may take theirs out of Driver.calls instead; then is not called in that case, and nobody waits for done.
type call struct {
	// request has no number, session, sequence or acknowledgement; it never changes, because a connection may be
	// writing it.
	request *lockpb.Request
	// session is the one that it speaks for; nil: it needs none.
	session *session
	// sequence makes it harmless when it is sent again; zero: it has none, and is harmless by itself or sent once.
	sequence uint64
	// once: it is not sent again when its connection ends, because that would do it twice (ForceRelease), because the
	// next connection begins with one of its own (Attach), or because something newer was asked for meanwhile
	// (overtake).
	once bool
	// looks: whether it was carried out makes no difference to anybody, so its outcome is never unknown.
	looks bool
	// waits: for a lock. Once the request has left, it outlasts the time in which nobody leads, because it may have a
	// place in the queue.
	waits bool
	// attaches: it opens, attaches or closes the session, and may be sent on a connection to which the session is not
	// attached. The others of the session wait for the attachment.
	attaches bool
	// then takes the answer or the error. It runs once, under Driver.mu, before done is closed, and must not block. It
	// may be nil.
	then func(*lockpb.Reply, error)

	// The following fields are protected by Driver.mu.

	number uint64
	// size of the request, in bytes.
	size int
	// started is when it was started first: repetitions keep it, and so share the time that one call may take, or a
	// server that is busy would be asked for ever.
	started backend.Instant
	// on is the connection that has it in its queue, or on which it was sent; nil: it waits for one.
	on *conn
	// sent is just before it was sent on that connection; zero: not yet. What the answer proves counts from here.
	sent backend.Instant
	// seen is the greatest revision that was known just before it was sent: an answer with a smaller one shows that the
	// service has forgotten something.
	seen uint64
	// left is just before it was sent for the first time, on whichever connection: nothing that it does happened
	// earlier.
	left backend.Instant
	// doubt: it may have been carried out already, on an earlier connection or by a server that could not tell.
	doubt bool
	// patient: it outlasts the time in which nobody leads, however long that is.
	patient bool

	// The following fields are valid once done is closed.

	done  chan struct{}
	reply *lockpb.Reply
	err   error
}

// mostBytes bounds one request. What the server takes is less, and its own answer is better; this keeps one request
// from breaking the connection that all share.
const mostBytes = 256 << 10

// start sends c, or lets it wait for a connection. What can never be sent is finished at once: c.then is called before
// start returns then. The caller holds d.mu.
//
// start does not wait for anything, so it may be called from then. A call must not be started twice: repetitions are
// copies, because the first one may still be in a connection's queue.
func (d *Driver) start(c *call) {
	d.last++
	c.number, c.started, c.done = d.last, cmp.Or(c.started, d.clock.Now()), make(chan struct{})
	c.on, c.sent = nil, 0
	d.calls[c.number] = c
	c.size = proto.Size(c.request)
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

// route gives c to the connection, if there is one and the session of c is attached to it. The server refuses what a
// session says on another connection, and the order in which a session's calls were started is that in which they are
// queued. The caller holds d.mu.
//
// What cannot be routed stays in d.calls: install routes it to the next connection, and attached what waited for its
// session.
func (d *Driver) route(c *call) {
	if d.conn == nil || c.session != nil && !c.attaches && c.session.on != d.conn {
		return
	}
	c.on, c.sent = d.conn, 0
	d.conn.push(c)
}

// want has maintain connect, and starts it for the first call: a driver that nobody has used runs nothing. The caller
// holds d.mu.
//
// After Close nothing is started, but what runs goes on, so that sessions can be ended on it.
func (d *Driver) want() {
	if !d.running && d.ctx.Err() == nil {
		d.running = true
		d.lines.Go(d.maintain)
	}
	d.wake.Ring()
}

// finish ends c with a reply or an error, once: c is in d.calls until then. then runs under d.mu, in the order in which
// answers come, before anybody who waits for c goes on. The caller holds d.mu.
//
// An answer that meets a call that is finished changes nothing. The service may have carried it out all the same;
// undoing that is the concern of the caller that gave it up: see leave.go.
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

// unanswered is the error of a call that ends without an answer: it says whether it may have been carried out. The
// caller holds d.mu.
//
//	it was sent, and changes something    backend.ErrUnknown
//	a setting is wrong                    the error as it is (backend.ErrMisconfigured)
//	otherwise                             backend.ErrUnavailable: nothing was done
func (c *call) unanswered(err error) error {
	doubt := (c.doubt || c.sent != 0) && !c.looks
	if !doubt && errors.Is(err, backend.ErrMisconfigured) {
		return err
	}
	return fmt.Errorf("%w: %w", noAnswer(doubt), err)
}

// noAnswer is the class of a call without an answer. doubt: it may have been carried out.
func noAnswer(doubt bool) error {
	if doubt {
		return backend.ErrUnknown
	}
	return backend.ErrUnavailable
}

// await waits for the answer. When ctx ends first, c is given up: an answer that comes later meets nobody. The error
// then says whether c may have been carried out, except after Close, whose callers are told just that.
//
// It looks at the end of d.ctx too, so no call is left when Close waits for the gate. An answer that has come is
// returned, also where ctx has ended by then: then has had it, and the caller must not be told otherwise.
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
	d.finish(c, nil, err) // does nothing if the answer has come meanwhile
	return c.reply, c.err
}

// A server that cannot serve right now is asked again: busyPause between two requests, halved to one and a half times
// by chance, and busyTime for all of them together, which is as long as an election takes at most where most members
// work.
const (
	busyPause = 50 * time.Millisecond
	busyTime  = 10 * time.Second
)

// ask sends a request and returns its answer. It sends it again where the answer was lost, with the same sequence,
// unless once is set, and where the server could not serve. An answer that is an error comes as such: see replyError.
//
// What the server's answers come to:
//
//	an answer        it is returned
//	UNAVAILABLE      asked again until busyTime is over; then backend.ErrUnavailable
//	UNKNOWN          the same, but then backend.ErrUnknown; with once, at once
//	other errors     returned, as replyError says
//
// Each round is a call of its own with the same sequence, so the server carries out one of them. doubt stays with all
// later rounds: an UNKNOWN is not undone by an UNAVAILABLE after it.
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

// isBusy reports whether the server could not serve, or could not tell whether it did: the request may be sent again.
func isBusy(e *lockpb.Error) bool {
	return e != nil && (e.Code == lockpb.Code_CODE_UNAVAILABLE || e.Code == lockpb.Code_CODE_UNKNOWN)
}

// later runs f under d.mu after busyPause, unless the driver is closed before. It is work of the gate. f must not
// block, and has to look whether what it was meant for still stands.
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

// spread returns a random time around t, from a half to one and a half of it: clients that lost a leader at one moment
// must not come back at one moment.
func spread(t time.Duration) time.Duration { return t/2 + rand.N(t) }
