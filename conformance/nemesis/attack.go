package nemesis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// step is the shared state of the attacks of one Step.
type step struct {
	mu      sync.Mutex // protects the following fields
	victims map[*client]bool
	kept    map[string]bool // names
	nodes   map[int]bool
}

// attack is the execution of one draw of a step.
type attack struct {
	*run
	Draw
	kind   Kind
	step   *step
	victim *client // that keeps name, or is the target
	name   string  // empty: no name is kept
	freed  bool    // the name is no longer kept
	answer string  // the error of the release of the kept name
	killed bool    // the process that kept it was killed

	// The results.
	outage time.Duration // from the fault until other clients had the victim's name, or went on beside a broken node
	told   time.Duration // from an operator's intervention until the holder's notification
	// The holder was notified with a wrong reason.
	unexplained bool
}

// prepare chooses the victim, and makes it hold a name.
func (a *attack) prepare(ctx context.Context) error {
	var fit []*client
	for _, c := range a.clients {
		if !a.step.victims[c] && (c.own || !a.kind.process) {
			fit = append(fit, c)
		}
	}
	if len(fit) == 0 {
		return errors.New("no client is left to be hit")
	}
	a.victim = fit[int(a.Target)%len(fit)]
	a.step.victims[a.victim] = true
	if a.kind.waits {
		return nil
	}
	i := int(a.Name) % keepable
	for a.step.kept[slots[i].name(a.epoch)] {
		i = (i + 1) % keepable
	}
	a.name = slots[i].name(a.epoch)
	a.step.kept[a.name] = true
	r := a.victim.now()
	if err := r.send(lineKeep + strconv.Itoa(i)); err != nil {
		return err
	}
	return a.within(ctx, func(ctx context.Context) error {
		_, err := r.await(ctx, lineKept+a.name)
		return err
	})
}

// finish releases the kept name, unless its keeper was killed.
func (a *attack) finish(ctx context.Context) error {
	if a.name == "" || a.freed || a.killed {
		return nil
	}
	a.freed = true
	r := a.victim.now()
	if err := r.send(lineFree); err != nil {
		return err
	}
	return a.within(ctx, func(ctx context.Context) error {
		answer, err := r.await(ctx, lineFreed)
		a.answer = answer
		return err
	})
}

// within bounds each step of an attack.
func (a *attack) within(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		ctx, cancel := context.WithTimeout(ctx, a.plan.Patience)
		err := step(ctx)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// last waits until a fault that began at began has lasted for the drawn length.
func (a *attack) last(ctx context.Context, began time.Time) { pause(ctx, a.Length-time.Since(began)) }

// outlasted reports whether the fault is longer than any unrenewed hold.
func (a *attack) outlasted() bool { return a.Length > a.TTL*6/5 }

// goOn waits until the unaffected clients have been granted all names that no client keeps and, if rival is set, the
// victim's name. It records the time from began.
func (a *attack) goOn(ctx context.Context, began time.Time, rival bool) error {
	spared := func(id string) bool {
		a.step.mu.Lock()
		defer a.step.mu.Unlock()
		for c := range a.step.victims {
			if c.id() == id {
				return false
			}
		}
		return true
	}
	var wants []want
	for _, s := range a.slots {
		name := s.name(a.epoch)
		if a.step.kept[name] && !(rival && name == a.name) {
			continue
		}
		wants = append(wants, want{name, func(g grantee) bool { return g.name == name && spared(g.client) }})
	}
	err := a.within(ctx, func(ctx context.Context) error {
		return a.all.granted(ctx, "during the fault", wants)
	})
	if a.outage == 0 && (rival || a.kind.where != onClient) {
		a.outage = time.Since(began)
	}
	return err
}

// lost waits until the victim is notified that it has lost its name, and returns the reason.
func (a *attack) lost(ctx context.Context) (reason string, err error) {
	err = a.within(ctx, func(ctx context.Context) (err error) {
		reason, err = a.victim.now().await(ctx, lineLost)
		return err
	})
	return reason, err
}

// eventually polls a condition, without a notification for it.
func (a *attack) eventually(ctx context.Context, otherwise string, is func(context.Context) bool) error {
	return a.within(ctx, func(ctx context.Context) error {
		for !is(ctx) {
			if ctx.Err() != nil {
				return fmt.Errorf("%w: %s", errNoFault, otherwise)
			}
			pause(ctx, 10*time.Millisecond)
		}
		return nil
	})
}

// errNoFault means that an intended fault did not happen.
var errNoFault = errors.New("the fault did not happen")

func (a *attack) String() string {
	var parts []string
	if a.victim != nil {
		parts = append(parts, a.victim.now().name)
	}
	if a.name != "" {
		parts = append(parts, a.name)
	}
	return a.Kind + " " + strings.Join(slices.Compact(parts), " ")
}

// reasonForced is the reason of a loss for the victim of an operator.
const reasonForced = string(backend.ReasonForceReleased)
