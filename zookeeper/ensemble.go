// This file learns what the servers are: how many vote, by which Describe knows whether exclusion rests on a quorum,
// and how long their tick is, on which the margin of every hold rests. Neither is part of ZooKeeper's protocol for
// clients. The members are read from the node that reconfiguration uses; the tick is concluded from the shortest
// session that a server grants.

package zookeeper

import (
	"context"
	"errors"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// configNode is where the servers keep the members of the ensemble; a server that stands alone has nothing there.
const configNode = "/zookeeper/config"

// readConfig learns how many servers vote. A user who may not read that learns nothing, and one durable server is
// declared: the weaker claim.
func (s *session) readConfig(ctx context.Context) error {
	config, err := s.read(ctx, configNode, false)
	switch {
	case errors.Is(err, zk.ErrNoAuth), errors.Is(err, zk.ErrNoNode):
		// Nothing is known, and the weaker claim stays.
		return nil
	case err != nil:
		return err
	}
	s.d.quorum.Store(voters(string(config.data)) > 1)
	return nil
}

// voters counts the participants in lines such as server.1=host:2888:3888:participant;0.0.0.0:2181. Observers take no
// part in agreement and do not count.
func voters(config string) (n int) {
	for line := range strings.Lines(config) {
		member, _, _ := strings.Cut(line, ";")
		if strings.HasPrefix(member, "server.") && !strings.HasSuffix(strings.TrimSpace(member), ":observer") {
			n++
		}
	}
	return n
}

// connectProbe makes a session that no call shares and that Sessions does not know: it claims to have seen nothing and
// asks for a timeout of 1 ms (see wire.Write). A server that has forgotten would refuse one that claims more, and the
// timeout that is granted instead tells the servers' minimum. The caller ends it, also after an error.
func (d *Driver) connectProbe(ctx context.Context) (*session, error) {
	s := d.newSession(d.minTTL())
	s.probe = true
	return s, s.connect(ctx)
}

// checkTick refuses servers whose tickTime is longer than Options.Tick. The shortest session that a server grants has
// two ticks, unless its minSessionTimeout is set otherwise. Every session makes sure of it until one check has passed;
// after that it costs nothing. Trusting Options.Tick unseen was rejected: with a tick below the servers', a hold could
// be believed for longer than its session lasts.
func (d *Driver) checkTick(ctx context.Context) error {
	if d.tickIsGood.Load() {
		return nil
	}
	s, err := d.connectProbe(ctx)
	defer s.end(backend.ReasonClosed)
	if err != nil {
		return err
	}
	// The session was granted what the servers grant at least.
	if tick := s.ttl / 2; tick > d.o.Tick {
		return &backend.ConfigError{
			Setting: "Options.Tick (tick in a URL)", Value: d.o.Tick.String(), Want: tick.String() + " or more",
			Why: "the servers grant no session of less than " + s.ttl.String() + ", which is two of their ticks " +
				"unless minSessionTimeout is set; with a shorter one a hold could be believed for longer than its " +
				"session lasts",
		}
	}
	d.tickIsGood.Store(true)
	return nil
}

// exclusion tells what the exclusion rests on. Before the ensemble is known, one server is assumed. Whether
// servers wait for the disk (forceSync) they tell no client, so that this is a promise of the operator's (see the
// package comment).
func (d *Driver) exclusion() backend.Exclusion {
	if d.quorum.Load() {
		return backend.ExclusionQuorum
	}
	return backend.ExclusionDurableServer
}
