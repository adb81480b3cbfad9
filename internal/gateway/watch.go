package gateway

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/fencelock/fencelock/backend"
)

// Change is one event of a watch.
type Change struct {
	Type         string `json:"type" enum:"acquired,released,expired,force-released"`
	LockKey      string `json:"lockKey"`
	OwnerID      string `json:"ownerId,omitempty"`
	FencingToken uint64 `json:"fencingToken,omitempty"`
	Reason       string `json:"reason,omitempty"`
	Revision     uint64 `json:"revision,omitempty" doc:"Also the event's id: a watch since it goes on behind it"`
}

const (
	beatTime = 15 * time.Second       // how often a silent stream shows that it lives
	headTime = 150 * time.Millisecond // how long a watch may fail with a status of its own
	sendTime = 10 * time.Second       // how long one event may take to leave
)

type watchQuery struct {
	NameOf
	Since  uint64 `query:"since" doc:"Changes after this revision; missing: from now on"`
	LastID string `header:"Last-Event-ID" doc:"As since; browsers send it when they connect again"`
}

func (g *Gateway) watchRoute(api huma.API) {
	op := operation(api, http.MethodGet, "/v1/locks/{name}/watch", "watch", "Follow what happens to a lock", nil, 410,
		429, 501)
	op.Responses["200"] = &huma.Response{
		Description: "Server-sent events. The name of each is its type, its id the revision, its data a Change",
		Content:     map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString}}},
	}
	api.OpenAPI().Components.Schemas.Schema(typeOf[Change](), true, "Change")
	huma.Register(api, op, func(ctx context.Context, in *watchQuery) (*huma.StreamResponse, error) {
		return g.watchLock(ctx, in)
	})
}

type told struct {
	change backend.Change
	err    error
}

func (g *Gateway) watchLock(ctx context.Context, in *watchQuery) (*huma.StreamResponse, error) {
	name, since := in.name(), in.Since
	if in.LastID != "" {
		n, err := strconv.ParseUint(in.LastID, 10, 64)
		if err != nil {
			return nil, problem(codeRequest, "Last-Event-ID is no revision")
		}
		since = max(since, n)
	}
	if err := backend.ValidateName(name); err != nil {
		return nil, problemOf(err)
	}
	d, ok := backend.As[backend.Watcher](g.driver)
	need := backend.CapWatch
	if since != 0 {
		need |= backend.CapWatchReplay
	}
	if !ok || !g.can(need) {
		return nil, problemOf(g.lacks(need))
	}
	out, err := g.admit(principalOf(requestOf(ctx)))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(g.closing, cancel)
	end := func() { stop(); cancel(); out() }
	changes := make(chan told)
	go func() {
		defer close(changes)
		for c, err := range d.Watch(ctx, name, since) {
			select {
			case changes <- told{c, err}:
			case <-ctx.Done():
				return
			}
		}
	}()
	// What is wrong from the start is an answer of its own, not an event.
	var first *told
	head := time.NewTimer(headTime)
	defer head.Stop()
	select {
	case t, open := <-changes:
		if open && t.err == nil {
			first = &t
		} else {
			end()
			if !open || ctx.Err() != nil {
				return nil, problem(codeUnavailable, "the watch ended").retry(comeAgain)
			}
			return nil, problemOf(t.err)
		}
	case <-head.C:
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer end()
		_, w := humago.Unwrap(hc)
		stream(ctx, w, first, changes)
	}}, nil
}

// stream writes events until the watch or the client ends.
func stream(ctx context.Context, w http.ResponseWriter, first *told, changes <-chan told) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	control := http.NewResponseController(w)
	send := func(text string) bool {
		_ = control.SetWriteDeadline(time.Now().Add(sendTime)) // not all writers have it
		_, err := w.Write([]byte(text))
		return err == nil && control.Flush() == nil
	}
	event := func(t *told) bool {
		if t.err != nil {
			text, err := json.Marshal(problemOf(t.err))
			return err == nil && send("event: error\ndata: "+string(text)+"\n\n") && false
		}
		c := &t.change
		said := Change{Type: string(c.Type), LockKey: c.Name, OwnerID: c.Owner, Reason: c.Reason, Revision: c.Revision}
		if c.Token.Exclusive() {
			said.FencingToken = c.Token.Order()
		}
		text, err := json.Marshal(said)
		id := ""
		if c.Revision != 0 {
			id = "id: " + strconv.FormatUint(c.Revision, 10) + "\n"
		}
		return err == nil && send(id+"event: "+said.Type+"\ndata: "+string(text)+"\n\n")
	}
	if !send(": watching\n\n") || first != nil && !event(first) {
		return
	}
	beat := time.NewTicker(beatTime)
	defer beat.Stop()
	for {
		select {
		case t, open := <-changes:
			if !open || ctx.Err() != nil || !event(&t) {
				return
			}
		case <-beat.C:
			if !send(": still here\n\n") {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}
