// This file reads the servers' properties: the number of voters, by which Describe declares a quorum, and the length
// of their tick, on which the margin of every hold rests. Neither is part of ZooKeeper's protocol for clients. The
// members are read from the node that reconfiguration uses; the tick is derived from the shortest session that a
// server grants.

package zookeeper

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// configNode lists the members of the ensemble; it is empty for a standalone server.
const configNode = "/zookeeper/config"

// readConfig reads the number of voting servers. If the user has no right to read it, one durable server is declared:
// the weaker claim.
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

// connectProbe makes a session that no call shares and that is not in Sessions: it claims no zxid and asks for a
// timeout of 1 ms (see wire.Write). A server that has lost its history would refuse a session that claims more. The
// caller ends it, even after an error.
func (d *Driver) connectProbe(ctx context.Context) (*session, error) {
	s := d.newSession(d.minTTL())
	s.probe = true
	return s, s.connect(ctx)
}

// checkTick refuses a server with a tickTime longer than Options.Tick. The shortest session that a server grants has
// two ticks, unless its minSessionTimeout is set otherwise. Options.Tick is not trusted unchecked: with a tick below
// the servers', a hold could be valid for longer than its session.
func (d *Driver) checkTick(ctx context.Context, address string) error {
	shortest, err := d.granted(ctx, address, time.Millisecond)
	if err != nil {
		return err
	}
	if tick := shortest / 2; tick > d.o.Tick {
		return &backend.ConfigError{
			Setting: "Options.Tick (tick in a URL)", Value: d.o.Tick.String(), Want: tick.String() + " or more",
			Why: "the servers grant no session of less than " + shortest.String() + ", which is two of their ticks " +
				"unless minSessionTimeout is set; with a shorter one a hold could be believed for longer than its " +
				"session lasts",
		}
	}
	return nil
}

// examine refuses a server on which the session must not continue: it would end the session before its TTL is over, or
// has a longer tick. A server applies its own limits to every session that connects to it, and the leader uses the
// result from then on. So the server is asked before it sees the session: the answer to the session's own request may
// be lost, and its holds would be valid for longer than it lives.
func (s *session) examine(ctx context.Context, address string) error {
	checks := []func() error{
		func() error { return s.d.checkTick(ctx, address) },
		func() error {
			longest, err := s.d.granted(ctx, address, s.ttl)
			if err == nil && longest < s.ttl {
				err = tooLong(s.ttl, longest)
			}
			return err
		},
	}
	errs := make([]error, len(checks))
	sideBySide(len(checks), func(i int) { errs[i] = checks[i]() })
	return cmp.Or(errs...)
}

// tooLong is the error of a TTL for which the servers grant no session.
func tooLong(ttl, longest time.Duration) error {
	return &backend.InvalidError{
		Kind: backend.ErrInvalidTTL, What: "TTL", Value: ttl.String(),
		Why: fmt.Sprintf("the servers grant no session of more than %v (maxSessionTimeout, or 20 times tickTime)",
			longest),
	}
}

// granted returns the timeout that a server grants for the requested one: that timeout, or the nearest bound. It makes
// a session for this on a separate connection, and ends it.
func (d *Driver) granted(ctx context.Context, address string, ask time.Duration) (time.Duration, error) {
	conn, err := d.connect(ctx, "tcp", address)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	const version, zxid, session, password, closeSession = 0, 0, 0, 16, -11
	var request []byte
	for _, field := range []any{
		uint32(4 + 8 + 4 + 8 + 4 + password), uint32(version), uint64(zxid), uint32(ask.Milliseconds()),
		uint64(session), uint32(password), [password]byte{},
	} {
		request, _ = binary.Append(request, binary.BigEndian, field)
	}
	var answer [headBytes]byte
	if _, err = conn.Write(request); err == nil {
		_, err = io.ReadFull(conn, answer[:])
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return 0, fmt.Errorf("%s did not answer the connect request: %w", address, kit.Ended(ctx))
	case err != nil:
		return 0, fmt.Errorf("%s did not answer the connect request: %w", address, err)
	case binary.BigEndian.Uint32(answer[:]) > maxHello:
		return 0, errNoZooKeeper
	}
	// Without this request the session ends with its timeout.
	_, _ = io.CopyN(io.Discard, conn, 4+int64(binary.BigEndian.Uint32(answer[:]))-headBytes)
	end := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, 8), 1)
	_, _ = conn.Write(binary.BigEndian.AppendUint32(end, closeSession&math.MaxUint32))
	return time.Duration(int32(binary.BigEndian.Uint32(answer[8:]))) * time.Millisecond, nil
}

// exclusion returns the basis of the exclusion. Before the ensemble is known, one server is assumed. Clients cannot
// read whether servers wait for the disk (forceSync), so the operator has to guarantee that (see the package comment).
func (d *Driver) exclusion() backend.Exclusion {
	if d.quorum.Load() {
		return backend.ExclusionQuorum
	}
	return backend.ExclusionDurableServer
}
