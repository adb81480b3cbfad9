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

// Service is one fresh lock service, and what can be done to it. Driver, Client and Open must be set; each further
// field adds kinds of faults, see Kinds. Nodes are numbered from 0. All functions are safe for concurrent use.
type Service struct {
	Driver string // for the summary: "etcd"

	// Client makes the paths of one more client, over links of its own, and returns what Open needs to go there.
	Client func(t testing.TB) (target string, links fault.Links)

	// Open opens a driver. A child process opens with the function that its TestMain gave to Role; both are the same in
	// most tests. A service that is not there yet, or is being broken, may answer with an error: it is asked again.
	Open func(ctx context.Context, target string) (backend.Driver, error)

	// Processes is how many clients run in a process of their own, which Role makes of the test binary, and Inside how
	// many run in that of the test. Default 3 and 2. Negative: none.
	Processes, Inside int

	// TTL of all locks. Default 2 s.
	TTL time.Duration

	// Nodes is how many nodes the service has. Default 1.
	Nodes int

	// Kill ends a node without warning (SIGKILL), Start starts it again with what it kept, and returns when it serves;
	// that must be within the driver's promise. Pause freezes a node, Resume ends that. Start and Resume of a node that
	// runs do nothing.
	Kill, Start, Pause, Resume func(ctx context.Context, node int) error

	// Probe asks a node whether it answers, past all links, and tells what its process has in common with none of its
	// former ones, or "" if that is not known. It is how a run knows that a node was really killed or paused.
	Probe func(ctx context.Context, node int) (process string, err error)

	// Leader waits for a leader of a term after the given one that a majority follows.
	Leader func(ctx context.Context, after uint64) (node int, term uint64, err error)

	// Cut keeps back what node from sends to node to, and nothing else; Heal ends every Cut. Said returns how many
	// bytes node from has sent to node to, delivered or not.
	Cut  func(from, to int)
	Heal func()
	Said func(from, to int) int64

	// Leftovers lists what the service still keeps of the drivers'. Nil: not checked.
	Leftovers func() ([]string, error)

	// Logs returns the end of each server's log, by a name that can be that of a file. Nil: none.
	Logs func(ctx context.Context) map[string]string

	// More are kinds of this service alone: see NewKind and NewLapse.
	More []Kind

	caps backend.Capabilities // of the driver, once it is open
}

// quorum reports whether the service goes on when one of its nodes does not.
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

// tierOf is the highest tier that the driver serves.
func tierOf(d backend.Driver) fencelock.Tier {
	if _, promises := d.(backend.FencingDriver); promises && d.Describe().Capabilities.Has(backend.CapFencing) {
		return fencelock.Correctness
	}
	return fencelock.Efficiency
}

// open opens a driver, and tries again until ctx ends: a client may come while something is broken.
func open(ctx context.Context, opener func(context.Context, string) (backend.Driver, error),
	target string) (backend.Driver, error) {
	for {
		d, err := opener(ctx, target)
		if err == nil || ctx.Err() != nil {
			return d, err
		}
		pause(ctx, 50*time.Millisecond) // nobody tells when the service is back
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

// Addresses makes what Service.Client returns of one address for each node: the target is the addresses with commas
// between them.
func Addresses(addrs []string, links fault.Links) (target string, same fault.Links) {
	return strings.Join(addrs, ","), links
}
