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
	// Clock is the clock of all events. It must be the clock of the leases. Default backend.SystemClock, which all
	// processes of one machine share; under testing/synctest, backend.GoClock.
	Clock backend.Clock

	// Each event is one Write to Writer, a line of JSON, before its call continues. The reader of a pipe must keep up,
	// or the clients block. Default: no writer.
	Writer io.Writer
	// StreamOnly keeps no events in memory: Recorder.History is empty. It is for long-running child processes.
	StreamOnly bool

	// Client is a prefix of the clients' names, followed by "/", which makes them unique among all processes. A
	// restarted process needs a new prefix. Default "".
	Client string
}

// Recorder records calls and holds. It is safe for concurrent use. It does not affect the recorded calls:
// Recorder.Err returns an error of the Writer.
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

// Instant converts a time of this process. The result is too early by the duration of the conversion, mostly some
// hundred nanoseconds.
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

// Add records an event unchanged. For a caller that records its own calls, the methods below make the events.
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

// Fault records the beginning of a fault.
func (r *Recorder) Fault(what string) { r.Add(Event{Type: TypeFault, At: r.Now(), Why: what}) }

// Healed records the end of all faults. From here on, names must be granted: Rules.Recovery.
func (r *Recorder) Healed(what string) { r.Add(Event{Type: TypeHealed, At: r.Now(), Why: what}) }

// Killed records that all clients named client, or with names that begin with client and "/", were killed before now.
// It is for the parent of a child process with Options.Client client, after the process has ended.
func (r *Recorder) Killed(client string) {
	r.Add(Event{Type: TypeKilled, At: r.Now(), Client: client})
}

// label returns the client's name with the prefix of its process.
func (r *Recorder) label(client string) string {
	if r.o.Client == "" {
		return client
	}
	return r.o.Client + "/" + client
}

// Call is a call in flight. The caller calls one of its methods, once.
type Call struct {
	r *Recorder
	e Event // of the call
}

// Begin records a call of client that begins now, and the deadline of ctx.
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

// returned records the return with the details in e.
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

// Return records that the call has returned now, without a grant.
func (c *Call) Return(outcome Outcome, err error) { c.returned(Event{}, outcome, err) }

// Saw records the answer to an OpAsk: the tokens of all holders.
func (c *Call) Saw(tokens []fencing.Token) { c.returned(Event{Seen: tokens}, OK, nil) }

// Grant is the grant of an acquire. Unknown fields are zero.
type Grant struct {
	Kind           backend.Kind
	Permits, Limit int
	Token          fencing.Token
	Request        string // identity of the hold

	// The service keeps the hold at least for TTL after SentAt. Zero TTL: unknown. Zero SentAt with a TTL: the beginning
	// of the call.
	SentAt backend.Instant
	TTL    time.Duration
	// Deadline ends the hold's validity without another renewal. Zero: the hold is valid until a notification.
	Deadline backend.Instant
}

// Hold is a granted lock that has not ended.
type Hold struct {
	r      *Recorder
	client string // label
	id     uint64 // of the acquire
	name   string

	mu    sync.Mutex // protects the following field
	ended bool
}

// Granted records that the acquire has returned now with a grant.
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

// Renewed records that the service has confirmed the hold. It uses only SentAt, TTL and Deadline of g.
func (h *Hold) Renewed(g Grant) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.ended {
		h.add(Event{Type: TypeRenewed, At: h.r.Now(), SentAt: g.SentAt, TTL: g.TTL, Deadline: g.Deadline})
	}
}

// Lost records that the holder is notified of the loss now, with the reason. If the deadline in g has passed, the
// hold ended then; SentAt and TTL are those of the last renewal, if any since the last event. Lost has no effect on a
// hold that has ended.
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

// Release records that the holder calls release now, which ends the hold's validity. g is as for Lost.
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
