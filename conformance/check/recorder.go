package check

import (
	"context"
	"encoding/json"
	"io"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Options configure a Recorder. The zero value is a recorder in memory with the machine's clock.
type Options struct {
	// Clock gives the instants of all events. It must be the clock of the leases. Default backend.SystemClock, which
	// all processes of one machine share; under testing/synctest, backend.GoClock.
	Clock backend.Clock

	// Writer gets each event as a line of JSON before the call that it belongs to goes on, in one Write. The reader of
	// a pipe must keep up, or the clients stand still. Default: no writer.
	Writer io.Writer
	// StreamOnly keeps no events in memory: Recorder.History is empty. For child processes that run for long.
	StreamOnly bool

	// Client is put before the clients' names, with "/" between, and makes them unique among all processes, including
	// successive ones: a restarted process gets another one. Default "".
	Client string
}

// Recorder records calls and holds. It is safe for concurrent use. It does not affect the recorded calls: an error of
// the Writer is kept for Recorder.Err.
type Recorder struct {
	o Options

	mu     sync.Mutex // protects the following fields
	events []Event
	last   uint64 // ID
	err    error
	open   map[string][]*Held // by name: leases with an end to be recorded
}

// NewRecorder returns a recorder without events.
func NewRecorder(o Options) *Recorder {
	if o.Clock == nil {
		o.Clock = backend.SystemClock()
	}
	return &Recorder{o: o, open: map[string][]*Held{}}
}

// Now returns the instant of the recorder's clock.
func (r *Recorder) Now() backend.Instant { return r.o.Clock.Now() }

// Instant converts a time of this process. It is too early by as long as the conversion takes, some hundred nanoseconds
// mostly.
func (r *Recorder) Instant(t time.Time) backend.Instant {
	now := r.o.Clock.Now()
	return now.Add(time.Until(t))
}

// History returns the events so far.
func (r *Recorder) History() History {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Merge(History{Events: r.events})
}

// Err returns the first error of Options.Writer.
func (r *Recorder) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Add records an event as it is. The methods below do it for callers that record their own calls.
func (r *Recorder) Add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addLocked(e)
}

func (r *Recorder) addLocked(e Event) {
	if !r.o.StreamOnly {
		r.events = append(r.events, e)
	}
	if r.o.Writer == nil || r.err != nil {
		return
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = r.o.Writer.Write(append(line, '\n'))
	}
	r.err = err
}

// Fault records that a fault begins, Healed that all faults are over and the locks have to go on.
func (r *Recorder) Fault(what string) { r.Add(Event{Type: TypeFault, At: r.Now(), Why: what}) }

// Healed records that all faults are over. From here on the locks have to go on: Rules.Recovery.
func (r *Recorder) Healed(what string) { r.Add(Event{Type: TypeHealed, At: r.Now(), Why: what}) }

// Killed records that all clients named client, or with names that begin with client and "/", were killed before now.
// It is for the parent of a child process with Options.Client client, and is called when the process is gone.
func (r *Recorder) Killed(client string) {
	r.Add(Event{Type: TypeKilled, At: r.Now(), Client: client})
}

// label is the client's name among all processes.
func (r *Recorder) label(client string) string {
	if r.o.Client == "" {
		return client
	}
	return r.o.Client + "/" + client
}

// Call is a call in flight. One of its methods follows, once.
type Call struct {
	r *Recorder
	e Event // the call's
}

// Begin records that client calls, now. The end of the call's context is read from ctx.
func (r *Recorder) Begin(ctx context.Context, client string, op Op, name string) *Call {
	e := Event{Type: TypeCall, Client: r.label(client), Op: op, Name: name}
	if end, ok := ctx.Deadline(); ok {
		e.Until = r.Instant(end)
	}
	return r.begin(e)
}

func (r *Recorder) begin(e Event) *Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	e.ID = r.last
	e.At = r.Now()
	r.addLocked(e)
	return &Call{r: r, e: e}
}

// returned records the return with what e has of it.
func (c *Call) returned(e Event, outcome Outcome, err error) {
	e.Type, e.Client, e.ID, e.Op, e.Name, e.Hold = TypeReturn, c.e.Client, c.e.ID, c.e.Op, c.e.Name, c.e.Hold
	e.Outcome = outcome
	if err != nil {
		e.Err = err.Error()
	}
	if e.At == 0 {
		e.At = c.r.Now()
	}
	c.r.Add(e)
}

// Return records that the call has returned now, with another outcome than a grant.
func (c *Call) Return(outcome Outcome, err error) { c.returned(Event{}, outcome, err) }

// Saw records the answer to an OpAsk: the tokens of all holders.
func (c *Call) Saw(tokens []fencing.Token) { c.returned(Event{Seen: tokens}, OK, nil) }

// Grant is the grant of an acquire. Unknown fields are zero.
type Grant struct {
	Kind           backend.Kind
	Permits, Limit int
	Token          fencing.Token
	Request        string // identity of the hold

	// The service keeps the hold for TTL from SentAt at least; zero TTL: unknown. SentAt zero with a TTL: the
	// call's beginning.
	SentAt backend.Instant
	TTL    time.Duration
	// Deadline ends the holder's belief without another renewal. Zero: it believes until it is notified.
	Deadline backend.Instant
}

// Hold is a lock that was granted and has not ended.
type Hold struct {
	r      *Recorder
	client string // label
	id     uint64 // of the acquire
	name   string

	mu    sync.Mutex // protects the following field
	ended bool
}

// Granted records that the acquire has returned now and the caller believes that it holds the lock.
func (c *Call) Granted(g Grant) *Hold { return c.granted(g, c.r.Now()) }

func (c *Call) granted(g Grant, at backend.Instant) *Hold {
	if g.TTL != 0 && g.SentAt.IsZero() {
		g.SentAt = c.e.At
	}
	c.returned(Event{
		At: at, Kind: g.Kind.String(), Permits: g.Permits, Limit: g.Limit, Token: g.Token, Request: g.Request,
		SentAt: g.SentAt, TTL: g.TTL, Deadline: g.Deadline,
	}, OK, nil)
	return &Hold{r: c.r, client: c.e.Client, id: c.e.ID, name: c.e.Name}
}

// Renewed records that the service has confirmed the hold. Only SentAt, TTL and Deadline of g count.
func (h *Hold) Renewed(g Grant) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.ended {
		h.add(Event{Type: TypeRenewed, At: h.r.Now(), SentAt: g.SentAt, TTL: g.TTL, Deadline: g.Deadline})
	}
}

// Lost records that the holder was notified of the loss now, and why. With a deadline in g that has passed before, it
// ended then; SentAt and TTL are from the last renewal, if there was one since the last event. A hold that has ended
// already stays as it is.
func (h *Hold) Lost(why string, g Grant) { h.lost(why, g, h.r.Now()) }

func (h *Hold) lost(why string, g Grant, at backend.Instant) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return
	}
	h.ended = true
	h.add(Event{Type: TypeEnd, At: at, Why: why, SentAt: g.SentAt, TTL: g.TTL, Deadline: g.Deadline})
}

func (h *Hold) add(e Event) {
	e.Client, e.ID, e.Name = h.client, h.id, h.name
	h.r.Add(e)
}

// Release records that the holder calls release now, and believes no longer. g is as for Lost.
func (h *Hold) Release(ctx context.Context, g Grant) *Call {
	h.mu.Lock()
	h.ended = true
	h.mu.Unlock()
	e := Event{
		Type: TypeCall, Client: h.client, Op: OpRelease, Name: h.name, Hold: h.id,
		SentAt: g.SentAt, TTL: g.TTL, Deadline: g.Deadline,
	}
	if end, ok := ctx.Deadline(); ok {
		e.Until = h.r.Instant(end)
	}
	return h.r.begin(e)
}
