package nemesis

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// Service is one fresh lock service, with the means to break it. Driver, Client and Open must be set; each further
// field adds kinds of faults, see Kinds. Nodes are numbered from 0. All functions are safe for concurrent use.
type Service struct {
	Driver string // for the summary: "etcd"

	// Client makes the paths of a new client, over separate links, and returns the target for Open.
	Client func(t testing.TB) (target string, links fault.Links)

	// Open opens a driver. A child process uses the function that its TestMain passed to Client; in most tests both are
	// the same. Open may fail while the service is not ready or broken: it is then repeated.
	Open func(ctx context.Context, target string) (backend.Driver, error)

	// Processes is the number of clients in separate processes, which run the test binary in Role, and Inside the number
	// of clients in the test's process. Default 3 and 2. Negative: 0.
	Processes, Inside int

	// TTL of all locks. Default 2 s.
	TTL time.Duration

	// Nodes is the number of nodes of the service. Default 1.
	Nodes int

	// Kill ends a node without warning (SIGKILL), Start restarts it with its data, and returns when it serves;
	// that must be within the driver's promise. Pause freezes a node, Resume ends that. Start and Resume of a node that
	// runs have no effect.
	Kill, Start, Pause, Resume func(ctx context.Context, node int) error

	// Probe checks that a node answers, without its links, and returns a text that differs between its processes, or ""
	// if that is unknown. A run uses it to check that a node was really killed or paused.
	Probe func(ctx context.Context, node int) (process string, err error)

	// Leader waits until a majority follows a leader of a term after the given one.
	Leader func(ctx context.Context, after uint64) (node int, term uint64, err error)

	// Cut keeps back the messages from node from to node to, and only these; Heal ends every Cut. Said returns the
	// number of bytes that node from has sent to node to, delivered or not.
	Cut  func(from, to int)
	Heal func()
	Said func(from, to int) int64

	// RefuseRelease has the service refuse to release holds of one name (or of all), while it renews them: a revoked
	// right. RefuseWrites has it refuse all changes of locks: a read-only database, a changed password. Unlike a service
	// that is down, both return errors. They are the functions of conformance.Server.
	RefuseRelease, RefuseWrites func(t testing.TB, name string) (allow func())

	// Leftovers lists the drivers' remaining entries in the service. Nil: not checked.
	Leftovers func() ([]string, error)

	// Logs returns the end of each server's log, by a valid file name. Nil: no logs.
	Logs func(ctx context.Context) map[string]string

	// More are further kinds for this service alone: see NewKind and NewLapse.
	More []Kind

	caps backend.Capabilities // of the driver, once opened
}

// quorum reports whether the service survives the loss of one node.
func (s *Service) quorum() bool { return s.Nodes >= 3 }

// resolve fills in defaults.
func (s *Service) resolve() error {
	if s.Driver == "" || s.Client == nil || s.Open == nil {
		return errors.New("nemesis: Service.Driver, Client and Open must be set")
	}
	if s.TTL == 0 {
		s.TTL = 2 * time.Second
	}
	s.Nodes = max(s.Nodes, 1)
	defaultTo(&s.Processes, 3)
	defaultTo(&s.Inside, 2)
	if s.Processes+s.Inside < 3 {
		return errors.New("nemesis: less than three clients contend for too little")
	}
	return nil
}

func defaultTo(n *int, otherwise int) {
	switch {
	case *n == 0:
		*n = otherwise
	case *n < 0:
		*n = 0
	}
}

// tierOf returns the highest tier that the driver serves.
func tierOf(d backend.Driver) fencelock.Tier {
	if _, promises := d.(backend.FencingDriver); promises && d.Describe().Capabilities.Has(backend.CapFencing) {
		return fencelock.Correctness
	}
	return fencelock.Efficiency
}

// open opens a driver, with retries until ctx ends: a client may start during a fault.
func open(ctx context.Context, opener func(context.Context, string) (backend.Driver, error),
	target string) (backend.Driver, error) {
	for {
		d, err := opener(ctx, target)
		if err == nil || ctx.Err() != nil {
			return d, err
		}
		pause(ctx, 50*time.Millisecond) // no notification when the service is back
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Addresses returns the results of Service.Client for one address per node: target is the addresses, separated by
// commas.
func Addresses(addrs []string, links fault.Links) (target string, same fault.Links) {
	return strings.Join(addrs, ","), links
}
