package builtin

// This file is the binding of backend/engine: the parts that all exchanges use. Where to read on:
//
//	enter.go    Enter, EnterSet and Check; leave.go: Leave, Expire and Extend
//	session.go  sessions, their attachment to a connection, and what stands on them
//	conn.go     the connection; leader.go: the search for the leader; dial.go: the transport
//	inspect.go  Look, Names, Force; watch.go: Changes; history.go: whether the service has lost changes
//	driver.go   options and construction; open.go: URLs
//	admin.go    for operators, with backup.go and stale.go; ask.go: which member answers an operator
//
// A request has no sequence. A connection delivers requests in their order, and a session speaks through one
// connection: what an earlier connection delivers late has no effect. So a Leave comes after each Enter of its request.
//
// service.mu protects all state. It is never held while a message is sent or awaited, nor while the engine is notified.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/notify"
	"github.com/fencelock/fencelock/internal/principal"
)

// service is the binding.
type service struct {
	dialer    dialer
	addresses []string
	clock     backend.Clock
	log       *slog.Logger
	unfit     error       // in the constructor's arguments
	under     []string    // Options.Under
	forming   func() bool // no member can lead yet, so that calls wait; nil: never
	notify    func(engine.Push)
	described atomic.Pointer[backend.Description] // learn replaces it

	lineCtx context.Context // of connections
	hangUp  context.CancelFunc
	lines   sync.WaitGroup // goroutines that end with lineCtx: maintain, and those of connections
	wake    notify.Signal  // rings when a connection is wanted

	mu       sync.Mutex          // protects the following fields, and those of sessions and connections
	running  bool                // maintain runs
	conn     *conn               // to the leader, or nil
	leader   string              // the address to ask first for the leader; empty if unknown
	members  []string            // addresses that servers reported
	changed  chan struct{}       // closed at the next change of what start compares
	outage   error               // of the last round without a leader, if the wait for one is over
	outageAt backend.Instant     // the beginning of that round
	waiting  int                 // steps and watches that want a connection
	sessions map[string]*session // by id
	entries  map[key]*entry
	moving   map[key]int   // moves in progress
	pushes   []engine.Push // see unlock
	past     past
}

// Unfit is engine.Checked's.
func (s *service) Unfit() error { return s.unfit }

// Prompt is engine.Prompt's.
func (s *service) Prompt() {}

// OneEntry is engine.OneEntry's: a request has one hold or place, whichever of its attempts asks.
func (s *service) OneEntry() {}

// Patience is engine.Patient's: nobodyLeads and conn.watch bound the exchanges.
func (s *service) Patience() time.Duration { return time.Hour }

// Listen is engine.Pushes's.
func (s *service) Listen(notify func(engine.Push)) { s.notify = notify }

// Describe is engine.Service's. Before the first connection it has wide bounds of the TTL, no token space, and the
// exclusion of one durable server. It may change with each connection, but a known token space does not.
func (s *service) Describe() backend.Description { return *s.described.Load() }

// fences reports whether the server's tokens fence, as far as is known: a server that is not durable restarts them.
func (s *service) fences() bool { return s.described.Load().Capabilities.Has(backend.CapFencing) }

// Classify is engine.Service's. Errors of the protocol have classes of the contract.
func (s *service) Classify(err error) engine.Class {
	if errors.Is(err, errNotSent) || errors.Is(err, errConflict) {
		return engine.NotDone
	}
	return engine.Unknown
}

// Close is engine.Service's.
func (s *service) Close(context.Context) error {
	s.hangUp()
	s.lines.Wait()
	return nil
}

// call is one request on one connection.
type call struct {
	request *lockpb.Request            // without number and session; it never changes: a connection may be writing it
	own     *session                   // of the request, or nil
	note    func(*call, *lockpb.Reply) // handles the answer under service.mu, in the order of the stream; or nil
	free    bool                       // the request needs no attachment of its session
	once    bool                       // it is not sent again after it may have taken effect, or was refused for now
	looks   bool                       // it changes nothing, so that a lost answer is not an unknown outcome
	doubt   bool                       // an earlier sending may have taken effect
	answer  chan *lockpb.Reply         // has room for one

	// The following fields are protected by service.mu.

	on        *conn
	number    uint64
	size      int             // 0 if isSmall
	sent      backend.Instant // just before it was sent; 0: not yet
	seen      uint64          // the greatest known revision then
	withdrawn bool            // it must not be sent any more
}

// maxBytes bounds one request. The server's bound is lower, and its error is more precise; this bound keeps one
// request from breaking the shared connection.
const maxBytes = 256 << 10

// errNotSent: the connection ended before the request was sent.
var errNotSent = errors.New("it was not sent")

// start queues x on the connection to the leader, for which it waits. Otherwise nothing was sent. An outage that began
// before the call did does not count.
func (s *service) start(ctx context.Context, x *call, began backend.Instant) error {
	if !isSmall(x.request) {
		if x.size = proto.Size(x.request); x.size > maxBytes {
			return tooLarge(x)
		}
	}
	for {
		s.mu.Lock()
		err, changed := s.past.lost, s.changed
		switch {
		case err != nil:
		case x.own != nil && x.own.ended && !x.free:
			err = engine.ErrNoSession
		case s.conn != nil && (x.own == nil || x.free || x.own.on == s.conn):
			s.conn.push(x)
			s.mu.Unlock()
			return nil
		case s.outage != nil && s.outageAt >= began:
			err = s.outage
		default:
			s.waiting++
			s.want()
		}
		s.mu.Unlock()
		if err != nil {
			return err
		}
		_, how := engine.Await[struct{}](ctx, nil, changed)
		s.mu.Lock()
		s.waiting--
		s.mu.Unlock()
		if how == engine.Ended {
			return ended(ctx)
		}
	}
}

// ended is the error of a step that returns before it has sent a request.
func ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%w: nothing was sent", backend.ErrUnavailable)
}

// await waits for the answer.
func (s *service) await(ctx context.Context, x *call) (*lockpb.Reply, error) {
	r, how := engine.Await(ctx, x.answer, x.on.gone)
	if how == engine.Answered {
		return r, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch x.withdrawn = true; {
	case x.sent.IsZero() && how == engine.Ended:
		return nil, ended(ctx)
	case x.sent.IsZero():
		return nil, errNotSent
	case how == engine.Ended:
		return nil, &engine.Unanswered{}
	}
	return nil, &engine.Unanswered{Err: context.Cause(x.on.ctx)}
}

// busyPause is the mean pause before a server that could not serve is asked again. busyTime bounds all repetitions
// together: it exceeds the longest election while most members work.
const (
	busyPause = 50 * time.Millisecond
	busyTime  = 10 * time.Second
)

// ask sends a request and returns its answer. While the server does not lead, or the connection ends, the request is
// sent on the next one, and while the server cannot serve, after a pause: the engine does not repeat a Leave.
func (s *service) ask(ctx context.Context, x *call) (*lockpb.Reply, error) {
	for began, each := s.clock.Now(), x; ; each = x.repeated() {
		each.answer = make(chan *lockpb.Reply, 1)
		err := s.start(ctx, each, began)
		var r *lockpb.Reply
		if err == nil {
			r, err = s.await(ctx, each)
		}
		e := r.GetError()
		switch {
		case err == nil && e == nil:
			return r, nil
		case errors.Is(err, errNotSent):
			continue
		case err != nil:
			late := unansweredIn(err)
			x.doubt = x.doubt || late != nil
			if late == nil || late.Err == nil || x.once {
				return nil, x.unanswered(err)
			}
			continue
		case e.Code == lockpb.Code_CODE_NOT_LEADER:
			continue
		case e.Code == lockpb.Code_CODE_CONFLICT && (e.Field == "session" || x.request == keepAlive):
			s.mu.Lock()
			s.cut(each.on, errPushLost) // the server does not know where to push
			s.mu.Unlock()
			continue
		}
		x.doubt = x.doubt || e.Code == lockpb.Code_CODE_UNKNOWN
		if x.once || !isBusy(e) || s.clock.Now().Sub(began) >= busyTime {
			if err = replyError(e); isBusy(e) {
				err = x.unanswered(err)
			}
			return nil, err
		}
		if _, how := engine.Await(ctx, time.After(spread(busyPause)), nil); how == engine.Ended {
			return nil, x.unanswered(ended(ctx))
		}
	}
}

// repeated returns x as it was before it was first sent.
func (x *call) repeated() *call {
	return &call{request: x.request, own: x.own, note: x.note, free: x.free, once: x.once, looks: x.looks}
}

// unansweredIn returns the *engine.Unanswered in an error, or nil.
func unansweredIn(err error) (late *engine.Unanswered) {
	errors.As(err, &late)
	return late
}

// unanswered returns the error of a call that ends with err: if the request may have taken effect, that is unknown.
func (x *call) unanswered(err error) error {
	if !x.doubt || x.looks || errors.Is(err, backend.ErrHistoryLost) || errors.Is(err, engine.ErrNoSession) {
		return err
	}
	if unansweredIn(err) != nil {
		return err
	}
	if kit.IsContext(err) {
		return &engine.Unanswered{}
	}
	return fmt.Errorf("%w: %v", backend.ErrUnknown, err)
}

// want makes maintain connect, and starts it for the first call: an unused driver has no goroutines. The caller holds
// s.mu.
func (s *service) want() {
	if !s.running && s.lineCtx.Err() == nil {
		s.running = true
		s.lines.Go(s.maintain)
	}
	s.wake.Notify()
}

// signal wakes the steps that wait in start. The caller holds s.mu.
func (s *service) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// push notifies the engine, when s.mu is unlocked. The caller holds s.mu, and unlocks it with unlock.
func (s *service) push(p engine.Push) { s.pushes = append(s.pushes, p) }

// unlock unlocks s.mu and then notifies the engine, in order: it calls functions of holders, which may call the driver.
func (s *service) unlock() {
	pushes := s.pushes
	s.pushes = nil
	s.mu.Unlock()
	for _, p := range pushes {
		s.notify(p)
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

// spread returns a random time between t/2 and 3t/2: clients that lost a leader at the same moment must not return at
// the same moment.
func spread(t time.Duration) time.Duration { return t/2 + rand.N(t) }

// isSmall reports whether a request has one name and no metadata: the engine's checks have bounded it.
func isSmall(r *lockpb.Request) bool {
	switch call := r.Call.(type) {
	case *lockpb.Request_KeepAlive, *lockpb.Request_Release, *lockpb.Request_Move:
		return true
	case *lockpb.Request_Acquire:
		return len(call.Acquire.Metadata) == 0
	}
	return false
}

// tooLarge returns the error for a request that no server takes.
func tooLarge(x *call) error {
	err := kit.InvalidOption("request", fmt.Sprintf("of %d bytes", x.size),
		fmt.Sprintf("the server takes no more than %d", maxBytes))
	if x.request.GetAcquireAll() != nil {
		return fmt.Errorf("%w: in one step: %v", backend.ErrUnsupported, err) // but one after the other
	}
	return err
}
