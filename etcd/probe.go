package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// This file checks that the cluster is fit for locks. The first call of a driver asks (begin, ask): a linearizable
// read that shows that a majority is there and that the user may read below the prefix, then the list of members,
// which tells a proxy from etcd and a single server from a cluster, then the token space. Meanwhile a goroutine asks
// the servers for their versions, and only warns. Ping repeats the check at any time.
//
// The rest of the file makes the context of every request: its bound, and whether it requires its server to have a
// leader.

// Ping reports whether a majority of the cluster answers, with the past that the driver knows. It returns when ctx
// ends; the first one reads the token space, or creates it. The error wraps backend.ErrUnavailable,
// backend.ErrMisconfigured for a user without rights or a proxy, backend.ErrHistoryLost, or
// backend.ErrClosed. Servers with known lease defects are reported to Options.Logger, not refused.
func (d *Driver) Ping(ctx context.Context) error {
	if err := d.enter(); err != nil {
		return d.callError("ping", "", err)
	}
	defer d.gate.Leave()
	return d.callError("ping", "", d.ask(ctx))
}

// ask is Ping for a call that is counted in. Every failure except a wrong setting and the loss of the past counts as
// ErrUnavailable, even if something was sent: a probe acquires no lock.
func (d *Driver) ask(ctx context.Context) error {
	ctx, cancel := d.gate.Bind(ctx)
	defer cancel()
	if err := d.history.err(); err != nil {
		return err
	}
	err := d.askSpace(ctx)
	if err != nil && !forbidden(err) && !errors.Is(err, backend.ErrHistoryLost) &&
		!errors.Is(err, backend.ErrMisconfigured) {
		// The probe acquires no lock, whatever the server did.
		return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	}
	return err
}

// askSpace is a linearizable read, which shows that there is a leader, and that a user who may lock may read here.
// The first one goes on to probe the cluster.
func (d *Driver) askSpace(ctx context.Context) error {
	// Known before the read was sent: the answer need not have a space that another call has read or planted since.
	known := d.history.tokenSpace().name != ""
	resp, err := d.get(ctx, d.spaceKey())
	if err != nil {
		return err
	}
	if known {
		return d.checkSpace(resp.Kvs)
	}
	// The order matters: a proxy must be refused before anything is written through it.
	if err := d.askMembers(ctx); err != nil {
		return err
	}
	if err := d.learnSpace(ctx, resp); err != nil {
		return err
	}
	// Only one goroutine for each driver, however many calls come first.
	d.checked.Do(func() { d.gate.Go(func(context.Context) { d.checkVersions() }) })
	return nil
}

// askMembers finds out whether the cluster is a single server, and whether etcd itself answers. It takes a second at
// most. A client that gets no answer, or may not list the members, assumes several.
func (d *Driver) askMembers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	resp, err := d.client.MemberList(ctx)
	if err != nil {
		d.members.again()
		return nil
	}
	// A proxy names itself as the only member, and knows no cluster.
	if resp.Header.GetClusterId() == 0 {
		return &backend.ConfigError{
			Setting: "endpoint", Value: "an etcd gRPC proxy", Want: "etcd itself",
			Why: "the proxy sends keepalives of its own, and its answers to ours do not prove when a lock ends",
		}
	}
	vote := voters(resp)
	d.single.Store(len(vote) == 1)
	d.members.note(vote)
	return nil
}

// voters returns the members that vote. A learner cannot lead either, so a server with learners is a single one.
func voters(resp *clientv3.MemberListResponse) []*pb.Member {
	return slices.DeleteFunc(resp.Members, (*pb.Member).GetIsLearner)
}

// checkVersions asks each endpoint for its version, and warns. It skips a server that does not answer within 2 s. It
// runs once for each driver, counted in at the gate, and ends with Close.
func (d *Driver) checkVersions() {
	for _, endpoint := range d.client.Endpoints() {
		// One after the other, each with a separate bound, at the endpoints that the client was given, not at all
		// members.
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
// 20590), and the first version of its line with the fix.
func leaseDefects(version string) (fixed string, ok bool) {
	var major, minor, patch int
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &major, &minor, &patch) // unreadable parts are 0
	first, known := map[int]int{4: 38, 5: 23, 6: 5}[minor]
	switch {
	case major > 3 || major == 3 && minor > 6:
		return "", true
	case major == 3 && known:
		return fmt.Sprintf("3.%d.%d", minor, first), patch >= first
	}
	return "3.6.5", false
}

// troubleLasts is the time after a failure for which every request requires its server to have a leader. It is longer
// than an election.
const troubleLasts = 30 * time.Second

// trouble remembers a recent failure. The senders of requests call it on failure or withdrawal: get, commit,
// withdraw, and a session for its lease and its keepalives. It costs a store.
func (d *Driver) trouble() { d.troubled.Store(int64(d.clock.Now().Add(troubleLasts))) }

// request returns the context for one request. A server that lost its leader lets requests hang unless they require a
// leader. That costs a tenth of a request on both sides, so requests do it only after a failure. Keepalives and
// watches always do, and notice first.
func (d *Driver) request(ctx context.Context) context.Context {
	if int64(d.clock.Now()) < d.troubled.Load() {
		return clientv3.WithRequireLeader(ctx)
	}
	return ctx
}

// unhurried is a context that hides its deadline. gRPC would send the deadline along, and the server would run a
// timer for it too; the end of the context reaches the server anyway.
type unhurried struct{ context.Context }

// Deadline reports no deadline.
func (unhurried) Deadline() (time.Time, bool) { return time.Time{}, false }

// bounded returns the context for one request that is repeated after callTime, and its cancel function.
func (d *Driver) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(d.request(ctx), callTime)
	return unhurried{ctx}, cancel
}
