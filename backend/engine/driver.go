package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/randsource"
)

// verb is the call that an error names.
type verb string

const (
	verbAcquire verb = "acquire"
	verbRenew   verb = "renew"
	verbRelease verb = "release"
	verbExpire  verb = "expire"
	verbPing    verb = "ping"
	verbLook    verb = "look"
	verbList    verb = "list"
	verbWatch   verb = "watch"
	verbForce   verb = "force-release"
	verbClose   verb = "close"
)

// Driver is a backend.Driver over a Service. It implements all optional interfaces of package backend but Expirer;
// calls that the service cannot serve return backend.ErrUnsupported. All methods are safe for concurrent use.
//
// A Driver is not a backend.FencingDriver: the binding's own type is.
type Driver struct {
	service  Service
	sessions *sessions // nil for a service without sessions
	clock    backend.Clock
	gate     *kit.Gate
	chance   func() float64 // spreads repetitions
	probing  chan struct{}  // has one token while a probe is in progress
	prompt   bool           // steps run on their callers' goroutines
	enters   bool           // so do Enter, EnterSet and Leave
	oneEntry bool           // the service is a OneEntry
	timeout  time.Duration  // of an exchange
	attempts attemptNames
	resting  atomic.Int64  // Leaves that wait for their rest
	free     sync.Pool     // attempts that were granted
	timers   sync.Pool     // of Await: they have stopped, so that their channels are empty
	checkNow chan struct{} // has room for one wake of the loop of the checks
	late     chan struct{} // closed exchangeTimeout after the beginning of Close

	mu        sync.Mutex // protects the following fields
	probed    bool       // no more probes are needed
	probes    int        // that have ended
	probeErr  error      // of the last one
	forgotten error      // the service has lost its history
	flights   map[string]flight
	waiters   map[string]*waiter // by key
	losses    map[string]*loss   // Request.Lost by request id, while the request may hold
	queues    map[string]*queue  // by name, with Checks
	checking  bool               // the loop of the checks runs
	checkAt   backend.Instant    // the loop's next check
	settling  map[string]*time.Timer
}

// flight is the attempts of one request, with their cleanup, and its Enters that are in progress. Both may outlive
// their callers.
type flight struct {
	attempts int
	shared   bool          // there was more than one attempt at a time
	granted  bool          // one of them was answered with a hold
	running  int           // attempts that have not ended
	entry    bool          // with OneEntry: an ended attempt may have left an entry
	removals int           // with OneEntry: Leaves of the entry in progress
	removing chan struct{} // closed when there are no more
	entering int
	landed   chan struct{} // closed when no Enter is in progress any more; nil while no call waits for that
}

// New returns a driver over s.
func New(s Service) *Driver {
	d := &Driver{
		service: s, clock: s.Describe().Clock, gate: kit.NewGate(), chance: randsource.Of(s),
		flights: map[string]flight{}, waiters: map[string]*waiter{}, losses: map[string]*loss{},
		probing: make(chan struct{}, 1), queues: map[string]*queue{}, checkNow: make(chan struct{}, 1),
		late:     make(chan struct{}),
		settling: map[string]*time.Timer{},
	}
	d.timeout = exchangeTimeout
	if patient, ok := s.(Patient); ok {
		d.timeout = patient.Patience()
	}
	_, d.prompt = s.(Prompt)
	_, d.enters = s.(PromptEnters)
	d.enters = d.enters || d.prompt
	_, d.oneEntry = s.(OneEntry)
	if with, ok := s.(Sessions); ok {
		d.sessions = newSessions(d, with)
	}
	if pushes, ok := s.(Pushes); ok {
		pushes.Listen(d.notify)
	}
	return d
}

// Describe is backend.Driver's.
func (d *Driver) Describe() backend.Description { return d.service.Describe() }

// Ping is backend.Pinger's.
func (d *Driver) Ping(ctx context.Context) error {
	err := d.begin(ctx)
	if err == nil {
		defer d.gate.Leave()
		patient := context.WithValue(ctx, patientKey{}, true) // it may be several round trips to a slow service
		_, _, _, err = hedged(patient, d, func(ctx context.Context, _ bool) (struct{}, error) {
			return struct{}{}, d.service.Ping(ctx)
		})
	}
	if _, ok := d.service.(Prober); ok && err == nil { // Ping is that probe too
		d.mu.Lock()
		d.probed = true
		d.mu.Unlock()
	}
	if err = d.readError(ctx, err); errors.Is(err, context.DeadlineExceeded) && !kit.Classified(err) {
		err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err) // it had the time that its caller gives an answer
	}
	return d.callError(verbPing, "", err)
}

// Close ends waiters with backend.ErrClosed and waits until they have left, and until cleanup has ended, which gets
// exchangeTimeout, or ctx ends. Other calls are refused from then on. It ends the driver's sessions, and takes
// exchangeTimeout for that when ctx has ended: then in the background.
func (d *Driver) Close(ctx context.Context) error {
	first := d.gate.Close()
	d.stopSettling()
	if first {
		time.AfterFunc(exchangeTimeout, func() { close(d.late) })
	}
	err := d.gate.Wait(ctx)
	switch {
	case first && d.sessions == nil:
		err = errors.Join(err, d.service.Close(ctx))
	case first:
		done := make(chan error, 1)
		go func() {
			grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), exchangeTimeout)
			defer cancel()
			err := d.sessions.close(grace)
			done <- errors.Join(err, d.service.Close(grace))
		}()
		select {
		case ended := <-done:
			err = errors.Join(err, ended)
		case <-ctx.Done():
			err = errors.Join(err, ctx.Err())
		}
	}
	return d.callError(verbClose, "", err)
}

// lost is the error that the service has lost its history, or nil.
func (d *Driver) lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.forgotten
}

// probe identifies the service through a Prober, once for all callers. A probe grants no lock, so an unknown outcome
// does no harm.
func (d *Driver) probe(ctx context.Context) error {
	prober, ok := d.service.(Prober)
	done := func() (probed bool, probes int, err error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.probed, d.probes, d.probeErr
	}
	probed, before, _ := done()
	if !ok || probed {
		return nil
	}
	select {
	case d.probing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-d.gate.Closing().Done():
		return backend.ErrClosed
	}
	defer func() { <-d.probing }()
	probed, probes, err := done()
	if probed || probes > before && !kit.IsContext(err) {
		return err // of a probe that ended while this call waited, unless its own caller ended it
	}
	_, _, _, err = hedged(ctx, d, func(ctx context.Context, _ bool) (struct{}, error) {
		return struct{}{}, prober.Probe(ctx)
	})
	err = d.readError(ctx, err)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.probes++
	d.probed, d.probeErr = err == nil, err
	return err
}

// begin counts a call in, until d.gate.Leave.
func (d *Driver) begin(ctx context.Context) error {
	if err := d.gate.Enter(); err != nil {
		return err
	}
	err := ctx.Err()
	if checked, ok := d.service.(Checked); ok && err == nil {
		err = checked.Unfit()
	}
	if err != nil {
		d.gate.Leave()
	}
	return err
}

// ended returns why a call ends: by Close, or with its context.
func (d *Driver) ended(ctx context.Context) error {
	if d.gate.Closed() {
		return backend.ErrClosed
	}
	return ctx.Err()
}

// stepError classifies the error of a step. own is the context of the exchange: it is independent of the caller's, so
// its error leaves the chain.
func (d *Driver) stepError(own context.Context, err error) error {
	switch {
	case err == nil:
	case errors.Is(err, backend.ErrHistoryLost):
		d.mu.Lock()
		first := d.forgotten == nil
		if first {
			d.forgotten = err
		}
		d.mu.Unlock()
		if first && d.sessions != nil {
			d.sessions.overAll(backend.ReasonHistoryLost)
		}
	case own.Err() != nil && kit.IsContext(err):
		if _, callers := own.(*stepContext); !callers {
			err = d.noAnswer()
		}
	}
	return err
}

// classOf returns the class of an error. final is true for an answer that goes to the caller: it ends an attempt.
func (d *Driver) classOf(err error) (c Class, final bool) {
	switch {
	case err == nil:
		return NotDone, false
	case errors.As(err, new(*Refusal)):
		return NotDone, true
	case errors.Is(err, backend.ErrUnknown):
		return Unknown, false
	case errors.Is(err, backend.ErrUnavailable), errors.Is(err, ErrOutgrown):
		return NotDone, false
	case errors.Is(err, ErrNoSession):
		return NoSession, false
	case kit.Classified(err):
		return NotDone, true
	}
	c = d.service.Classify(err)
	return c, c == Never
}

// readError is the error of a read-only step. An unknown outcome does no harm, so the caller may repeat it.
func (d *Driver) readError(ctx context.Context, err error) error {
	if err == nil || kit.Classified(err) && !errors.Is(err, backend.ErrUnknown) ||
		!kit.Classified(err) && d.service.Classify(err) != Unknown {
		return err
	}
	if ended := d.ended(ctx); ended != nil {
		return ended
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		if both := joined.Unwrap(); len(both) == 2 && errors.Is(both[0], backend.ErrUnknown) {
			err = both[1] // the cause: there is no outcome to know
		}
	}
	return fmt.Errorf("%w: %v", backend.ErrUnavailable, err)
}

// callError adds the call and the name to err, and its class.
func (d *Driver) callError(v verb, name string, err error) error {
	if err == nil {
		return nil
	}
	return kit.CallError(d.Describe().Name, string(v), name, err, func(err error) error {
		if errors.Is(err, ErrNoSession) || errors.Is(err, ErrOutgrown) {
			return backend.ErrUnavailable
		}
		switch d.service.Classify(err) {
		case NotDone, NoSession:
			return backend.ErrUnavailable
		case Never:
			return backend.ErrMisconfigured
		default:
			return nil
		}
	})
}
