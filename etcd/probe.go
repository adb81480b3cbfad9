package etcd

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// probe is what the driver has learnt about the cluster, once, before the first grant.
type probe struct {
	mu    sync.Mutex // protects the following fields
	done  bool
	space string
}

func (p *probe) tokenSpace() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.space
}

// Ping implements backend.Pinger: a majority of the cluster answers. Servers with known lease defects are reported to
// Options.Logger, not refused.
func (d *Driver) Ping(ctx context.Context) error {
	if err := d.enter(); err != nil {
		return d.callError("ping", "", err)
	}
	defer d.work.Done()
	return d.callError("ping", "", d.ask(ctx))
}

// ready probes unless that was done.
func (d *Driver) ready(ctx context.Context) error {
	d.probe.mu.Lock()
	done := d.probe.done
	d.probe.mu.Unlock()
	if done {
		return nil
	}
	return d.ask(ctx)
}

func (d *Driver) ask(ctx context.Context) error {
	ctx, cancel := d.callContext(ctx)
	defer cancel()
	// A linearizable read shows that there is a leader, and that a user who may lock may read here.
	resp, err := d.client.Get(ctx, d.prefix)
	if err != nil && forbidden(err) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: %w", backend.ErrUnavailable, err) // a read does nothing, answered or not
	}
	d.probe.mu.Lock()
	first := !d.probe.done
	d.probe.done = true
	d.heard(resp.Header)
	d.probe.space = "etcd-" + strconv.FormatUint(resp.Header.ClusterId, 16)
	d.probe.mu.Unlock()
	if first && d.enter() == nil {
		go func() {
			defer d.work.Done()
			d.checkVersions()
		}()
	}
	return nil
}

// heard notes the raft term of an answer. The term of the cluster is not below it from then on.
func (d *Driver) heard(h *pb.ResponseHeader) {
	for {
		known := d.term.Load()
		if h.GetRaftTerm() <= known || d.term.CompareAndSwap(known, h.GetRaftTerm()) {
			return
		}
	}
}

// checkVersions asks each endpoint for its version, and warns. A server that does not answer is not this check's concern.
func (d *Driver) checkVersions() {
	for _, endpoint := range d.client.Endpoints() {
		ctx, cancel := context.WithTimeout(d.ctx, 2*time.Second)
		resp, err := d.client.Status(ctx, endpoint)
		cancel()
		if err != nil {
			continue
		}
		if fixed, ok := leaseDefects(resp.Version); !ok {
			d.log.Warn("fencelock/etcd: this server version can lose keys of live leases; use a fixed one",
				"endpoint", endpoint, "version", resp.Version, "fixed", fixed)
		}
	}
}

// leaseDefects reports whether a version has the fix for keys that are lost while their lease is renewed (etcd issue
// 20590), and the version of its line that has it.
func leaseDefects(version string) (fixed string, ok bool) {
	var n [3]int
	for i, part := range strings.SplitN(strings.SplitN(version, "-", 2)[0], ".", 3) {
		n[i], _ = strconv.Atoi(part)
	}
	switch {
	case n[0] > 3 || n[0] == 3 && n[1] > 6:
		return "", true
	case n[0] == 3 && n[1] == 6:
		return "3.6.5", n[2] >= 5
	case n[0] == 3 && n[1] == 5:
		return "3.5.23", n[2] >= 23
	case n[0] == 3 && n[1] == 4:
		return "3.4.38", n[2] >= 38
	}
	return "3.6.5", false
}

// troubleLasts is for how long after a failure every request asks its server to have a leader.
const troubleLasts = 30 * time.Second

// trouble remembers that something failed just now.
func (d *Driver) trouble() { d.troubled.Store(int64(d.clock.Now().Add(troubleLasts))) }

// request returns the context for one request. A server that lost its leader lets requests hang unless they ask it to have one;
// asking costs a tenth of a request on both sides, so it is done only after something has failed. Keepalives and watches
// always ask, and notice.
func (d *Driver) request(ctx context.Context) context.Context {
	if int64(d.clock.Now()) < d.troubled.Load() {
		return clientv3.WithRequireLeader(ctx)
	}
	return ctx
}

// unhurried is a context without the deadline that it ends at: gRPC would send it along, and the server would time it too.
type unhurried struct{ context.Context }

func (unhurried) Deadline() (time.Time, bool) { return time.Time{}, false }

// bounded returns the context for one request that is repeated if it takes longer than attemptTime.
func (d *Driver) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(d.request(ctx), attemptTime)
	return unhurried{ctx}, cancel
}
