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

// Readiness is the answer to /readyz.
type Readiness struct {
	Ready  bool   `json:"ready"`
	Detail string `json:"detail,omitempty"`
}

// Probes returns a mux that serves /livez and /readyz. The process is always live, and ready while ready returns nil.
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

// WriteJSON answers with an object, whose type encoding/json must support.
func WriteJSON(w http.ResponseWriter, status int, object any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(object) // an error means that the client has disconnected
}

// Ops returns the handler of the ops listener, which serves /livez and /readyz with probes, and /metrics with metrics.
func Ops(probes, metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+LivePath, probes)
	mux.Handle("GET "+ReadyPath, probes)
	mux.Handle("GET "+MetricsPath, metrics)
	return mux
}

// Limits of the ops listener. Its connections do not count as client connections, so that many clients cannot keep a
// prober out: an orchestrator kills a process that fails its probes.
const (
	opsConnections = 32
	opsShare       = 16 // from one address
	opsTime        = 30 * time.Second
	opsHeaders     = 16 << 10
)

// ServeOps serves plain HTTP on l until ctx ends, and closes l.
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
