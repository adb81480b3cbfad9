package gateway

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
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
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// call registers a call with a body of the type B. The types I and O are for the specification only: huma reads neither
// the request nor the body.
func call[I, O, B any](
	g *Gateway, api huma.API, op huma.Operation, do func(ctx context.Context, r *http.Request, b *B) (*answer, error),
) {
	of := shapeOf(typeOf[B]())
	id, named := op.OperationID, strings.Contains(op.Path, "{name}")
	op.Middlewares = huma.Middlewares{func(hc huma.Context, _ func(huma.Context)) {
		r, w := humago.Unwrap(hc)
		in := incomingOf(r.Context())
		body := new(B)
		err := onlyName(r, named)
		if err == nil {
			err = of.decode(in.body, body)
		}
		in.body = nil // the request may wait for a long time
		var out *answer
		if err == nil {
			out, err = do(r.Context(), r, body)
		} else {
			err = problem(codeRequest, err.Error())
		}
		if err != nil {
			p := problemOf(err)
			noteRefusal(r, w, id, p)
			write(w, p)
			return
		}
		out.write(w)
	}}
	huma.Register(api, op, func(context.Context, *I) (*O, error) { panic("a middleware answers") })
}

// onlyName refuses unknown query parameters.
func onlyName(r *http.Request, named bool) error {
	if r.URL.RawQuery == "" {
		return nil
	}
	for key := range r.URL.Query() {
		if !named || key != "name" {
			return fmt.Errorf("unknown query parameter %.64q", key)
		}
	}
	return nil
}

// nameOf returns the name of the lock that a request is for.
func nameOf(r *http.Request) string {
	if r.URL.RawQuery == "" {
		return r.PathValue("name")
	}
	return cmp.Or(r.URL.Query().Get("name"), r.PathValue("name"))
}

// write sends the answer.
func (a *answer) write(w http.ResponseWriter) {
	text, err := marshal(a.Body)
	if err != nil {
		write(w, problem(codeInternal, internalSentence))
		return
	}
	h := w.Header()
	if a.FencingToken != "" {
		h[headerToken] = []string{a.FencingToken}
	}
	if a.RetryAfter != "" {
		h[headerRetry] = []string{a.RetryAfter}
	}
	h["Content-Type"] = []string{contentJSON}
	w.WriteHeader(a.Status)
	_, _ = w.Write(text) // an error means that the client has disconnected
}

// marshal returns a value as the JSON of an answer.
func marshal(v any) ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return out.Bytes(), err
}

// answer is an answer whose body type depends on the status.
type answer struct {
	Status       int
	FencingToken string `header:"Fencing-Token"`
	RetryAfter   string `header:"Retry-After"`
	ETag         string `header:"ETag"`
	Body         any
}

func ok(body any) *answer { return &answer{Status: http.StatusOK, Body: body} }

type body[T any] struct{ Body T }

// table is a mux that records its patterns.
type table struct {
	http.ServeMux
	patterns []string
}

func (t *table) Handle(pattern string, h http.Handler) {
	t.patterns = append(t.patterns, pattern)
	t.ServeMux.Handle(pattern, h)
}

func (t *table) HandleFunc(pattern string, h func(http.ResponseWriter, *http.Request)) {
	t.Handle(pattern, http.HandlerFunc(h))
}

// routes returns the handler of all routes.
func (g *Gateway) routes() http.Handler {
	mux := &table{}
	config := huma.DefaultConfig("Fencelock", cmp.Or(g.o.Version, "devel"))
	config.Info.Description = "Locks that are held over several requests. See docs/HTTP.md."
	config.Info.License = &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}
	config.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"clientCertificate": {Type: "mutualTLS", Description: "If the gateway has --tls-client-ca"},
		"token":             {Type: "http", Scheme: "bearer", Description: "If the gateway has --rules and --principals"},
	}
	config.Transformers = append(config.Transformers, func(hc huma.Context, _ string, v any) (any, error) {
		if p, ok := v.(*Problem); ok {
			r, w := humago.Unwrap(hc)
			noteRefusal(r, w, hc.Operation().OperationID, p)
		}
		return v, nil
	})
	config.CreateHooks = nil // no $schema in answers: they have exactly the bytes that docs/HTTP.md documents
	config.DocsPath, config.SchemasPath, config.OpenAPIPath = "", "", ""
	config.RejectUnknownQueryParameters = true
	api := humago.New(mux, config)
	g.locks(api)
	g.probes(api)
	trueHeaders(api.OpenAPI())
	g.documents(mux, api.OpenAPI())
	g.page(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { notServed(&mux.ServeMux, w, r) })
	g.patterns = mux.patterns
	return mux
}

// The codes that several calls have in common: all calls, calls with a body, and calls that use the lock service.
var (
	codesOfAll     = []string{codeRequest, codeName, codeUnauthenticated, codeDenied, codeMisdirected, codeInternal}
	codesOfBody    = []string{codeTooLarge, codeMedia, codeQuota}
	codesOfService = []string{codeQuota, codeUnavailable, codeMisconfig, codeHistory, codeUnknown, codeUnsupported}
)

// operation describes one call. answers has a value of each body type by status. codes are those of its problems, in
// addition to codesOfAll.
func operation(api huma.API, method, path, id, summary string, answers map[int]any, codes ...string) huma.Operation {
	op := huma.Operation{
		OperationID: id, Method: method, Path: path, Summary: summary,
		Responses: map[string]*huma.Response{},
	}
	if method == http.MethodPost {
		codes = append(codes, codesOfBody...)
	}
	schemas := api.OpenAPI().Components.Schemas
	general := schemas.Schema(typeOf[Problem](), true, "Problem")
	byStatus := map[int][]any{}
	for _, code := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(codes, codesOfAll)))) {
		status := kinds[code].status
		byStatus[status] = append(byStatus[status], code)
	}
	for status, codes := range byStatus {
		r := &huma.Response{
			Description: http.StatusText(status),
			Content: map[string]*huma.MediaType{contentProblem: {Schema: &huma.Schema{
				AllOf: []*huma.Schema{general, {
					Type: huma.TypeObject, Required: []string{"error"},
					Properties: map[string]*huma.Schema{"error": {Type: huma.TypeString, Enum: codes}},
				}},
			}}},
		}
		if slices.ContainsFunc(codes, func(code any) bool { return slices.Contains(codesToRepeat, code.(string)) }) {
			r.Headers = map[string]*huma.Header{headerRetry: inHeader(huma.TypeInteger, "The number of seconds after which to retry")}
		}
		op.Responses[strconv.Itoa(status)] = r
	}
	for status, of := range answers {
		t := reflect.TypeOf(of)
		r := op.Responses[strconv.Itoa(status)]
		if r == nil {
			r = &huma.Response{Description: http.StatusText(status), Content: map[string]*huma.MediaType{}}
			op.Responses[strconv.Itoa(status)] = r
		}
		r.Content["application/json"] = &huma.MediaType{Schema: schemas.Schema(t, true, t.Name())}
	}
	return op
}

// codesToRepeat are the codes of problems that may have a Retry-After header.
var codesToRepeat = []string{codeHeld, codeQuota, codeUnavailable, codeUnknown, codeElsewhere}

const (
	headerRetry = "Retry-After"
	headerETag  = "ETag"
	headerToken = "Fencing-Token"
)

func inHeader(kind, about string) *huma.Header {
	return &huma.Header{Description: about, Schema: &huma.Schema{Type: kind}}
}

const lockPath = "/v1/locks/{name}"

func (g *Gateway) locks(api huma.API) {
	g.waitRoutes(api)
	g.holdRoutes(api)
	g.lookRoutes(api)
	g.watchRoute(api)
}

// codesOfAcquire are the codes of acquire and acquireAll.
var codesOfAcquire = slices.Concat(codesOfService, []string{
	codeTTL, codeHeld, codeDone, codeCancelled, codeDeadlock, codeLimit, codeMismatch,
})

// waitRoutes registers the calls that acquire locks and leave the queue.
func (g *Gateway) waitRoutes(api huma.API) {
	call[struct {
		NameOf
		Idempotent
		Body acquireBody
	}, answer](g, api, operation(api, http.MethodPost, lockPath+"/acquire", "acquire", "Acquire a lock",
		map[int]any{200: Lock{}, 202: Queued{}}, codesOfAcquire...),
		func(ctx context.Context, r *http.Request, b *acquireBody) (*answer, error) {
			if err := idempotent(r, &b.Terms); err != nil {
				return nil, err
			}
			return g.handleAcquire(ctx, &b.Terms, []wish{b.wish(nameOf(r))}, func(all []Lock) any { return &all[0] })
		})
	call[struct {
		Idempotent
		Body acquireAllBody
	}, answer](g, api,
		operation(api, http.MethodPost, "/v1/locks:acquireAll", "acquire-all", "Acquire several locks in one step",
			map[int]any{200: Locks{}, 202: Queued{}}, codesOfAcquire...),
		func(ctx context.Context, r *http.Request, b *acquireAllBody) (*answer, error) {
			if err := idempotent(r, &b.Terms); err != nil {
				return nil, err
			}
			var wishes []wish
			for i := range b.Requests {
				l := &b.Requests[i]
				wishes = append(wishes, l.wish(l.LockKey))
			}
			return g.handleAcquire(ctx, &b.Terms, wishes, func(all []Lock) any { return Locks{all} })
		})
	huma.Register(api,
		operation(api, http.MethodDelete, lockPath+"/waits/{requestId}", "cancel-wait", "Leave the queue", nil, codeNoWait,
			codeGranted, codeQuota),
		func(ctx context.Context, in *struct {
			NameOf
			RequestID string `path:"requestId"`
			OwnerID   string `query:"ownerId" required:"true"`
		}) (*body[Cancelled], error) {
			if err := g.may(ctx, rules.Acquire, in.name()); err != nil {
				return nil, err
			}
			r := requestOf(ctx)
			key := g.requestKey(scopeOf(r), in.OwnerID, in.RequestID, wish{Name: in.name()})
			arrived := g.clock.Now()
			if granted, err := g.cancelWait(key); err != nil {
				p := problemOf(err)
				if granted != nil {
					p.Lock = g.lockOf(&granted.grant, granted.minHold, g.boundTo(r), arrived)
				}
				return nil, p
			}
			return &body[Cancelled]{Cancelled{"CANCELLED"}}, nil
		})
}

// holdRoutes registers the calls that change existing holds.
func (g *Gateway) holdRoutes(api huma.API) {
	call[struct {
		NameOf
		Body renewBody
	}, body[Renewed]](g, api,
		operation(api, http.MethodPost, lockPath+"/renew", "renew", "Renew a hold", nil,
			slices.Concat(codesOfService, []string{codeTTL, codeExpired, codeNotOwner, codeElsewhere})...),
		func(ctx context.Context, r *http.Request, b *renewBody) (*answer, error) {
			arrived := g.clock.Now()
			grant, minHold, err := g.readable(ctx, b.LockToken, nameOf(r), b.OwnerID)
			if err != nil {
				return nil, err
			}
			if err := g.mayHold(ctx, wish{Name: grant.Name, Hierarchical: grant.Hierarchical}); err != nil {
				return nil, err
			}
			ttl := grant.TTL
			if b.TTLMillis != 0 {
				if ttl, err = millis("ttlMillis", b.TTLMillis); err != nil {
					return nil, err
				}
			}
			// Continue if the client disconnects: otherwise the outcome of the renewal would be unknown.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
			defer cancel()
			out, err := g.renew(ctx, principalOf(r), grant, minHold, ttl)
			if err != nil {
				return nil, err
			}
			valid, expires := g.validity(out.SentAt, out.TTL, arrived)
			return ok(&Renewed{LockKey: grant.Name, ExpiresAt: expires, ValidForMillis: valid}), nil
		})
	call[struct {
		NameOf
		Body releaseBody
	}, body[Released]](g, api,
		operation(api, http.MethodPost, lockPath+"/release", "release", "Release a hold", nil,
			slices.Concat(codesOfService, []string{codeExpired, codeNotOwner})...),
		func(ctx context.Context, r *http.Request, b *releaseBody) (*answer, error) {
			grant, minHold, err := g.readable(ctx, b.LockToken, nameOf(r), b.OwnerID)
			if err != nil {
				return nil, err
			}
			// Continue if the client disconnects: it has sent the request.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
			defer cancel()
			again, err := g.free(ctx, grant, minHold)
			if err != nil {
				return nil, err
			}
			if !again {
				g.auditHolds(r, "release", grant)
			}
			return ok(&Released{"RELEASED", grant.Name, again}), nil
		})
	call[struct {
		NameOf
		IfMatch string `header:"If-Match" doc:"Release only if the lock has not changed since GET returned this ETag"`
		Body    forceBody
	}, body[Forced]](g, api,
		operation(api, http.MethodPost, lockPath+"/force-release", "force-release", "Release a lock against the will of its holder",
			nil, slices.Concat(codesOfService, []string{codeNotLocked, codeChanged})...),
		func(ctx context.Context, r *http.Request, b *forceBody) (*answer, error) {
			if err := g.forceRelease(ctx, nameOf(r), r.Header.Get("If-Match"), b); err != nil {
				return nil, err
			}
			return ok(&Forced{"FORCE_RELEASED"}), nil
		})
}

func (g *Gateway) lookRoutes(api huma.API) {
	op := operation(api, http.MethodGet, lockPath, "get", "Get the state of a lock",
		map[int]any{200: State{}, 404: State{}}, codesOfService...)
	op.Responses["304"] = &huma.Response{
		Description: "The state still has the ETag of If-None-Match, after the requested wait",
	}
	huma.Register(api, op, func(ctx context.Context, in *lookQuery) (*answer, error) {
		if err := g.may(ctx, rules.Read, in.name()); err != nil {
			return nil, err
		}
		s, err := g.lookBeyond(ctx, in)
		if err != nil {
			return nil, problemOf(err)
		}
		if err := g.may(ctx, rules.Read, in.name()); err != nil { // the rules may have changed during the wait
			return nil, err
		}
		out := &answer{Status: http.StatusOK, ETag: etag(&s), Body: StateOf(&s)}
		switch {
		case out.ETag == in.Known:
			out.Status = http.StatusNotModified
		case !s.Held:
			out.Status, out.Body = http.StatusNotFound, State{}
		}
		return out, nil
	})
	huma.Register(api, operation(api, http.MethodGet, "/v1/locks", "list", "List the held locks", nil,
		codesOfService...),
		func(ctx context.Context, in *listQuery) (*body[List], error) {
			page, err := g.list(ctx, in)
			if err != nil {
				return nil, problemOf(err)
			}
			return &body[List]{*page}, nil
		})
}

func (g *Gateway) handleAcquire(ctx context.Context, t *Terms, wishes []wish, shape func([]Lock) any) (*answer, error) {
	if err := g.mayHold(ctx, wishes...); err != nil {
		return nil, err
	}
	r := requestOf(ctx)
	a := &ask{
		scope: scopeOf(r), principal: principalOf(r), sentFor: principal.CallsFor(ctx), owner: t.OwnerID,
		requestID: t.RequestID, wishes: wishes,
		wait: t.Wait || t.WaitMillis > 0, keep: t.KeepPlace, most: pollMost,
	}
	var errs [3]error
	a.ttl, errs[0] = millis("ttlMillis", t.TTLMillis)
	a.minHold, errs[1] = millis("minHoldMillis", t.MinHoldMillis)
	if t.WaitMillis > 0 {
		a.most, errs[2] = millis("waitMillis", t.WaitMillis)
		a.last = a.most <= pollMost
		a.most = min(a.most, pollMost)
	}
	if t.KeepPlace && !a.wait {
		errs[2] = problem(codeRequest, "keepPlace needs wait")
	}
	if err := errors.Join(errs[:]...); err != nil {
		return nil, problemOf(err)
	}
	if a.wait && a.requestID == "" { // the client needs an id to poll
		a.requestID, a.fresh = backend.NewRequestID(), true
	}
	got, err := g.lock(ctx, a)
	if err != nil {
		p := problemOf(err)
		if len(wishes) > 1 {
			p.LockKey = cmp.Or(p.LockKey, refusedName(err))
		}
		return nil, g.hide(ctx, p, wishes)
	}
	if err := g.mayHold(ctx, wishes...); err != nil { // the rules have changed during the wait
		g.takeBack(ctx, got)
		return nil, err
	}
	if got.queued > 0 {
		return &answer{
			Status: http.StatusAccepted, RetryAfter: "0",
			Body: Queued{"QUEUED", a.requestID, got.queued.Milliseconds()},
		}, nil
	}
	if got.first {
		g.auditHolds(r, "acquire", got.grants...)
	}
	all := make([]Lock, len(got.grants))
	for i := range got.grants {
		all[i] = *g.lockOf(&got.grants[i], got.minHold, g.boundTo(r), got.arrived)
	}
	out := &answer{Status: http.StatusOK, Body: shape(all)}
	if all[0].FencingToken != 0 && len(all) == 1 {
		out.FencingToken = strconv.FormatUint(all[0].FencingToken, 10)
	}
	return out, nil
}

// refusedName returns the name of a refusal; empty for errors without a name. It ignores a backend.CallError, which
// always has the name of the first request.
func refusedName(err error) string {
	var held *backend.HeldError
	var limit *backend.LimitError
	var cycle *backend.DeadlockError
	switch {
	case errors.As(err, &held):
		return held.Name
	case errors.As(err, &limit):
		return limit.Name
	case errors.As(err, &cycle) && len(cycle.Cycle) > 0:
		return cycle.Cycle[0].Wants
	}
	return ""
}

// takeBack releases grants that the rules deny by now. If a release fails, the hold expires with its TTL.
func (g *Gateway) takeBack(ctx context.Context, got *acquired) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
	defer cancel()
	for i := range got.grants {
		if _, err := g.free(ctx, got.grants[i], got.minHold); err != nil && !errors.Is(err, backend.ErrNotHeld) {
			g.o.Log.WarnContext(ctx, "a lock that the rules deny stays held for its TTL", logID(ctx), "lock",
				got.grants[i].Name, "error", err)
		}
	}
}

// lockOf returns a hold as its holder sees it. The request of the holder arrived at the instant arrived. Only the
// principal of may use the lock token; if of is empty, anybody with the token may.
func (g *Gateway) lockOf(grant *backend.Grant, minHold time.Duration, of string, arrived backend.Instant) *Lock {
	l := &Lock{
		LockKey: grant.Name, LockToken: g.sealer.Seal(grant, minHold, of), OwnerID: grant.Owner,
		TTLMillis: grant.TTL.Milliseconds(),
	}
	if grant.Token.Exclusive() {
		l.FencingToken, l.TokenSpace = grant.Token.Order(), g.driver.Describe().TokenSpace
	}
	l.ValidForMillis, l.ExpiresAt = g.validity(grant.SentAt, grant.TTL, arrived)
	return l
}

// validity returns the milliseconds for which a client may rely on a hold after it sent the request that arrived at the
// instant arrived. It also returns the wall-clock expiry of the hold in milliseconds since 1970, for people.
func (g *Gateway) validity(sentAt backend.Instant, ttl time.Duration, arrived backend.Instant) (int64, int64) {
	valid := sentAt.Add(g.driver.Describe().Validity(ttl)).Sub(arrived)
	expires := time.Now().Add(sentAt.Add(ttl).Sub(g.clock.Now()))
	return max(0, valid.Milliseconds()), expires.UnixMilli()
}

// readBody reads the whole body before the call begins. While a request waits, the server can then detect that the
// client disconnects.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, *Problem) {
	var text []byte
	var err error
	if n := r.ContentLength; n >= 0 && n <= maxBody {
		text = make([]byte, n)
		_, err = io.ReadFull(r.Body, text)
	} else {
		text, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	}
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, problem(codeTooLarge, "the body has more than 64 KiB")
	case err != nil:
		return nil, problem(codeRequest, "the body could not be read")
	}
	return text, nil
}
