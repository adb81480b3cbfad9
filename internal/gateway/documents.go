package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"html/template"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/listeners"
)

func typeOf[T any]() reflect.Type { return reflect.TypeFor[T]() }

// Ready describes the backend, and the guarantees for a client of several replicas.
type Ready struct {
	Ready        bool    `json:"ready"`
	Backend      string  `json:"backend" doc:"The name of the backend's driver"`
	Exclusion    string  `json:"exclusion" doc:"The basis of mutual exclusion, such as quorum"`
	Fencing      bool    `json:"fencing" doc:"Whether grants have fencing tokens"`
	HoldsOutlive bool    `json:"holdsOutliveReplica" doc:"Whether another replica can renew a hold, even if the replica that acquired it has stopped. Otherwise the hold ends one TTL after its replica"`
	MinTTLMillis float64 `json:"minTtlMillis" doc:"The minimum TTL of the backend"`
	MaxTTLMillis float64 `json:"maxTtlMillis,omitempty" doc:"The maximum TTL of the backend; absent if there is none"`
	TTLStep      float64 `json:"ttlStepMillis" doc:"TTLs are multiples of this duration"`
	Detail       string  `json:"detail,omitempty"`
}

// Live is the answer of the liveness probe.
type Live struct {
	Live bool `json:"live"`
}

func (g *Gateway) probes(api huma.API) {
	huma.Register(api, operation(api, http.MethodGet, livePath, "livez", "Tell whether the process serves", nil),
		func(context.Context, *struct{}) (*body[Live], error) { return &body[Live]{Live{true}}, nil })
	huma.Register(api,
		operation(api, http.MethodGet, readyPath, "readyz", "Tell whether the lock service can be reached",
			map[int]any{200: Ready{}, 503: Ready{}}),
		func(ctx context.Context, _ *struct{}) (*answer, error) {
			out := g.ready(ctx)
			if !out.Ready {
				return &answer{Status: http.StatusServiceUnavailable, Body: out}, nil
			}
			return &answer{Status: http.StatusOK, Body: out}, nil
		})
}

// draining reports whether the process is about to stop.
func (g *Gateway) draining() bool {
	select {
	case <-g.o.Draining:
		return true
	default: // also for a nil channel
		return false
	}
}

func (g *Gateway) ready(ctx context.Context) Ready {
	var err error
	if d, ok := backend.As[backend.Pinger](g.driver); ok {
		ctx, cancel := context.WithTimeout(ctx, sendTime/2)
		defer cancel()
		err = d.Ping(ctx)
	}
	about := g.driver.Describe()
	out := Ready{
		Ready: err == nil, Backend: about.Name, Exclusion: about.Exclusion.String(),
		Fencing: about.Capabilities.Has(backend.CapFencing), HoldsOutlive: g.wanders,
		MinTTLMillis: inMillis(about.MinTTL), MaxTTLMillis: inMillis(about.MaxTTL),
		TTLStep: max(inMillis(about.TTLGranularity), 1),
	}
	switch {
	case err != nil:
		out.Detail = err.Error()
	case g.closing.Err() != nil, g.draining():
		out.Ready, out.Detail = false, "the gateway is stopping"
	default:
		_, err := g.history.Now()
		if err == nil && g.o.Grants != nil {
			err = g.o.Grants()
		}
		if err != nil {
			out.Ready, out.Detail = false, err.Error()
		}
	}
	return out
}

// Unready returns a handler for the time before there is a driver: the process is live, but every call fails with the
// error of why, which is never nil.
func Unready(why func() error) http.Handler {
	mux := listeners.Probes(func(context.Context) error { return why() })
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		write(w, problem(codeUnavailable, why().Error()).retry(comeAgain))
	})
	return mux
}

// inMillis returns a duration in milliseconds, with fractions.
func inMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// trueHeaders adds the headers of each answer to the specification. It also allows additional members in responses,
// since a client ignores members that it does not know.
func trueHeaders(spec *huma.OpenAPI) {
	for _, item := range spec.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Delete} {
			if op == nil {
				continue
			}
			for status, r := range op.Responses {
				retry := r.Headers[headerRetry]
				r.Headers = map[string]*huma.Header{
					requestIDHeader: inHeader(huma.TypeString, "The id of the request in the gateway's log"),
				}
				switch {
				case status == "202":
					r.Headers[headerRetry] = inHeader(huma.TypeInteger, "0: retry immediately")
				case status[0] == '4' || status[0] == '5':
					if retry != nil {
						r.Headers[headerRetry] = retry
					}
				}
				if op.OperationID == "acquire" && status == "200" {
					r.Headers[headerToken] = inHeader(huma.TypeInteger, "The fencingToken of the body")
				}
				if op.OperationID == "watch" && status == "200" {
					r.Headers[headerReplay] = inHeader(huma.TypeString, "none: events have no ids, and since is refused")
				}
				if op.OperationID == "get" && (status == "200" || status == "304" || status == "404") {
					r.Headers[headerETag] = inHeader(huma.TypeString, "Identifies the state, for If-None-Match and If-Match")
				}
			}
		}
	}
	for name, schema := range spec.Components.Schemas.Map() {
		if !strings.HasSuffix(name, "Body") && name != "Item" { // Item is part of the body of acquireAll
			schema.AdditionalProperties = nil
		}
	}
}

// documents serves the specification, and a self-contained page generated from it.
func (g *Gateway) documents(mux *table, spec *huma.OpenAPI) {
	text, err := specification(spec)
	if err != nil {
		panic(err) // impossible: all types are in this package
	}
	page := docsPage(spec)
	serve := func(contentType string, text []byte) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
			_, _ = w.Write(text) // an error means that the client has disconnected
		}
	}
	mux.HandleFunc("GET "+specificationPath, serve("application/openapi+json", text))
	mux.HandleFunc("GET "+docsPath, serve("text/html; charset=utf-8", page))
}

// specification returns the OpenAPI document, indented.
func specification(spec *huma.OpenAPI) ([]byte, error) {
	raw, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return nil, err
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

var docsTemplate = template.Must(template.New("docs").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{.Title}}</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
code { background: #eee } table { border-collapse: collapse } td { padding: .1em 1em .1em 0; vertical-align: top }
</style>
<h1>{{.Title}}</h1><p>{{.About}} The specification: <a href="/openapi.json">openapi.json</a></p>
{{range .Calls}}<h2><code>{{.Method}} {{.Path}}</code></h2><p>{{.Summary}}</p>
<table>{{range .Fields}}<tr><td><code>{{.Name}}</code><td>{{.In}}<td>{{.About}}{{end}}</table>
<p>Answers: {{range .Answers}}{{.}} {{end}}</p>
{{end}}</html>
`))

type docsField struct{ Name, In, About string }

type docsCall struct {
	Method, Path, Summary string
	Fields                []docsField
	Answers               []string
}

func docsPage(spec *huma.OpenAPI) []byte {
	var calls []docsCall
	for _, path := range slices.Sorted(maps.Keys(spec.Paths)) {
		item := spec.Paths[path]
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Delete} {
			if op != nil {
				calls = append(calls, docsOf(spec, path, op))
			}
		}
	}
	var out bytes.Buffer
	err := docsTemplate.Execute(&out,
		map[string]any{"Title": spec.Info.Title, "About": spec.Info.Description, "Calls": calls})
	if err != nil {
		panic(err) // impossible: the template is in this package
	}
	return out.Bytes()
}

func docsOf(spec *huma.OpenAPI, path string, op *huma.Operation) docsCall {
	call := docsCall{
		Method: op.Method, Path: path, Summary: op.Summary, Answers: slices.Sorted(maps.Keys(op.Responses)),
	}
	for _, p := range op.Parameters {
		call.Fields = append(call.Fields, docsField{p.Name, p.In, p.Description})
	}
	fields := func(media map[string]*huma.MediaType, in string) {
		for _, m := range media {
			s := m.Schema
			if s != nil && s.Ref != "" {
				s = spec.Components.Schemas.SchemaFromRef(s.Ref)
			}
			if s == nil {
				continue
			}
			for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
				about := s.Properties[name].Description
				if slices.Contains(s.Required, name) && in == "body" {
					about += " (required)"
				}
				call.Fields = append(call.Fields, docsField{name, in, about})
			}
		}
	}
	if op.RequestBody != nil {
		fields(op.RequestBody.Content, "body")
	}
	for _, status := range []string{"200", "202"} {
		if r := op.Responses[status]; r != nil {
			fields(r.Content, status)
		}
	}
	return call
}
