package nemesis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/conformance/internal/artifacts"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// stepsPerEpoch is the number of steps until the clients change to new names: the search for an order of operations
// takes more than linear time.
const stepsPerEpoch = 4

// run is one service with its clients during the faults.
type run struct {
	Service
	plan    Plan
	t       testing.TB
	all     *collector
	clients []*client
	admin   backend.Driver
	slots   []slot
	epoch   int
	kinds   map[string]Kind
	played  []played // in this epoch

	result Result
}

// Play breaks a service as planned, and returns the result. It fails the test only if the run cannot start.
func Play(t testing.TB, s Service, p Plan) Result {
	t.Helper()
	if err := s.resolve(); err != nil {
		t.Fatal(err)
	}
	if p.Recovery == 0 {
		p.Recovery = 30 * time.Second
	}
	if p.Patience == 0 {
		p.Patience = patience
	}
	r := &run{Service: s, plan: p, t: t, all: newCollector(), kinds: map[string]Kind{}}
	ctx := t.Context()
	if err := r.start(ctx); err != nil {
		r.stop()
		t.Fatalf("nemesis: the run does not start: %v", err)
	}
	t.Log(r.result.Schedule)
	if lacks := r.lacks(); len(lacks) > 0 {
		t.Logf("these kinds do not apply, for lack of a hook or a capability: %s", strings.Join(lacks, ", "))
	}
	begin := time.Now()
	r.steps(ctx, begin)
	r.result.Took = time.Since(begin)
	r.stop()
	r.verify(ctx)
	r.leftovers(ctx)
	if len(r.result.Failures()) > 0 || artifacts.Kept() {
		r.dump(ctx)
	}
	return r.result
}

// start opens the service for the operator and for all clients, and draws the schedule.
func (r *run) start(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	target, _ := r.Client(r.t)
	if r.admin, err = open(ctx, r.Open, target); err != nil {
		return err
	}
	d := r.admin.Describe()
	r.caps, r.slots = d.Capabilities, slotsOf(d.Capabilities)
	kinds := slices.DeleteFunc(r.Service.kinds(r.plan.Reported), func(k Kind) bool {
		return r.plan.Kinds != nil && !slices.Contains(r.plan.Kinds, k.Slug)
	})
	if len(kinds) == 0 {
		return errors.New("there is nothing that can be done to the service")
	}
	for _, k := range kinds {
		r.kinds[k.Slug] = k
	}
	r.result = Result{
		Driver: r.Driver, Reported: r.plan.Reported, Kinds: map[string]*KindResult{}, Seed: r.plan.Seed,
		Planned:  r.plan.Duration,
		Schedule: NewSchedule(r.Driver, r.plan.Seed, r.plan.Duration, r.TTL, kinds, r.Nodes, !r.plan.OneByOne),
	}
	for i := range r.Processes + r.Inside {
		r.clients = append(r.clients, newClient(r.t, &r.Service, r.all, i, i < r.Processes, r.plan.Seed))
	}
	return r.eachClient(func(c *client) error {
		_, err := c.start(ctx, r.epoch)
		return err
	})
}

func (r *run) eachClient(act func(*client) error) error {
	errs := make([]error, len(r.clients))
	var all sync.WaitGroup
	for i, c := range r.clients {
		all.Go(func() { errs[i] = act(c) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// steps executes the schedule until a step fails or a violation is found.
func (r *run) steps(ctx context.Context, begin time.Time) {
	if err := r.everybody(ctx, "before the first fault"); err != nil {
		r.failed(err)
		return
	}
	latest := begin.Add(r.plan.Duration*3/2 + r.plan.Recovery)
	for i, s := range r.result.Schedule.Steps {
		if i > 0 && i%stepsPerEpoch == 0 {
			r.nextEpoch(ctx)
		}
		if len(r.result.Failures()) > 0 || time.Now().After(latest) {
			return
		}
		pause(ctx, time.Until(begin.Add(s.At)))
		excused, err := stallmeter.Fairly(r.TTL/2, func() error { return r.step(ctx, s) })
		for _, text := range excused {
			r.t.Logf("step %d, %v failed while the machine stood still: %s", i, s, text)
		}
		if err != nil {
			r.failed(fmt.Errorf("step %d, %v: %w", i, s, err))
			return
		}
		r.result.Steps++
	}
}

// step executes one step, and then checks that every client and every name gets a turn.
func (r *run) step(ctx context.Context, s Step) error {
	shared := &step{victims: map[*client]bool{}, kept: map[string]bool{}, nodes: map[int]bool{}}
	var attacks []*attack
	for _, d := range s.Draws {
		a := &attack{run: r, Draw: d, kind: r.kinds[d.Kind], step: shared}
		if err := a.prepare(ctx); err != nil {
			return fmt.Errorf("before the fault: %w", err)
		}
		attacks = append(attacks, a)
	}
	r.played = append(r.played, played{since: r.all.marks.Now(), step: s})
	errs := make([]error, 2*len(attacks))
	var all sync.WaitGroup
	for i, a := range attacks {
		all.Go(func() {
			pause(ctx, a.After)
			r.all.marks.Fault(a.String())
			if errs[i] = a.kind.strike(a, ctx); errs[i] != nil {
				errs[i] = fmt.Errorf("%v: %w", a, errs[i])
			}
		})
	}
	all.Wait()
	err := errors.Join(errs...)
	r.healAll(ctx)
	healed := time.Now()
	r.all.marks.Healed(s.String())
	for i, a := range attacks {
		all.Go(func() { errs[len(attacks)+i] = a.finish(ctx) })
	}
	if err == nil {
		err = r.everybody(ctx, "after the fault")
	}
	recovered := time.Since(healed)
	all.Wait()
	if err := errors.Join(err, errors.Join(errs[len(attacks):]...)); err != nil {
		return err
	}
	for _, a := range attacks {
		r.result.count(a, recovered)
	}
	return nil
}

// everybody waits until each client and each name had a turn.
func (r *run) everybody(ctx context.Context, when string) error {
	ctx, cancel := context.WithTimeout(ctx, r.plan.Recovery)
	defer cancel()
	var wants []want
	for _, s := range r.slots {
		name := s.name(r.epoch)
		wants = append(wants, want{name, func(g grantee) bool { return g.name == name }})
	}
	for _, c := range r.clients {
		id, prefix := c.id(), slot{}.name(r.epoch)
		wants = append(wants, want{"client " + id, func(g grantee) bool {
			return g.client == id && strings.HasPrefix(g.name, prefix)
		}})
	}
	return r.all.granted(ctx, when, wants)
}

// healAll heals all parts that a failed attack may have left broken.
func (r *run) healAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	if r.Heal != nil {
		r.Heal()
	}
	for _, c := range r.clients {
		c.links.Pass()
		if now := c.now(); now != nil && now.child != nil && now.child.Running() {
			_ = now.child.Resume()
		}
	}
	for node := range r.Nodes {
		for _, act := range []func(context.Context, int) error{r.Resume, r.Start} {
			if act == nil {
				continue
			}
			if err := act(ctx, node); err != nil {
				r.failed(fmt.Errorf("heal node %d: %w", node, err))
			}
		}
	}
}

// nextEpoch moves all clients to new names, and checks the history of the earlier ones.
func (r *run) nextEpoch(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := r.eachClient(func(c *client) error {
		now := c.now()
		if err := now.send(fmt.Sprint(lineEpoch, r.epoch+1)); err != nil {
			return err
		}
		_, err := now.await(ctx, fmt.Sprint(lineLeft, r.epoch))
		return err
	})
	if err != nil {
		r.failed(err)
	}
	r.verify(ctx)
	r.epoch++
	if err == nil {
		if err := r.everybody(ctx, "with other names"); err != nil {
			r.failed(err)
		}
	}
}

// stop ends all clients.
func (r *run) stop() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), 2*patience)
	defer cancel()
	r.healAll(ctx)
	err := r.eachClient(func(c *client) error {
		now := c.now()
		if now == nil {
			return nil
		}
		return now.stop(ctx)
	})
	if r.admin != nil {
		err = errors.Join(err, r.admin.Close(ctx))
	}
	if err != nil {
		r.failed(err)
	}
}

// leftovers checks that the service has no entries after all clients have closed.
func (r *run) leftovers(ctx context.Context) {
	if r.Leftovers == nil || len(r.result.Failures()) > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	for {
		left, err := r.Leftovers()
		if err == nil && len(left) == 0 {
			return
		}
		if ctx.Err() != nil {
			r.found(check.Leftover, fmt.Sprintf("all clients are closed and the service keeps %q, %v", left, err))
			return
		}
		pause(ctx, 50*time.Millisecond) // expiry is not reported
	}
}
