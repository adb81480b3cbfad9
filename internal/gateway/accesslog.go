package gateway

import (
	"cmp"
	"context"
	"crypto/rand"
	"log/slog"
	"net/http"
	"strings"
	"time"
)

// requestIDHeader names a request in the access log and in its answer.
const requestIDHeader = "X-Request-Id"

// maxRequestID bounds the id that a client, or a proxy in front, assigns to a request, in bytes.
const maxRequestID = 128

// idOf returns the id of a request: the client's id if it is short, printable and without spaces, or else a random id.
func idOf(r *http.Request) string {
	given := r.Header.Get(requestIDHeader)
	if given == "" || len(given) > maxRequestID {
		return rand.Text()
	}
	for _, c := range given {
		if c <= ' ' || c > '~' {
			return rand.Text()
		}
	}
	return given
}

// answeredWriter records the status of an answer, and its refusal.
type answeredWriter struct {
	http.ResponseWriter
	status int
	refused
}

func (w *answeredWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *answeredWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// logged assigns an id to each request and reports the request to Options.Observe and to the audit log. It logs a line
// for each answered request except for probes.
func (g *Gateway) logged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := idOf(r)
		w.Header().Set(requestIDHeader, id)
		r = g.identified(g.forwarded(r), id)
		ctx := r.Context()
		path := r.URL.Path
		quiet := path == livePath || path == readyPath || !g.o.AccessLog || !g.o.Log.Enabled(ctx, slog.LevelInfo)
		if quiet && g.o.Observe == nil && g.o.Audit == nil {
			next.ServeHTTP(w, r)
			return
		}
		began := time.Now()
		out := &answeredWriter{ResponseWriter: w}
		defer func() {
			g.auditRefusal(r, &out.refused)
			if g.o.Observe != nil {
				route := r.Pattern[max(strings.IndexByte(r.Pattern, '/'), 0):] // empty if the request was refused before routing
				g.o.Observe(r.Method, route, cmp.Or(out.status, http.StatusOK), time.Since(began))
			}
			if quiet {
				return
			}
			g.o.Log.LogAttrs(ctx, slog.LevelInfo, "request",
				slog.String("id", id), slog.String("client", principalOf(r)), slog.String("method", r.Method),
				slog.String("path", r.URL.EscapedPath()), slog.Int("status", out.status),
				slog.Duration("took", time.Since(began)))
		}()
		next.ServeHTTP(out, r)
	})
}

// logID returns the id of ctx's request, for the log.
func logID(ctx context.Context) slog.Attr {
	return slog.String("id", incomingOf(ctx).id)
}
