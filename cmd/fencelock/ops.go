package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/metrics"
)

// ops are the options for probes and scrapes of a serving process.
type ops struct {
	listen string
	drain  time.Duration

	metrics  *metrics.Metrics // nil without a listener
	probes   answering
	draining chan struct{} // closed when the drain period begins
}

func (p *ops) define(o *options) {
	p.draining = make(chan struct{})
	o.StringVar(&p.listen, "ops-listen", "", "the `ADDRESS` of /livez, /readyz and /metrics, over plain HTTP without "+
		"certificates, such as 127.0.0.1:7483. They show no lock names and no owners")
	o.DurationVar(&p.drain, "drain", 0, "the time to keep serving after INT or TERM, while /readyz is 503, so that "+
		"load balancers stop sending requests. Use 10s on Kubernetes")
}

func (p *ops) check() error {
	if p.drain < 0 {
		return fmt.Errorf("--drain %v is negative", p.drain)
	}
	if p.listen == "" {
		return nil
	}
	if _, _, err := net.SplitHostPort(p.listen); err != nil {
		return fmt.Errorf("--ops-listen: %w", err)
	}
	return nil
}

var errStarting = errors.New("the process starts")

// serve opens the listener, if there is one. The process is live and not ready until p.probes is set. end closes the
// listener.
func (p *ops) serve(log *slog.Logger) (end func(), err error) {
	if p.listen == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", p.listen)
	if err != nil {
		return nil, fmt.Errorf("--ops-listen: %w", err)
	}
	p.metrics = metrics.New(version())
	p.probes.set(listeners.Probes(func(context.Context) error { return errStarting }))
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := listeners.ServeOps(ctx, l, listeners.Ops(&p.probes, p.metrics.Handler()), log); err != nil {
			log.Error("the listener of --ops-listen has failed", "err", err)
		}
	})
	fmt.Printf("fencelock: serving probes at http://%s\n", l.Addr())
	return func() { cancel(); serving.Wait() }, nil
}

// drained returns a context that ends when signalled has ended and the drain period is over. reset gives signals
// their default action back: the next one ends the process.
func (p *ops) drained(signalled context.Context, log *slog.Logger, reset func()) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(signalled))
	stop := context.AfterFunc(signalled, func() {
		reset()
		notify(notifyStopping)
		close(p.draining)
		if p.drain > 0 {
			log.Info("not ready: draining before the stop", "drain", p.drain)
			select {
			case <-time.After(p.drain):
			case <-ctx.Done():
			}
		}
		cancel(context.Cause(signalled))
	})
	return ctx, func() { stop(); cancel(nil) }
}

// answering is the replaceable handler of an HTTP server.
type answering struct {
	mu      sync.Mutex // protects the following field
	handler http.Handler
}

func (a *answering) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	h := a.handler
	a.mu.Unlock()
	h.ServeHTTP(w, r)
}

func (a *answering) set(h http.Handler) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.handler = h
}
