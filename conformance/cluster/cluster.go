// Package cluster breaks a lock service with several nodes, while clients contend for its locks, and checks that no
// two clients hold the same lock at the same time. It is for the tests of drivers for a clustered service; package
// conformance has the tests with a single server.
//
//	func TestClusterFaults(t *testing.T) {
//		cluster.Run(t, func(t testing.TB) cluster.Harness { ... })
//	}
//
// Every fault has its own cluster. Rounds follow each other on the cluster without a pause for the clients:
//
//	rivals:  acquire, write, hold, release …            all the time, five clients, three names
//	fault:   one client holds a name ─ break ─ wait until its effect shows and the others go on ─ heal ─ all go on
//
// All calls are recorded, and package check then verifies the history: conflicting holds are never valid at the same
// time, tokens are unique and increase, no valid hold is reported lost, the service knows every hold that is valid
// before and after an inspection, every call ends, and a correct lock could have produced the history. A history with
// violations stays in a folder that the test names. The rivals also check:
//
//   - A guard admits every write of a holder, and refuses writes of overtaken holders.
//   - The fault happened: another leader, bytes held back, a reported loss.
//   - Calls that a majority can serve succeed during the fault, and all calls succeed after it.
//   - When all clients are closed the service has no entries.
//
// RunAll also runs the faults of Machines, for a harness that can break nodes in further ways. Run logs the faults
// that it does not run.
//
// FENCELOCK_ROUNDS, or ROUNDS of "make faults", is the number of rounds per fault, by default 2. Faults with variants
// alternate between them.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/internal/artifacts"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testfindings"
)

// Harness is one fresh cluster. All fields but Leftovers and Machines must be set. Nodes are numbered from 0.
type Harness struct {
	Nodes int

	// Client returns a new client, with connections to each node over a separate link. The suite closes the driver.
	Client func(t testing.TB) (backend.FencingDriver, fault.Links)

	// Kill ends a node without warning (SIGKILL), Start restarts it and returns when it serves. Pause freezes a
	// node.
	Kill, Start, Pause, Resume func(ctx context.Context, node int) error

	// Leader waits until a majority follows a leader of a term after the given one.
	Leader func(ctx context.Context, after uint64) (node int, term uint64, err error)
	// HasLeader reports whether a node knows a leader.
	HasLeader func(ctx context.Context, node int) (bool, error)

	// Cut keeps back the messages from node from to node to, and only these; Heal ends every Cut.
	Cut  func(from, to int)
	Heal func()
	// Said returns the number of bytes that node from has sent to node to, delivered or not.
	Said func(from, to int) int64

	// Leftovers lists the drivers' remaining entries in the service. Nil: not checked.
	Leftovers func() ([]string, error)

	// TTL of all locks. Default 2 s.
	TTL time.Duration

	// Machines has further faults of the nodes. Faults that need a nil field are not run.
	Machines
}

// The numbers of clients and names. Every client contends for every name.
const (
	clientCount = 5
	nameCount   = 3
)

// patience bounds the waits of a round for required events. It is far longer than a busy machine needs.
const patience = time.Minute

// Run breaks clusters that start makes, with every fault that needs no Machines, one subtest for each: Test…/<slug>.
// The subtests run concurrently within -parallel.
func Run(t *testing.T, start func(t testing.TB) Harness) {
	var left []string
	n := rounds(t)
	for _, f := range Faults() {
		if f.Needs != "" {
			left = append(left, f.Slug)
			continue
		}
		t.Run(f.Slug, func(t *testing.T) {
			t.Parallel()
			runFault(t, f, start(t), n)
		})
	}
	t.Logf("not run, since nobody has said how to do it to this cluster: %s", strings.Join(left, ", "))
}

// RunAll is Run with all faults, or only those with the given slugs. start may make a cluster specially for f.
func RunAll(t *testing.T, start func(t testing.TB, f Fault) Harness, slugs ...string) {
	n := rounds(t)
	for _, f := range Faults() {
		if len(slugs) > 0 && !slices.Contains(slugs, f.Slug) {
			continue
		}
		t.Run(f.Slug, func(t *testing.T) {
			t.Parallel()
			runFault(t, f, start(t, f), n)
		})
	}
}

// rounds returns the number of rounds per fault.
func rounds(t *testing.T) int {
	t.Helper()
	rounds := 2
	if text := os.Getenv("FENCELOCK_ROUNDS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("FENCELOCK_ROUNDS=%q is no positive number", text)
		}
		rounds = n
	}
	return rounds
}

// bench is a cluster with its clients.
type bench struct {
	Harness
	t      testing.TB
	n      int // number of the round
	rivals *rivals
	ended  []*fencelock.Client // all clients to close at the end
	links  []fault.Links       // of each client

	// The times from a leader's fault until another node led and the names without a hold across the fault were granted.
	recoveries []time.Duration
}

// runFault breaks h in rounds of f.
func runFault(t *testing.T, f Fault, h Harness, rounds int) {
	if missing := h.missing(f.Needs); missing != "" {
		t.Fatalf("%s needs Machines.%s, which the cluster does not have", f.Slug, missing)
	}
	if h.TTL == 0 {
		h.TTL = 2 * time.Second
	}
	b := &bench{Harness: h, t: t}
	var clients []rival
	for range clientCount {
		client, links := b.client()
		clients, b.links = append(clients, client), append(b.links, links)
	}
	var names []string
	for i := range nameCount {
		names = append(names, fmt.Sprintf("%s/%d", f.Slug, i))
	}
	b.rivals = startRivals(clients, names, h.TTL)
	begin, done := time.Now(), 0
	for done < rounds && !t.Failed() {
		b.n = done
		b.round(f)
		done++
	}
	b.finish()
	b.verdict(f, done, time.Since(begin))
}

// client makes a new client, which finish closes.
func (b *bench) client() (rival, fault.Links) {
	d, links := b.Client(b.t)
	c, err := fencelock.ForCorrectness(d, &fencelock.Options{TTL: b.TTL})
	if err != nil {
		b.t.Fatal(err)
	}
	b.ended = append(b.ended, c)
	return rival{c, d}, links
}

// verdict reports the results of all rounds.
func (b *bench) verdict(f Fault, rounds int, took time.Duration) {
	report := b.rivals.verify(b.t.Context())
	b.t.Logf("%s: %d rounds in %v, %v", f.Slug, rounds, took.Round(time.Second), report)
	fact := testfindings.ClusterFault{
		Slug: f.Slug, Rounds: rounds, Grants: report.Grants, Losses: report.Losses, Confirmed: report.confirmed,
		Violations: len(report.Violations), Overlap: report.Overlapped, Recoveries: len(b.recoveries),
	}
	if report.Margins > 0 {
		fact.Margin = &report.Margin
	}
	if n := len(b.recoveries); n > 0 {
		slices.Sort(b.recoveries)
		fact.MedianRecovery, fact.LongestRecovery = b.recoveries[n/2], b.recoveries[n-1]
		b.t.Logf("%s: the locks went on after %.2f s in the median of %d, %.2f s in 95 of 100, %.2f s at most", f.Slug,
			b.recoveries[n/2].Seconds(), n, b.recoveries[(n*95+99)/100-1].Seconds(), b.recoveries[n-1].Seconds())
	}
	testfindings.Write(b.t, fact)
	if len(report.Violations) > 0 {
		b.t.Error(report.Text())
	}
	if report.Grants < rounds*nameCount {
		b.t.Errorf("%d grants are too few to tell anything", report.Grants)
	}
	if b.t.Failed() || artifacts.Kept() {
		dir, err := artifacts.Dir(b.t, "cluster-"+f.Slug)
		if err == nil {
			err = report.Dump(dir)
		}
		b.t.Logf("the history is in %s, %v", dir, err)
	}
}

// round breaks the cluster once, and then checks that every client and every name gets a turn. If that fails during a
// stall of the machine, round repeats it, at most twice. It never excuses findings of the register or the history.
func (b *bench) round(f Fault) {
	begin := time.Now()
	excused, err := stallmeter.Fairly(b.TTL/2, func() error { return b.attempt(f) })
	stallmeter.Report(b.t, fmt.Sprintf("%s, round %d, after %v", f.Slug, b.n, time.Since(begin).Round(time.Millisecond)),
		excused, err)
}

func (b *bench) attempt(f Fault) error {
	ctx, cancel := context.WithTimeout(b.t.Context(), 3*patience)
	defer cancel()
	b.rivals.recorder.Fault(fmt.Sprintf("%s, round %d", f.Slug, b.n))
	err := f.run(ctx, b)
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, b.kept())
	}
	b.healAll(ctx)
	b.rivals.recorder.Healed(f.Slug)
	if err == nil {
		healed, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if err = b.rivals.everybody(healed); err != nil {
			err = fmt.Errorf("%w\n%s", err, b.kept())
		}
	}
	return errors.Join(err, stallmeter.Conclusive(b.rivals.register.alarm()))
}

// healAll ends all faults, which a failed round may have left.
func (b *bench) healAll(ctx context.Context) {
	b.Heal()
	for _, links := range b.links {
		links.Pass()
	}
	for i := range b.Nodes {
		if err := errors.Join(b.Resume(ctx, i), b.Start(ctx, i)); err != nil {
			b.t.Errorf("node %d: %v", i, err)
		}
	}
}

// kept describes the service's entries, which may explain why no client gets a turn.
func (b *bench) kept() string {
	if b.Leftovers == nil {
		return ""
	}
	left, err := b.Leftovers()
	if err != nil {
		return fmt.Sprintf("    what the service keeps is not known: %v", err)
	}
	slices.Sort(left)
	return "    the service keeps " + strings.Join(left, "\n                      ")
}

// finish ends the rivals, closes the clients, and checks for leftovers.
func (b *bench) finish() {
	b.rivals.stop()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), patience)
	defer cancel()
	for i, c := range b.ended {
		if err := c.Close(ctx); err != nil {
			b.t.Errorf("close client %d: %v", i, err)
		}
	}
	if b.Leftovers == nil || b.t.Failed() {
		return
	}
	for {
		left, err := b.Leftovers()
		if err == nil && len(left) == 0 {
			return
		}
		if ctx.Err() != nil {
			b.t.Errorf("all clients are closed and the service keeps %q, %v", left, err)
			return
		}
		pause(ctx, 50*time.Millisecond) // expiry is not reported
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
