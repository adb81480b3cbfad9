package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/doctor"
)

const doctorHelp = `Usage: fencelock doctor [options]

Asks each address of --backend separately, compares the replies, and reports contradictions that no client can detect:
two leaders, servers of different clusters, one server under two addresses, a copied or restored disk with another token
space, different session bounds, a schema of another version, settings that lose locks. It does not change the service.

The checks depend on the service:

  etcd        member, cluster, leader, alarms, token space, and the hash of all keys at one revision
  ZooKeeper   mode, token space, tick, and the session timeouts that each server grants
  PostgreSQL  system identifier, role, timeline, schema, fsync; every host of the URL, regardless of target_session_attrs
  Redis       role, eviction, durability; the masters that the Sentinels name; the state of each node of a cluster
  Redlock     the same, and whether two addresses lead to one server
  fencelock   see "fencelock help status"

Options:

{options}

Exit codes:

    0  no problem was found
   64  the command line is invalid, or the service has no addresses
   69  a problem was found; standard error names each in one line
`

// patient is the printed form of a member.
type patient struct {
	Address  string   `json:"address"`
	Server   string   `json:"server,omitempty"`
	Cluster  string   `json:"cluster,omitempty"`
	Role     string   `json:"role,omitempty"`
	Space    string   `json:"tokenSpace,omitempty"`
	Position string   `json:"position,omitempty"`
	Version  string   `json:"version,omitempty"`
	Facts    []string `json:"facts,omitempty"`
	Problems []string `json:"problems,omitempty"`
	Error    string   `json:"error,omitempty"`
}

func defineDoctor(o *options) func([]string) error {
	s := o.look("doctor")
	timeout := o.Duration("timeout", 3*time.Second, "the maximum `DURATION` to wait for replies")
	return func(args []string) error {
		err := s.parse(args)
		if err == nil && *timeout <= 0 {
			err = fmt.Errorf("--timeout %v: want more than 0s", *timeout)
		}
		return s.run(err, func(ctx context.Context) error { return s.doctor(ctx, *timeout) })
	}
}

func (s *lookSettings) doctor(ctx context.Context, timeout time.Duration) error {
	if scheme, _, _ := strings.Cut(s.backend, "://"); scheme == "fencelock" || scheme == "fencelocks" {
		admin, err := builtin.OpenAdmin(s.backend)
		if err != nil {
			return err
		}
		return s.status(ctx, admin, false)
	}
	asking, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	report, err := doctor.Examine(asking, s.backend)
	if err != nil {
		return err
	}
	out := s.newPrinter("ADDRESS", "ROLE", "SERVER", "CLUSTER", "TOKEN SPACE", "POSITION", "VERSION", "")
	for i := range report.Members {
		m := &report.Members[i]
		p := patient{m.Address, m.ID, m.Cluster, m.Role, m.Space, m.Position, m.Version, m.Facts, m.Problems, ""}
		if m.Err != nil {
			p.Role, p.Error = roleUnreachable, m.Err.Error()
		}
		row := []string{p.Address, p.Role, p.Server, p.Cluster, p.Space, p.Position, p.Version, strings.Join(p.Facts, ", ")}
		if err := out.print(&p, row); err != nil {
			return err
		}
	}
	problems := report.Diagnose()
	if err := s.tryClient(ctx, report); err != nil {
		problems = append(problems, "a client cannot use the service: "+err.Error())
	}
	wrong := []error{out.flush()}
	for _, p := range problems {
		wrong = append(wrong, errors.New(p))
	}
	return errors.Join(wrong...)
}

// tryClient opens a driver, which checks more than an examiner. A service where no client has made a token space yet
// stays without one, and a service that does not answer has been reported.
func (s *lookSettings) tryClient(ctx context.Context, r *doctor.Report) error {
	if !slices.ContainsFunc(r.Members, func(m doctor.Member) bool { return m.Err == nil && (m.Space != "" || r.NoTokens) }) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	d, err := backend.Open(ctx, s.backend)
	if err != nil {
		return err
	}
	return d.Close(ctx)
}
