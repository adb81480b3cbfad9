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
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/fencelock/fencelock/backend"
)

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
	if g.o.Metrics != nil {
		mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4")
			if err := g.o.Metrics(w); err != nil {
				g.o.Log.WarnContext(r.Context(), "metrics", "error", err)
			}
		})
	}
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
		Errors: append([]int{http.StatusBadRequest, http.StatusInternalServerError, http.StatusServiceUnavailable},
			problems...),
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

const lockPath = "/v1/locks/{name}"

func (g *Gateway) locks(api huma.API) {
	g.waitRoutes(api)
	g.holdRoutes(api)
	g.lookRoutes(api)
	g.watchRoute(api)
}

// waitRoutes lead to a hold: taking locks, and leaving the queue.
func (g *Gateway) waitRoutes(api huma.API) {
	huma.Register(api, operation(api, http.MethodPost, lockPath+"/acquire", "acquire", "Take a lock",
		map[int]any{200: Lock{}, 202: Queued{}}, 409, 413, 422, 429, 501, 504),
		func(ctx context.Context, in *struct {
			NameOf
			Idempotent
			Body acquireBody
		}) (*answer, error) {
			b := &in.Body
			if err := in.into(&b.Terms); err != nil {
				return nil, err
			}
			return g.handleAcquire(ctx, &b.Terms, []wish{b.wish(in.name())}, func(all []Lock) any { return all[0] })
		})
	huma.Register(api,
		operation(api, http.MethodPost, "/v1/locks:acquireAll", "acquire-all", "Take several locks in one step",
			map[int]any{200: Locks{}, 202: Queued{}}, 409, 413, 422, 429, 501, 504),
		func(ctx context.Context, in *struct {
			Idempotent
			Body acquireAllBody
		}) (*answer, error) {
			if err := in.into(&in.Body.Terms); err != nil {
				return nil, err
			}
			var wishes []wish
			for i := range in.Body.Requests {
				l := &in.Body.Requests[i]
				wishes = append(wishes, l.wish(l.LockKey))
			}
			return g.handleAcquire(ctx, &in.Body.Terms, wishes, func(all []Lock) any { return Locks{all} })
		})
	huma.Register(api,
		operation(api, http.MethodDelete, lockPath+"/waits/{requestId}", "cancel-wait", "Leave the queue", nil, 404,
			409),
		func(ctx context.Context, in *struct {
			NameOf
			RequestID string `path:"requestId"`
			OwnerID   string `query:"ownerId" required:"true"`
		}) (*body[Cancelled], error) {
			key := g.requestKey(certificateOf(requestOf(ctx)), in.OwnerID, in.RequestID, wish{Name: in.name()})
			arrived := g.clock.Now()
			if granted, err := g.cancelWait(key); err != nil {
				p := problemOf(err)
				if granted != nil {
					p.Lock = g.lockOf(&granted.grant, granted.minHold, arrived)
				}
				return nil, p
			}
			return &body[Cancelled]{Cancelled{"CANCELLED"}}, nil
		})
}

// holdRoutes are about holds that there are.
func (g *Gateway) holdRoutes(api huma.API) {
	huma.Register(api,
		operation(api, http.MethodPost, lockPath+"/renew", "renew", "Prolong a hold", nil, 403, 409, 413, 504),
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
	huma.Register(api,
		operation(api, http.MethodPost, lockPath+"/release", "release", "Give a hold back", nil, 403, 409, 413, 504),
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
	huma.Register(api,
		operation(api, http.MethodPost, lockPath+"/force-release", "force-release", "Take a lock away from its holder",
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
}

func (g *Gateway) lookRoutes(api huma.API) {
	op := operation(api, http.MethodGet, lockPath, "get", "Tell who holds a lock",
		map[int]any{200: State{}, 404: State{}}, 429, 501)
	op.Responses["304"] = &huma.Response{
		Description: "The state is the one of If-None-Match, after the wait that was asked for",
	}
	huma.Register(api, op, func(ctx context.Context, in *lookQuery) (*answer, error) {
		s, err := g.lookBeyond(ctx, in)
		if err != nil {
			return nil, problemOf(err)
		}
		out := &answer{Status: http.StatusOK, ETag: etag(&s), Body: g.stateOf(&s)}
		switch {
		case out.ETag == in.Known:
			out.Status = http.StatusNotModified
		case !s.Held:
			out.Status, out.Body = http.StatusNotFound, State{}
		}
		return out, nil
	})
	huma.Register(api, operation(api, http.MethodGet, "/v1/locks", "list", "List the locks that are held", nil, 501),
		func(ctx context.Context, in *listQuery) (*body[List], error) {
			page, err := g.list(ctx, in)
			if err != nil {
				return nil, problemOf(err)
			}
			return &body[List]{*page}, nil
		})
}

func (g *Gateway) handleAcquire(ctx context.Context, t *Terms, wishes []wish, shape func([]Lock) any) (*answer, error) {
	r := requestOf(ctx)
	a := &ask{
		certificate: certificateOf(r), principal: principalOf(r), owner: t.OwnerID, requestID: t.RequestID,
		wishes: wishes,
		wait:   t.Wait || t.WaitMillis > 0, keep: t.WaitMillis > 0, most: pollMost,
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
		a.requestID, a.fresh = backend.NewRequestID(), true
	}
	got, err := g.lock(ctx, a)
	if err != nil {
		p := problemOf(err)
		var call *backend.CallError
		if len(wishes) > 1 && errors.As(err, &call) {
			p.LockKey = call.Name
		}
		return nil, p
	}
	if got.queued > 0 {
		return &answer{
			Status: http.StatusAccepted, RetryAfter: "0",
			Body: Queued{"QUEUED", a.requestID, got.queued.Milliseconds()},
		}, nil
	}
	all := make([]Lock, len(got.grants))
	for i := range got.grants {
		all[i] = *g.lockOf(&got.grants[i], got.minHold, got.arrived)
	}
	out := &answer{Status: http.StatusOK, Body: shape(all)}
	if all[0].FencingToken != 0 && len(all) == 1 {
		out.FencingToken = strconv.FormatUint(all[0].FencingToken, 10)
	}
	return out, nil
}

// lockOf is a hold as its holder sees it, whose request had arrived at the given instant.
func (g *Gateway) lockOf(grant *backend.Grant, minHold time.Duration, arrived backend.Instant) *Lock {
	l := &Lock{
		LockKey: grant.Name, LockToken: g.sealer.Seal(grant, minHold), OwnerID: grant.Owner,
		TTLMillis: grant.TTL.Milliseconds(),
	}
	if grant.Token.Exclusive() {
		l.FencingToken, l.TokenSpace = grant.Token.Order(), g.driver.Describe().TokenSpace
	}
	l.ValidForMillis, l.ExpiresAt = g.validity(grant.SentAt, grant.TTL, arrived)
	return l
}

// validity is for how long a client may rely on a hold from the instant at which it sent a request that had arrived at
// the given instant, and when that ends for people.
func (g *Gateway) validity(sentAt backend.Instant, ttl time.Duration, arrived backend.Instant) (int64, time.Time) {
	valid := sentAt.Add(g.driver.Describe().Validity(ttl)).Sub(arrived)
	expires := time.Now().Add(sentAt.Add(ttl).Sub(g.clock.Now()))
	return max(0, valid.Milliseconds()), expires.UTC().Truncate(time.Millisecond)
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
