package gateway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/fencelock/fencelock/backend"
)

// NameOf is the name of the lock in a path.
type NameOf struct {
	Path  string `path:"name" doc:"The name of the lock, one escaped segment: / is %2F. - if ?name= is given"`
	Query string `query:"name" doc:"The name of the lock instead of the one in the path, for those that no path can have: . and .. and /"`
}

func (n NameOf) name() string { return cmp.Or(n.Query, n.Path) }

// Terms are what one acquire says about its hold, of whichever names.
type Terms struct {
	OwnerID       string `json:"ownerId" minLength:"1" maxLength:"256" example:"worker-1" doc:"Who holds the lock, for people, and the scope of requestId. It is shown to everybody"`
	TTLMillis     int64  `json:"ttlMillis" minimum:"1" example:"30000" doc:"How long the hold lives unless it is renewed"`
	Wait          bool   `json:"wait,omitempty" doc:"Wait until the lock is granted, 50 s at most; then 202"`
	WaitMillis    int64  `json:"waitMillis,omitempty" minimum:"0" doc:"Wait at most that long, 50 s at most; then 202. The place in the queue is kept, also if the connection ends, for pollWithinMillis"`
	RequestID     string `json:"requestId,omitempty" maxLength:"128" example:"req-12345" doc:"Makes a repeat of the request the same request: the same hold, or the same place. Scoped by ownerId and by the client's certificate"`
	MinHoldMillis int64  `json:"minHoldMillis,omitempty" minimum:"0" doc:"Keep the name closed for at least that long, also if it is released earlier"`
}

// Item is what one acquire says about one name.
type Item struct {
	Kind         string            `json:"kind,omitempty" enum:"exclusive,shared,permits" doc:"Default exclusive"`
	Permits      int               `json:"permits,omitempty" minimum:"0" doc:"With kind permits: how many"`
	Limit        int               `json:"limit,omitempty" minimum:"0" doc:"With kind permits: of how many; all who use the name say the same"`
	Hierarchical bool              `json:"hierarchical,omitempty" doc:"The name is a path whose steps end with /, and the hold counts for all below it"`
	Metadata     map[string]string `json:"metadata,omitempty" doc:"Shown to those who look; 4 KiB at most"`
}

type acquireBody struct {
	Terms
	Item
}

type acquireAllBody struct {
	Terms
	Locks []struct {
		LockKey string `json:"lockKey" minLength:"1" doc:"The name of the lock"`
		Item
	} `json:"locks" minItems:"1" maxItems:"64" doc:"All of them are granted, or none"`
}

// Lock is a hold, for its holder.
type Lock struct {
	LockKey        string    `json:"lockKey" doc:"The name of the lock"`
	LockToken      string    `json:"lockToken" doc:"Renews and releases the hold: a secret"`
	OwnerID        string    `json:"ownerId"`
	ExpiresAt      time.Time `json:"expiresAt" doc:"When the hold ends unless it is renewed, by the gateway's wall clock: for people"`
	FencingToken   uint64    `json:"fencingToken,omitempty" maximum:"9007199254740991" doc:"Greater than that of every earlier exclusive hold of the name. Missing if the backend does not fence, and for shared holds and permits"`
	TokenSpace     string    `json:"tokenSpace,omitempty" doc:"The cluster that issued fencingToken"`
	ValidForMillis int64     `json:"validForMillis" doc:"For how long the hold may be relied on, from the instant at which the client sent this request, by a clock that is never set"`
}

// Locks are several holds.
type Locks struct {
	Locks []Lock `json:"locks" doc:"In the order of the request"`
}

// Queued is a place in the queue.
type Queued struct {
	State            string `json:"state" enum:"QUEUED"`
	RequestID        string `json:"requestId" doc:"Send the same request with it again"`
	PollWithinMillis int64  `json:"pollWithinMillis" doc:"The place is lost if the request does not come again within that time"`
}

type renewBody struct {
	LockToken string `json:"lockToken" minLength:"1"`
	OwnerID   string `json:"ownerId,omitempty"`
	TTLMillis int64  `json:"ttlMillis,omitempty" minimum:"0" doc:"Default as before. Less than what is left changes nothing"`
}

// Renewed is the answer to a renewal.
type Renewed struct {
	ExpiresAt      time.Time `json:"expiresAt"`
	ValidForMillis int64     `json:"validForMillis" doc:"From the instant at which the client sent this request"`
}

type releaseBody struct {
	LockToken string `json:"lockToken" minLength:"1"`
	OwnerID   string `json:"ownerId,omitempty"`
}

// Released is the answer to a release.
type Released struct {
	Status          string `json:"status" enum:"RELEASED"`
	AlreadyReleased bool   `json:"alreadyReleased,omitempty" doc:"It was released before, by the same lock token"`
}

type forceBody struct {
	Reason       string `json:"reason" minLength:"1" maxLength:"1024" doc:"Why, for the holder and for those who look later"`
	FencingToken uint64 `json:"fencingToken,omitempty" doc:"Only if the holder has this token"`
}

// Forced is the answer to a force-release.
type Forced struct {
	Status string `json:"status" enum:"FORCE_RELEASED"`
}

// State is what anybody sees of a lock.
type State struct {
	Locked       bool       `json:"locked"`
	LockKey      string     `json:"lockKey,omitempty"`
	OwnerID      string     `json:"ownerId,omitempty" doc:"The first holder's"`
	FencingToken uint64     `json:"fencingToken,omitempty" doc:"The first holder's, if it is exclusive"`
	ExpiresAt    *time.Time `json:"expiresAt,omitempty" doc:"When the first hold ends unless it is renewed: for people"`
	Waiters      int        `json:"waiters,omitempty"`
	Holders      []Holder   `json:"holders,omitempty"`
}

// Holder is one of those who hold a lock.
type Holder struct {
	OwnerID         string            `json:"ownerId"`
	HoldID          string            `json:"holdId,omitempty" doc:"Names the hold, and moves nothing"`
	Kind            string            `json:"kind"`
	Permits         int               `json:"permits,omitempty"`
	FencingToken    uint64            `json:"fencingToken,omitempty"`
	Since           *time.Time        `json:"since,omitempty"`
	ExpiresInMillis int64             `json:"expiresInMillis,omitempty"`
	Metadata        map[string]string `json:"metadata,omitempty"`
}

// List is one page of the locks that are held.
type List struct {
	Locks     []State `json:"locks" doc:"Sorted by name"`
	NextAfter string  `json:"nextAfter,omitempty" doc:"There is more: ask again with it as after"`
}

// answer is an answer of which the status tells the type.
type answer struct {
	Status       int
	FencingToken string `header:"Fencing-Token"`
	RetryAfter   string `header:"Retry-After"`
	ETag         string `header:"ETag"`
	Body         any
}

type body[T any] struct{ Body T }

// requestKey finds the request in a handler's context.
type requestKey struct{}

func requestOf(ctx context.Context) *http.Request { return ctx.Value(requestKey{}).(*http.Request) }

// routes is all that is served.
func (g *Gateway) routes() http.Handler {
	mux := http.NewServeMux()
	config := huma.DefaultConfig("Fencelock", cmp.Or(g.o.Version, "devel"))
	config.Info.Description = "Locks that are held over several requests. See docs/HTTP.md."
	config.Info.License = &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}
	config.CreateHooks = nil // no $schema in answers: they are what docs/HTTP.md says, to the byte
	config.DocsPath, config.SchemasPath, config.OpenAPIPath = "", "", ""
	config.RejectUnknownQueryParameters = true
	api := humago.New(mux, config)
	g.locks(api)
	g.probes(api)
	g.documents(mux, api.OpenAPI())
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		write(w, problem(codeNotFound, fmt.Sprintf("%s %s; /docs lists what there is", r.Method, r.URL.Path)))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, r)))
	})
}

// operation describes one call. The answers are by status; problems are added.
func operation(api huma.API, method, path, id, summary string, answers map[int]any, problems ...int) huma.Operation {
	op := huma.Operation{
		OperationID: id, Method: method, Path: path, Summary: summary, MaxBodyBytes: maxBody, BodyReadTimeout: -1,
		Errors: append([]int{http.StatusBadRequest, http.StatusInternalServerError, http.StatusServiceUnavailable}, problems...),
	}
	slices.Sort(op.Errors)
	op.Responses = map[string]*huma.Response{}
	for status, of := range answers {
		t := reflect.TypeOf(of)
		op.Responses[strconv.Itoa(status)] = &huma.Response{
			Description: http.StatusText(status),
			Content: map[string]*huma.MediaType{
				"application/json": {Schema: api.OpenAPI().Components.Schemas.Schema(t, true, t.Name())},
			},
		}
	}
	return op
}

func (g *Gateway) locks(api huma.API) {
	const post, get, lock = http.MethodPost, http.MethodGet, "/v1/locks/{name}"
	huma.Register(api, operation(api, post, lock+"/acquire", "acquire", "Take a lock",
		map[int]any{200: Lock{}, 202: Queued{}}, 409, 413, 422, 429, 501, 504),
		func(ctx context.Context, in *struct {
			NameOf
			Body acquireBody
		}) (*answer, error) {
			b := &in.Body
			return g.handleAcquire(ctx, &b.Terms, []wish{b.wish(in.name())}, func(all []Lock) any { return all[0] })
		})
	huma.Register(api, operation(api, post, "/v1/locks:acquireAll", "acquire-all", "Take several locks in one step",
		map[int]any{200: Locks{}, 202: Queued{}}, 409, 413, 422, 429, 501, 504),
		func(ctx context.Context, in *body[acquireAllBody]) (*answer, error) {
			var wishes []wish
			for i := range in.Body.Locks {
				l := &in.Body.Locks[i]
				wishes = append(wishes, l.wish(l.LockKey))
			}
			return g.handleAcquire(ctx, &in.Body.Terms, wishes, func(all []Lock) any { return Locks{all} })
		})
	huma.Register(api, operation(api, post, lock+"/renew", "renew", "Prolong a hold", nil, 403, 409, 413, 504),
		func(ctx context.Context, in *struct {
			NameOf
			Body renewBody
		}) (*body[Renewed], error) {
			arrived := g.clock.Now()
			grant, minHold, err := g.readable(in.Body.LockToken, in.name(), in.Body.OwnerID)
			if err != nil {
				return nil, err
			}
			ttl := grant.TTL
			if in.Body.TTLMillis != 0 {
				if ttl, err = millis("ttlMillis", in.Body.TTLMillis); err != nil {
					return nil, err
				}
			}
			ctx, cancel := context.WithTimeout(ctx, attemptTime)
			defer cancel()
			out, err := g.renew(ctx, grant, minHold, ttl)
			if err != nil {
				return nil, problemOf(err)
			}
			valid, expires := g.validity(out.SentAt, out.TTL, arrived)
			return &body[Renewed]{Renewed{ExpiresAt: expires, ValidForMillis: valid}}, nil
		})
	huma.Register(api, operation(api, post, lock+"/release", "release", "Give a hold back", nil, 403, 409, 413, 504),
		func(ctx context.Context, in *struct {
			NameOf
			Body releaseBody
		}) (*body[Released], error) {
			grant, minHold, err := g.readable(in.Body.LockToken, in.name(), in.Body.OwnerID)
			if err != nil {
				return nil, err
			}
			// A client that hangs up has said what it wants.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
			defer cancel()
			again, err := g.free(ctx, grant, minHold)
			if err != nil {
				return nil, problemOf(err)
			}
			return &body[Released]{Released{"RELEASED", again}}, nil
		})
	huma.Register(api, operation(api, post, lock+"/force-release", "force-release", "Take a lock away from its holder",
		nil, 403, 404, 412, 413, 501, 504),
		func(ctx context.Context, in *struct {
			NameOf
			IfMatch string `header:"If-Match" doc:"Only if the lock is as it was when GET gave this ETag"`
			Body    forceBody
		}) (*body[Forced], error) {
			if err := g.forceRelease(ctx, in.name(), in.IfMatch, &in.Body); err != nil {
				return nil, problemOf(err)
			}
			return &body[Forced]{Forced{"FORCE_RELEASED"}}, nil
		})
	huma.Register(api, operation(api, http.MethodDelete, lock+"/waits/{requestId}", "cancel-wait", "Leave the queue", nil, 404, 409),
		func(ctx context.Context, in *struct {
			NameOf
			RequestID string `path:"requestId"`
			OwnerID   string `query:"ownerId" required:"true"`
		}) (*body[Cancelled], error) {
			key := g.sealer.requestID("hold", in.name(), g.here, certificateOf(requestOf(ctx)), in.OwnerID, in.RequestID)
			if _, err := g.cancelWait(key); err != nil {
				return nil, err
			}
			return &body[Cancelled]{Cancelled{"CANCELLED"}}, nil
		})
	huma.Register(api, operation(api, get, lock, "get", "Tell who holds a lock", map[int]any{200: State{}, 404: State{}}, 501),
		func(ctx context.Context, in *NameOf) (*answer, error) {
			s, err := g.look(ctx, in.name())
			if err != nil {
				return nil, problemOf(err)
			}
			out := &answer{Status: http.StatusOK, ETag: etag(&s), Body: g.stateOf(&s)}
			if !s.Held {
				out.Status, out.Body = http.StatusNotFound, State{}
			}
			return out, nil
		})
	huma.Register(api, operation(api, get, "/v1/locks", "list", "List the locks that are held", nil, 501),
		func(ctx context.Context, in *listQuery) (*body[List], error) {
			page, err := g.list(ctx, in)
			if err != nil {
				return nil, problemOf(err)
			}
			return &body[List]{*page}, nil
		})
	g.watchRoute(api)
}

// Cancelled is the answer to leaving a queue.
type Cancelled struct {
	Status string `json:"status" enum:"CANCELLED"`
}

func (o *Item) wish(name string) wish {
	return wish{name, cmp.Or(o.Kind, "exclusive"), o.Permits, o.Limit, o.Hierarchical, o.Metadata}
}

func (g *Gateway) handleAcquire(ctx context.Context, t *Terms, wishes []wish, shape func([]Lock) any) (*answer, error) {
	r := requestOf(ctx)
	a := &ask{
		certificate: certificateOf(r), principal: principalOf(r), owner: t.OwnerID, requestID: t.RequestID, wishes: wishes,
		wait: t.Wait || t.WaitMillis > 0, keep: t.WaitMillis > 0, most: pollMost,
	}
	var errs [3]error
	a.ttl, errs[0] = millis("ttlMillis", t.TTLMillis)
	a.minHold, errs[1] = millis("minHoldMillis", t.MinHoldMillis)
	if t.WaitMillis > 0 {
		a.most, errs[2] = millis("waitMillis", t.WaitMillis)
		a.most = min(a.most, pollMost)
	}
	if err := errors.Join(errs[:]...); err != nil {
		return nil, problemOf(err)
	}
	if a.wait && a.requestID == "" { // it must be able to come again
		a.requestID = backend.NewRequestID()
	}
	got, err := g.lock(ctx, a)
	if err != nil {
		return nil, problemOf(err)
	}
	if got.queued > 0 {
		return &answer{
			Status: http.StatusAccepted, RetryAfter: "0", Body: Queued{"QUEUED", a.requestID, got.queued.Milliseconds()},
		}, nil
	}
	all := make([]Lock, len(got.grants))
	space := g.driver.Describe().TokenSpace
	for i := range got.grants {
		grant := &got.grants[i]
		l := &all[i]
		*l = Lock{LockKey: grant.Name, LockToken: g.sealer.Seal(grant, got.minHold), OwnerID: grant.Owner}
		if grant.Token.Exclusive() {
			l.FencingToken, l.TokenSpace = grant.Token.Order(), space
		}
		l.ValidForMillis, l.ExpiresAt = g.validity(grant.SentAt, grant.TTL, got.arrived)
	}
	out := &answer{Status: http.StatusOK, Body: shape(all)}
	if all[0].FencingToken != 0 && len(all) == 1 {
		out.FencingToken = strconv.FormatUint(all[0].FencingToken, 10)
	}
	return out, nil
}

// validity is for how long a client may rely on a hold from the instant at which it sent a request that had arrived at
// the given instant, and when that ends for people.
func (g *Gateway) validity(sentAt backend.Instant, ttl time.Duration, arrived backend.Instant) (int64, time.Time) {
	valid := sentAt.Add(g.driver.Describe().Validity(ttl)).Sub(arrived)
	expires := time.Now().Add(sentAt.Add(ttl).Sub(g.clock.Now()))
	return max(0, valid.Milliseconds()), expires.UTC().Truncate(time.Millisecond)
}

// look tells who holds a name.
func (g *Gateway) look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	d, ok := backend.As[backend.Inspector](g.driver)
	if !ok || !g.can(backend.CapInspect) {
		return backend.State{}, g.lacks(backend.CapInspect)
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	return d.Look(ctx, name)
}

func (g *Gateway) can(c backend.Capabilities) bool { return g.driver.Describe().Capabilities.Has(c) }

func (g *Gateway) lacks(c backend.Capabilities) error {
	return fmt.Errorf("the %s driver lacks the capability %v: %w", g.driver.Describe().Name, c, backend.ErrUnsupported)
}

// etag names the state of a lock: its revision, where the backend tells one, or else its holds.
func etag(s *backend.State) string {
	if s.Revision != 0 {
		return `"` + strconv.FormatUint(s.Revision, 10) + `"`
	}
	ids := make([]string, len(s.Holders))
	for i, h := range s.Holders {
		ids[i] = h.HoldID
	}
	slices.Sort(ids)
	return `"` + strings.Join(ids, ",") + `"`
}

func (g *Gateway) stateOf(s *backend.State) State {
	out := State{Locked: s.Held, LockKey: s.Name, Waiters: s.Waiters}
	for _, h := range s.Holders {
		one := Holder{
			OwnerID: h.Owner, HoldID: h.HoldID, Kind: h.Kind.String(), Permits: h.Permits,
			ExpiresInMillis: h.ExpiresIn.Milliseconds(), Metadata: h.Metadata,
		}
		if h.Token.Exclusive() {
			one.FencingToken = h.Token.Order()
		}
		if !h.Since.IsZero() {
			since := h.Since.UTC()
			one.Since = &since
		}
		out.Holders = append(out.Holders, one)
	}
	if len(out.Holders) > 0 {
		first := &out.Holders[0]
		out.OwnerID, out.FencingToken = first.OwnerID, first.FencingToken
		if left := s.Holders[0].ExpiresIn; left > 0 {
			at := time.Now().Add(left).UTC().Truncate(time.Millisecond)
			out.ExpiresAt = &at
		}
	}
	return out
}

type listQuery struct {
	Prefix    string `query:"prefix" doc:"Names that start with it"`
	Namespace string `query:"namespace" doc:"Names of a namespace, that is those that start with it and a colon or a slash"`
	After     string `query:"after" doc:"Names behind this one"`
	Limit     int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"How many at most"`
	Name      string `query:"name" doc:"This name alone"`
}

// list reads one page. The backend tells names in no order, so each page reads all of them.
func (g *Gateway) list(ctx context.Context, q *listQuery) (*List, error) {
	d, ok := backend.As[backend.Lister](g.driver)
	if !ok || !g.can(backend.CapList) {
		return nil, g.lacks(backend.CapList)
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	prefix := q.Prefix
	if q.Namespace != "" && !strings.HasPrefix(prefix, q.Namespace) {
		prefix = q.Namespace
	}
	in := func(name string) bool {
		rest, ok := strings.CutPrefix(name, q.Namespace)
		return strings.HasPrefix(name, q.Prefix) && name > q.After && (q.Name == "" || q.Name == name) &&
			(q.Namespace == "" || ok && (strings.HasPrefix(rest, ":") || strings.HasPrefix(rest, "/")))
	}
	var found []backend.State
	byName := func(a, b backend.State) int { return cmp.Compare(a.Name, b.Name) }
	for s, err := range d.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		if !in(s.Name) {
			continue
		}
		if found = append(found, s); len(found) > 4*q.Limit { // so that no page needs memory for all
			slices.SortFunc(found, byName)
			found = found[:q.Limit+1]
		}
	}
	slices.SortFunc(found, byName)
	page := &List{Locks: []State{}}
	for i := range found {
		if i == q.Limit {
			page.NextAfter = found[i-1].Name
			break
		}
		page.Locks = append(page.Locks, g.stateOf(&found[i]))
	}
	return page, nil
}

// forceRelease takes a lock away. A condition is looked at just before.
func (g *Gateway) forceRelease(ctx context.Context, name, ifMatch string, b *forceBody) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := g.o.Authorizer.ForceRelease(requestOf(ctx), name); err != nil {
		return problem(codeDenied, err.Error())
	}
	d, ok := backend.As[backend.ForceReleaser](g.driver)
	if !ok || !g.can(backend.CapForceRelease) {
		return g.lacks(backend.CapForceRelease)
	}
	if ifMatch != "" || b.FencingToken != 0 {
		s, err := g.look(ctx, name)
		if err != nil {
			return err
		}
		holds := slices.ContainsFunc(s.Holders, func(h backend.Holder) bool { return h.Token.Order() == b.FencingToken })
		if ifMatch != "" && ifMatch != "*" && ifMatch != etag(&s) || b.FencingToken != 0 && !holds {
			return problem(codeChanged, "somebody else holds the lock by now, or nobody")
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
	defer cancel()
	err := d.ForceRelease(ctx, name, b.Reason)
	if errors.Is(err, backend.ErrNotHeld) {
		return problem(codeNotLocked, "nobody holds the lock")
	}
	return err
}

// readBody reads the body before anything else happens: while a request waits, nothing but the end of its connection is
// then expected of it.
func readBody(w http.ResponseWriter, r *http.Request) (io.ReadCloser, *Problem) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, problem(codeTooLarge, "the body has more than 64 KiB")
	case err != nil:
		return nil, problem(codeRequest, "the body did not arrive")
	}
	return io.NopCloser(bytes.NewReader(text)), nil
}
