package gateway

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"html/template"
	"net/http"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// The web page shows the results of the calls in docs/HTTP.md, and makes no changes. It has no rights of its own: it
// cannot show data that the browser may not read over HTTP. It loads no files from other hosts.
//
//go:embed page
var pageFiles embed.FS

var pageTemplate = template.Must(template.ParseFS(pageFiles, "page/page.html"))

// pagePolicy lets the page run its module, use its style, and call this gateway. data: permits its empty icon.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"

const (
	pagePath    = "/"
	scriptPath  = "/page.js"
	stylePath   = "/page.css"
	servicePath = "/page/service"
)

// Service is the page's view of the members and the limits of a lock service.
type Service struct {
	Members []ServiceMember `json:"members,omitempty"`
	// MembersNote and LimitsNote name missing parts, with the reason.
	MembersNote string         `json:"membersNote,omitempty"`
	Limits      []ServiceLimit `json:"limits,omitempty"`
	LimitsNote  string         `json:"limitsNote,omitempty"`
}

// ServiceMember is one member of a cluster.
type ServiceMember struct {
	Address string `json:"address"`
	Role    string `json:"role"`
	Term    uint64 `json:"term,omitempty"`
	Applied uint64 `json:"applied,omitempty"`
	Version string `json:"version,omitempty"`
	Error   string `json:"error,omitempty"`
}

// ServiceLimit is one limit of a service, and its use.
type ServiceLimit struct {
	What  string `json:"what"`
	Used  int    `json:"used"`
	Limit int    `json:"limit"`
}

// page registers the web page, unless Options.NoPage is set.
func (g *Gateway) page(mux *table) {
	if g.o.NoPage {
		return
	}
	mux.HandleFunc("GET "+pagePath+"{$}", func(w http.ResponseWriter, _ *http.Request) {
		text, err := g.shell()
		if err != nil {
			write(w, problem(codeInternal, internalSentence))
			return
		}
		servePage(w, "text/html; charset=utf-8", text)
	})
	for path, file := range map[string]struct{ name, contentType string }{
		scriptPath: {"page/page.js", "text/javascript; charset=utf-8"},
		stylePath:  {"page/page.css", "text/css; charset=utf-8"},
	} {
		text, err := pageFiles.ReadFile(file.name)
		if err != nil {
			panic(err) // the file is embedded
		}
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { servePage(w, file.contentType, text) })
	}
	mux.HandleFunc("GET "+servicePath, func(w http.ResponseWriter, r *http.Request) {
		if _, err := g.reads(r.Context()); err != nil {
			write(w, problemOf(err))
			return
		}
		text, err := json.Marshal(g.service(r.Context()))
		if err != nil {
			panic(err) // impossible: all types are in this package
		}
		servePage(w, "application/json", text)
	})
}

func servePage(w http.ResponseWriter, contentType string, text []byte) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Security-Policy", pagePolicy)
	w.Header().Set("Referrer-Policy", "no-referrer")
	w.Header().Set("Cross-Origin-Opener-Policy", "same-origin")
	_, _ = w.Write(text) // an error means that the client has disconnected
}

// shell returns the page, without data, for the gateway's backend.
func (g *Gateway) shell() ([]byte, error) {
	about := g.driver.Describe()
	var out bytes.Buffer
	err := pageTemplate.Execute(&out, map[string]any{
		"Name": about.Name, "Version": g.o.Version, "Exclusion": about.Exclusion, "Shows": about.Shows,
		"Fences": about.Capabilities.Has(backend.CapFencing), "NoFencing": about.NoFencing,
		"List": about.Capabilities.Has(backend.CapList), "Replay": about.Capabilities.Has(backend.CapWatchReplay),
		"MinTTL": about.MinTTL, "MaxTTL": about.MaxTTL,
		"Waits": g.o.Limits.Waits, "WaitsPerPrincipal": g.o.Limits.ClientWaits,
	})
	return out.Bytes(), err
}

// service returns the members and the limits, or the reason why they are missing.
func (g *Gateway) service(ctx context.Context) Service {
	if g.o.Service == nil {
		return Service{
			MembersNote: "Only the bundled server tells its members here.",
			LimitsNote:  "Only a member of the bundled server tells its limits here.",
		}
	}
	ctx, cancel := context.WithTimeout(ctx, serviceTime)
	defer cancel()
	return g.o.Service(ctx)
}

// serviceTime is the maximum for the members' answers.
const serviceTime = 5 * time.Second
