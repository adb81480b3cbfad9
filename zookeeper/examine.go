package zookeeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/doctor"
)

func init() { doctor.Register(examine, "zk", "zookeeper", "zks") }

// leaderless is the role of a server that is in no quorum.
const leaderless = "leaderless"

// longestAsked is a session timeout that no server grants. The granted one is the maximum of the server.
const longestAsked = 24 * time.Hour

// examine asks every address of a URL separately: its mode and zxid, the token space, and which session timeouts it
// grants. Servers of one ensemble that grant different timeouts are a problem: a session that moves to another server
// would end earlier than its client assumes.
func examine(ctx context.Context, rawURL string) (*doctor.Report, error) {
	addrs, o, _, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	o.Logger = slog.New(slog.DiscardHandler)
	bounds := make([]string, len(addrs))
	r := &doctor.Report{Members: doctor.Ask(ctx, addrs, func(ctx context.Context, i int) (m doctor.Member, err error) {
		m, bounds[i], err = New(addrs[i:i+1], o).service.report(ctx)
		return m, err
	})}
	for i := range r.Members {
		for j := range i {
			if bounds[i] != "" && bounds[j] != "" && bounds[i] != bounds[j] {
				r.Problems = append(r.Problems, fmt.Sprintf("%s grants %s, and %s grants %s: give all servers the same tickTime, "+
					"minSessionTimeout and maxSessionTimeout", addrs[j], bounds[j], addrs[i], bounds[i]))
			}
		}
	}
	return r, nil
}

// report asks the only server. The second result describes the session timeouts that it grants.
func (e *service) report(ctx context.Context) (m doctor.Member, bounds string, err error) {
	if m, err = e.serverState(ctx); err != nil || m.Role == leaderless {
		return m, "", err
	}
	shortest, longest := e.question(ctx, e.addrs[0], time.Millisecond), e.question(ctx, e.addrs[0], longestAsked)
	for _, s := range []*session{shortest, longest} {
		defer func() { _ = e.End(context.WithoutCancel(ctx), s) }()
		if err := s.opened(ctx); err != nil {
			return m, "", err
		}
	}
	bounds = fmt.Sprintf("sessions of %v to %v", shortest.ttl, longest.ttl)
	m.Facts = append(m.Facts, bounds)
	if tick := shortest.ttl / 2; tick > e.o.Tick {
		m.Problems = append(m.Problems, fmt.Sprintf("has a tick of %v, longer than the option tick=%v", tick, e.o.Tick))
	}
	replies, err := shortest.do(ctx, getData(e.root, false), getData(configNode, false))
	if err != nil {
		return m, bounds, err
	}
	root, err := replies[0].node()
	switch {
	case errors.Is(err, codeNoNode):
		m.Facts = append(m.Facts, "no token space yet")
	case err != nil:
		m.Facts = append(m.Facts, "token space not readable: "+err.Error())
	default:
		var v rootValue
		if err := json.Unmarshal(root.data, &v); err != nil || v.Space == "" {
			m.Problems = append(m.Problems, fmt.Sprintf("has %.64q as the token space", root.data))
		}
		m.Space = v.Space
	}
	if config, err := replies[1].node(); err == nil {
		m.Facts = append(m.Facts, fmt.Sprintf("%d voting members", max(1, voters(string(config.data)))))
	}
	return m, bounds, nil
}

// serverState asks the server for its mode and zxid with the command srvr, which servers execute unless their
// whitelist excludes it.
func (e *service) serverState(ctx context.Context) (m doctor.Member, err error) {
	conn, err := e.dial(ctx, e.addrs[0])
	if err != nil {
		return m, err
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return m, err
		}
	}
	if _, err := io.WriteString(conn, "srvr"); err != nil {
		return m, err
	}
	text, err := io.ReadAll(io.LimitReader(conn, 64<<10))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Zookeeper version":
			m.Version, _, _ = strings.Cut(value, "-")
		case "Mode":
			m.Role = value
		case "Zxid":
			m.Position = "zxid " + value
		}
	}
	switch {
	case m.Role == "read-only":
		m.Problems = append(m.Problems, "is read-only: it has lost the majority")
	case m.Role == "" && strings.Contains(string(text), "not currently serving"):
		m.Role = leaderless
		m.Problems = append(m.Problems, "serves nobody: it knows no leader")
	case m.Role == "":
		m.Facts = append(m.Facts, "mode unknown: the server does not execute srvr")
	}
	return m, nil
}
