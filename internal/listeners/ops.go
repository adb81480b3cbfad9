package listeners

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Paths of the ops listener.
const (
	LivePath    = "/livez"
	ReadyPath   = "/readyz"
	MetricsPath = "/metrics"
)

// Readiness is the basic answer of a process to /readyz.
type Readiness struct {
	Ready  bool   `json:"ready"`
	Detail string `json:"detail,omitempty"`
}

// Probes answers /livez and /readyz: the process is live, and ready while ready returns nil.
func Probes(ready func(context.Context) error) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+LivePath, func(w http.ResponseWriter, _ *http.Request) {
		WriteJSON(w, http.StatusOK, struct {
			Live bool `json:"live"`
		}{true})
	})
	mux.HandleFunc("GET "+ReadyPath, func(w http.ResponseWriter, r *http.Request) {
		if err := ready(r.Context()); err != nil {
			WriteJSON(w, http.StatusServiceUnavailable, Readiness{Detail: err.Error()})
			return
		}
		WriteJSON(w, http.StatusOK, Readiness{Ready: true})
	})
	return mux
}

// WriteJSON answers with an object of a type that encoding/json takes.
func WriteJSON(w http.ResponseWriter, status int, object any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(object) // the prober has gone
}

// Ops returns the handler of the ops listener: /livez and /readyz of probes, and /metrics.
func Ops(probes, metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+LivePath, probes)
	mux.Handle("GET "+ReadyPath, probes)
	mux.Handle("GET "+MetricsPath, metrics)
	return mux
}

// Bounds of the ops listener. Its connections are not in the budget of clients, so that no crowd of clients keeps a
// prober out: a process that fails its probes is killed.
const (
	opsConnections = 32
	opsShare       = 16 // of one address
	opsTime        = 30 * time.Second
	opsHeaders     = 16 << 10
)

// ServeOps serves plain HTTP at l until ctx ends. It closes l.
func ServeOps(ctx context.Context, l net.Listener, handler http.Handler, log *slog.Logger) error {
	s := &http.Server{
		Handler: handler, ReadTimeout: opsTime, WriteTimeout: opsTime, IdleTimeout: opsTime, MaxHeaderBytes: opsHeaders,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	err := s.Serve(NewGate(opsConnections, opsShare, log).Admit(l, opsConnections, "probes and scrapes"))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
