package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/poll"
	"github.com/fencelock/fencelock/internal/rules"
)

// Change is one event of a watch.
type Change struct {
	Type         string `json:"type" enum:"acquired,released,expired,force-released"`
	LockKey      string `json:"lockKey"`
	OwnerID      string `json:"ownerId,omitempty"`
	FencingToken uint64 `json:"fencingToken,omitempty"`
	Reason       string `json:"reason,omitempty"`
	By           string `json:"by,omitempty" doc:"The name that the requester of a forced release gave"`
	Principal    string `json:"principal,omitempty" doc:"The identity of the requester of a forced release, authenticated by the backend"`
	At           int64  `json:"at,omitempty" doc:"The time of the change, in milliseconds since 1970, if the backend reports it"`
	Revision     uint64 `json:"revision,omitempty" doc:"The revision of the change, and the event's id: a watch with this value as since continues after it"`
}

// ChangeOf returns the public form of a change.
func ChangeOf(c *backend.Change) *Change {
	out := &Change{
		Type: string(c.Type), LockKey: c.Name, OwnerID: c.Owner, Reason: c.Reason, By: c.By, Principal: c.Principal,
		At: unixMillis(c.Time), Revision: c.Revision,
	}
	if c.Token.Exclusive() {
		out.FencingToken = c.Token.Order()
	}
	return out
}

const (
	beatTime = 15 * time.Second       // the interval of heartbeats on a stream
	headTime = 150 * time.Millisecond // the time in which an error of a new watch is still the response
	sendTime = 10 * time.Second       // the maximum for sending one batch of events
	// pauseTime and maxPause are the minimum and the maximum of the pause of a watch after it has sent events. sendsOfOne
	// bounds the sends of all watches of a name a second, as far as maxPause allows.
	pauseTime  = 20 * time.Millisecond
	maxPause   = 200 * time.Millisecond
	sendsOfOne = 2000
)

type watchQuery struct {
	NameOf
	Since  uint64 `query:"since" doc:"Return changes after this revision. Default: from now on"`
	LastID string `header:"Last-Event-ID" doc:"Like since; browsers send it when they reconnect"`
}

func (g *Gateway) watchRoute(api huma.API) {
	op := operation(api, http.MethodGet, "/v1/locks/{name}/watch", "watch", "Watch the changes of a lock", nil,
		slices.Concat(codesOfService, []string{codeCompacted})...)
	op.Responses["200"] = &huma.Response{
		Description: "Server-sent events. The name of an event is its type, its id is the revision, and its data is a Change. If " +
			"the backend does not push changes, the gateway polls about every second: events then have no revisions, a hold that " +
			"begins and ends between two polls is missed, and every end is reported as released",
		Content: map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString}}},
	}
	api.OpenAPI().Components.Schemas.Schema(typeOf[Change](), true, "Change")
	huma.Register(api, op, func(ctx context.Context, in *watchQuery) (*huma.StreamResponse, error) {
		return g.watchLock(ctx, in)
	})
}

// headerReplay is "none" if the watch has no revisions: it can only begin at the present state.
const headerReplay = "Fencelock-Replay"

// watcher returns the driver's watcher, or else a watcher that polls.
func (g *Gateway) watcher(since uint64) (backend.Watcher, error) {
	if since != 0 && !g.can(backend.CapWatchReplay) {
		return nil, g.lacks(backend.CapWatchReplay)
	}
	if d, ok := backend.As[backend.Watcher](g.driver); ok && g.can(backend.CapWatch) {
		return d, nil
	}
	if d, ok := backend.As[backend.Inspector](g.driver); ok && g.can(backend.CapInspect) {
		return poll.Watcher{Inspector: d}, nil
	}
	return nil, g.lacks(backend.CapWatch)
}

type told struct {
	events []*event
	err    error
}

func (g *Gateway) watchLock(ctx context.Context, in *watchQuery) (*huma.StreamResponse, error) {
	name, since := in.name(), in.Since
	if in.LastID != "" {
		n, err := strconv.ParseUint(in.LastID, 10, 64)
		if err != nil {
			return nil, problem(codeRequest, "Last-Event-ID is not a revision")
		}
		since = max(since, n)
	}
	if err := g.may(ctx, rules.Read, name); err != nil {
		return nil, err
	}
	d, err := g.watcher(since)
	if err != nil {
		return nil, problemOf(err)
	}
	out, err := g.admit(&g.watches, principalOf(requestOf(ctx)))
	if err != nil {
		return nil, err
	}
	incomingOf(ctx).leaveWork()
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(g.closing, cancel)
	end := func() { stop(); cancel(); out() }
	changes, begun := make(chan told), make(chan struct{})
	go func() {
		defer close(changes)
		for events, err := range g.follow(ctx, d, name, since, 0, func() { close(begun) }) {
			select {
			case changes <- told{events, err}:
			case <-ctx.Done():
				return
			}
		}
	}()
	first := opening(begun, changes)
	if first.err != nil {
		ended := ctx.Err() != nil
		end()
		if ended {
			return nil, watchEnded()
		}
		return nil, problemOf(first.err)
	}
	r := requestOf(ctx)
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer end()
		_, w := humago.Unwrap(hc)
		if !g.can(backend.CapWatchReplay) {
			w.Header().Set(headerReplay, "none")
		}
		stream(ctx, w, &first, changes, func() *Problem {
			p := g.still(r, name)
			refusing(w, "watch", p)
			return p
		})
	}}, nil
}

// opening waits until headTime after a watch has begun, and returns its first events or its error if they arrive by
// then: an early error is a response, not an event.
func opening(begun <-chan struct{}, changes <-chan told) told {
	var head <-chan time.Time
	for {
		select {
		case <-begun:
			begun, head = nil, time.After(headTime)
		case t, open := <-changes:
			if !open {
				t.err = watchEnded()
			}
			return t
		case <-head:
			return told{}
		}
	}
}

// text returns the text of the event on the stream.
func (e *event) text() []byte {
	e.once.Do(func() {
		change := ChangeOf(&e.Change)
		said, _ := json.Marshal(change) // no error: only text and numbers
		if change.Revision != 0 {
			e.said = fmt.Appendf(e.said, "id: %d\n", change.Revision)
		}
		e.said = fmt.Appendf(e.said, "event: %s\ndata: %s\n\n", change.Type, said)
	})
	return e.said
}

// eventTexts has buffers for the texts of events.
var eventTexts = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// stream writes events and heartbeats until the watch ends, the client disconnects, or still returns a problem.
func stream(ctx context.Context, w http.ResponseWriter, first *told, changes <-chan told, still func() *Problem) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	control := http.NewResponseController(w)
	send := func(text []byte) bool {
		_ = control.SetWriteDeadline(time.Now().Add(sendTime)) // not every writer supports it
		_, err := w.Write(text)
		return err == nil && control.Flush() == nil
	}
	if !send([]byte(": watching\n\n")) {
		return
	}
	// tell sends events, and reports whether more may follow. An error is the last event.
	tell := func(t *told) bool {
		if p := still(); p != nil {
			t = &told{err: p}
		}
		if t.err != nil {
			said, err := json.Marshal(problemOf(t.err))
			if err == nil {
				send(fmt.Appendf(nil, "event: error\ndata: %s\n\n", said))
			}
			return false
		}
		// Write once: otherwise the server would send hundreds of events in pieces of 2 KiB.
		all := eventTexts.Get().(*bytes.Buffer)
		defer eventTexts.Put(all)
		all.Reset()
		for _, e := range t.events {
			all.Write(e.text())
		}
		return send(all.Bytes())
	}
	if len(first.events) > 0 && !tell(first) {
		return
	}
	beat := time.NewTicker(beatTime)
	defer beat.Stop()
	for {
		select {
		case t, open := <-changes:
			if !open || ctx.Err() != nil || !tell(&t) {
				return
			}
		case <-beat.C:
			if p := still(); p != nil {
				tell(&told{err: p})
				return
			}
			if !send([]byte(": still here\n\n")) {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}
