// This file reads the servers' properties: how many vote, by which Describe knows whether exclusion rests on a quorum,
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

// configNode lists the members of the ensemble; it is empty for a standalone server.
const configNode = "/zookeeper/config"

// readConfig learns how many servers vote. If the user may not read that, one durable server is
// declared: the weaker claim.
func (s *session) readConfig(ctx context.Context) error {
	config, err := s.read(ctx, configNode, false)
	switch {
	case errors.Is(err, zk.ErrNoAuth), errors.Is(err, zk.ErrNoNode):
		// The number is unknown, and the weaker claim stays.
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

// connectProbe makes a session that no call shares and that Sessions does not know: it claims no zxid and
// asks for a timeout of 1 ms (see wire.Write). A server that has forgotten would refuse a session that claims more, and
// the granted timeout is the servers' minimum. The caller ends it, also after an error.
func (d *Driver) connectProbe(ctx context.Context) (*session, error) {
	s := d.newSession(d.minTTL())
	s.probe = true
	return s, s.connect(ctx)
}

// checkTick refuses servers with a tickTime longer than Options.Tick. The shortest session that a server grants has
// two ticks, unless its minSessionTimeout is set otherwise. Every session makes sure of it until one check has passed;
// after that it is free. Options.Tick is not trusted unseen: with a tick below the servers', a hold could
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
	// The session was granted the servers' minimum.
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

// exclusion returns the basis of the exclusion. Before the ensemble is known, one server is assumed. Clients cannot
// read whether servers wait for the disk (forceSync), so the operator has to guarantee that (see the package comment).
func (d *Driver) exclusion() backend.Exclusion {
	if d.quorum.Load() {
		return backend.ExclusionQuorum
	}
	return backend.ExclusionDurableServer
}
