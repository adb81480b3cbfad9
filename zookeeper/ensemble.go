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

// readConfig learns how many servers vote. Who may not read that learns nothing.
func (s *session) readConfig(ctx context.Context) error {
	text, err := do(ctx, s, nil, func(c *zk.Conn) ([]byte, error) {
		data, _, err := c.Get(configNode)
		return data, err
	})
	switch {
	case errors.Is(err, zk.ErrNoAuth), errors.Is(err, zk.ErrNoNode):
		return nil
	case err != nil:
		return err
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.d.voters = max(1, voters(string(text)))
	return nil
}

// voters counts the participants in lines such as server.1=host:2888:3888:participant;0.0.0.0:2181.
func voters(config string) (n int) {
	for line := range strings.Lines(config) {
		member, _, _ := strings.Cut(line, ";")
		if strings.HasPrefix(member, "server.") && !strings.HasSuffix(strings.TrimSpace(member), ":observer") {
			n++
		}
	}
	return n
}

// connectProbe makes a session that is no slot's. The caller ends it, also after an error.
func (d *Driver) connectProbe(ctx context.Context) (*session, error) {
	s := d.newSession(d.minTTL())
	s.probe = true
	return s, s.connect(ctx)
}

// checkTick refuses servers whose tickTime is longer than Options.Tick, once for all sessions: the shortest session
// that a server grants has two ticks, unless its minSessionTimeout is set otherwise.
func (d *Driver) checkTick(ctx context.Context) error {
	if d.tickIsGood.Load() {
		return nil
	}
	s, err := d.connectProbe(ctx)
	defer s.end(backend.ReasonClosed)
	if err != nil {
		return err
	}
	if tick := s.ttl / 2; tick > d.o.Tick {
		return &backend.ConfigError{
			Setting: "Options.Tick (tick in a URL)", Value: d.o.Tick.String(), Want: tick.String() + " or more",
			Why: "the servers grant no session of less than " + s.ttl.String() + ", which is two of their ticks " +
				"unless minSessionTimeout is set; with a shorter one a hold could be believed for longer than its session " +
				"lasts",
		}
	}
	d.tickIsGood.Store(true)
	return nil
}

// exclusion tells what the exclusion rests on. Before the ensemble is known, that of one server is claimed. Whether
// servers wait for the disk (forceSync) they tell no client.
func (d *Driver) exclusion() backend.Exclusion {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.voters > 1 {
		return backend.ExclusionQuorum
	}
	return backend.ExclusionDurableServer
}
