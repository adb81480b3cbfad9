package nemesis

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// node chooses a node that does not lead and is not a target yet.
func (a *attack) node(ctx context.Context) (int, error) {
	leader := -1
	if leads(&a.Service) {
		var err error
		if leader, _, err = a.leader(ctx); err != nil {
			return 0, err
		}
	}
	a.step.mu.Lock()
	defer a.step.mu.Unlock()
	var fit []int
	for i := range a.Nodes {
		if i != leader && !a.step.nodes[i] {
			fit = append(fit, i)
		}
	}
	if len(fit) == 0 {
		return 0, errors.New("no node is left to be hit")
	}
	node := fit[int(a.Target)%len(fit)]
	a.step.nodes[node] = true
	return node, nil
}

func (a *attack) leader(ctx context.Context) (node int, term uint64, err error) {
	err = a.within(ctx, func(ctx context.Context) error {
		node, term, err = a.Leader(ctx, 0)
		return err
	})
	return node, term, err
}

// another waits for a leader other than the broken node.
func (a *attack) another(ctx context.Context, broken int, term uint64) error {
	return a.within(ctx, func(ctx context.Context) error {
		now, _, err := a.Leader(ctx, term)
		switch {
		case err != nil:
			return fmt.Errorf("%w: no other leader: %w", errNoFault, err)
		case now == broken:
			return fmt.Errorf("%w: node %d leads again although it is broken", errNoFault, broken)
		}
		return nil
	})
}

// silent waits until a node does not answer.
func (a *attack) silent(ctx context.Context, node int) error {
	return a.eventually(ctx, fmt.Sprintf("node %d answers although it is broken", node),
		func(ctx context.Context) bool {
			short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
			defer cancel()
			_, err := a.Probe(short, node)
			return err != nil && ctx.Err() == nil
		})
}

// answers waits until a node answers.
func (a *attack) answers(ctx context.Context, node int) (process string, err error) {
	err = a.within(ctx, func(ctx context.Context) error {
		for {
			if process, err = a.Probe(ctx, node); err == nil || ctx.Err() != nil {
				return err
			}
			pause(ctx, 20*time.Millisecond) // no notification
		}
	})
	return process, err
}

func (a *attack) nodePause(ctx context.Context) error {
	node, err := a.node(ctx)
	if err != nil {
		return err
	}
	return a.paused(ctx, node, func(began time.Time) error { return a.beside(ctx, began) })
}

func (a *attack) leaderPause(ctx context.Context) error {
	node, term, err := a.leader(ctx)
	if err != nil {
		return err
	}
	return a.paused(ctx, node, func(began time.Time) error {
		if err := a.another(ctx, node, term); err != nil {
			return err
		}
		return a.beside(ctx, began)
	})
}

// beside checks that the service goes on beside a broken node, if it has a majority without it.
func (a *attack) beside(ctx context.Context, began time.Time) error {
	if !a.quorum() {
		return nil
	}
	return a.goOn(ctx, began, false)
}

// paused freezes a node, for at least the drawn length and until during returns.
func (a *attack) paused(ctx context.Context, node int, during func(began time.Time) error) error {
	began := time.Now()
	if err := a.within(ctx, func(ctx context.Context) error { return a.Pause(ctx, node) }); err != nil {
		return err
	}
	defer a.within(context.WithoutCancel(ctx), func(ctx context.Context) error { return a.Resume(ctx, node) })
	if err := a.silent(ctx, node); err != nil {
		return err
	}
	if err := during(began); err != nil {
		return err
	}
	a.last(ctx, began)
	if err := a.within(ctx, func(ctx context.Context) error { return a.Resume(ctx, node) }); err != nil {
		return err
	}
	_, err := a.answers(ctx, node)
	return err
}

func (a *attack) nodeKill(ctx context.Context) error {
	node, err := a.node(ctx)
	if err != nil {
		return err
	}
	return a.ended(ctx, node, func(began time.Time) error { return a.beside(ctx, began) })
}

func (a *attack) leaderKill(ctx context.Context) error {
	node, term, err := a.leader(ctx)
	if err != nil {
		return err
	}
	return a.ended(ctx, node, func(began time.Time) error {
		if err := a.another(ctx, node, term); err != nil {
			return err
		}
		return a.beside(ctx, began)
	})
}

// ended kills a node, restarts it after at least the drawn length and after during has returned, and checks that it
// is a new process.
func (a *attack) ended(ctx context.Context, node int, during func(began time.Time) error) error {
	former, err := a.answers(ctx, node)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := a.within(ctx, func(ctx context.Context) error { return a.Kill(ctx, node) }); err != nil {
		return err
	}
	start := func(ctx context.Context) error { return a.Start(ctx, node) }
	defer a.within(context.WithoutCancel(ctx), start)
	if err := a.silent(ctx, node); err != nil {
		return err
	}
	if err := during(began); err != nil {
		return err
	}
	a.last(ctx, began)
	if err := a.within(ctx, start); err != nil {
		return err
	}
	process, err := a.answers(ctx, node)
	if err == nil && former != "" && process == former {
		err = fmt.Errorf("%w: node %d was killed and is still the process %s", errNoFault, node, former)
	}
	return err
}

func (a *attack) rollingRestart(ctx context.Context) error {
	for i := range a.Nodes {
		node := (int(a.Target) + i) % a.Nodes
		err := a.ended(ctx, node, func(began time.Time) error { return a.beside(ctx, began) })
		if err != nil {
			return fmt.Errorf("restart of node %d: %w", node, err)
		}
		if err := a.goOn(ctx, time.Now(), false); err != nil { // before the next node
			return err
		}
	}
	return nil
}

// isolate cuts a node off from the others, in both directions.
func (a *attack) isolate(node int) {
	for other := range a.Nodes {
		if other != node {
			a.Cut(node, other)
			a.Cut(other, node)
		}
	}
}

// said waits until a node has sent more than before bytes to another node.
func (a *attack) said(ctx context.Context, from, to int, before int64) error {
	return a.eventually(ctx, fmt.Sprintf("nothing was kept back from node %d to node %d", from, to),
		func(context.Context) bool { return a.Said(from, to) > before })
}

func (a *attack) leaderPartition(ctx context.Context) error {
	leader, term, err := a.leader(ctx)
	if err != nil {
		return err
	}
	other := (leader + 1 + int(a.Target)%(a.Nodes-1)) % a.Nodes
	began := time.Now()
	a.isolate(leader)
	defer a.Heal()
	said := a.Said(leader, other)
	if err := a.another(ctx, leader, term); err != nil {
		return err
	}
	if err := a.goOn(ctx, began, false); err != nil {
		return err
	}
	if err := a.said(ctx, leader, other, said); err != nil {
		return err
	}
	a.last(ctx, began)
	return nil
}

func (a *attack) minority(ctx context.Context) error {
	leader, _, err := a.leader(ctx)
	if err != nil {
		return err
	}
	node := (leader + 1 + int(a.Target)%(a.Nodes-1)) % a.Nodes
	began := time.Now()
	a.isolate(node)
	defer a.Heal()
	said := a.Said(leader, node)
	if err := a.goOn(ctx, began, false); err != nil {
		return err
	}
	if err := a.said(ctx, leader, node, said); err != nil {
		return err
	}
	a.last(ctx, began)
	return nil
}

func (a *attack) oneWayPeers(ctx context.Context) error {
	leader, term, err := a.leader(ctx)
	if err != nil {
		return err
	}
	follower := (leader + 1 + int(a.Target)%(a.Nodes-1)) % a.Nodes
	from, to := leader, follower
	all := func(cut func(other int)) {
		for other := range a.Nodes {
			if other != leader {
				cut(other)
			}
		}
	}
	began := time.Now()
	elects := false
	switch a.Variant % 4 {
	case 0: // the leader does not hear one follower
		from, to = follower, leader
		a.Cut(from, to)
	case 1: // a follower does not hear the leader
		a.Cut(from, to)
	case 2: // no follower hears the leader: they must elect another
		elects = true
		all(func(other int) { a.Cut(leader, other) })
	case 3: // the leader hears no follower: it must step down
		elects = true
		from, to = follower, leader
		all(func(other int) { a.Cut(other, leader) })
	}
	defer a.Heal()
	said := a.Said(from, to)
	if elects {
		if err := a.another(ctx, leader, term); err != nil {
			return err
		}
	}
	if err := a.goOn(ctx, began, false); err != nil {
		return err
	}
	if err := a.said(ctx, from, to, said); err != nil {
		return err
	}
	a.last(ctx, began)
	return nil
}
