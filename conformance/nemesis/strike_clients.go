package nemesis

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// stopHolder stops the holder until other clients have had its lock. When it continues, it must notice the loss.
func (a *attack) stopHolder(ctx context.Context) error {
	child := a.victim.now().child
	began := time.Now()
	if err := child.Pause(); err != nil { // returns when the kernel reports it as stopped
		return fmt.Errorf("%w: %w", errNoFault, err)
	}
	defer child.Resume()
	if err := a.goOn(ctx, began, true); err != nil {
		return err
	}
	a.last(ctx, began)
	if err := child.Resume(); err != nil {
		return err
	}
	_, err := a.lost(ctx)
	return err
}

// stopWaiter stops a waiter, which must not delay the others for longer than a TTL.
func (a *attack) stopWaiter(ctx context.Context) error {
	r := a.victim.now()
	defer r.child.Resume()
	err := a.eventually(ctx, "it has never waited without holding anything", func(ctx context.Context) bool {
		if holds, waits := a.all.standing(r.name); holds > 0 || waits == 0 {
			return false
		}
		if err := r.child.Pause(); err != nil {
			return false
		}
		pause(ctx, settle)
		if holds, waits := a.all.standing(r.name); holds == 0 && waits > 0 {
			return true
		}
		r.child.Resume() // it has stopped waiting meanwhile
		return false
	})
	if err != nil {
		return err
	}
	began := time.Now()
	if err := a.goOn(ctx, began, false); err != nil {
		return err
	}
	a.last(ctx, began)
	return r.child.Resume()
}

// killHolder kills the holder, so that no process releases its lock.
func (a *attack) killHolder(ctx context.Context) error {
	r := a.victim.now()
	began := time.Now()
	a.killed = true
	if err := r.kill(a.all); err != nil {
		return err
	}
	if r.child.Running() || r.err == nil || !strings.Contains(r.err.Error(), "killed") {
		return fmt.Errorf("%w: client %s ended with %v", errNoFault, r.name, r.err)
	}
	if err := a.goOn(ctx, began, true); err != nil {
		return err
	}
	a.last(ctx, began)
	return a.within(ctx, func(ctx context.Context) error {
		_, err := a.victim.start(ctx, a.epoch)
		return err
	})
}

// cut breaks the links of a holder. Seen is the direction in which they must have received bytes meanwhile.
func (a *attack) cut(ctx context.Context, breakIt func(fault.Link), seen fault.Direction) error {
	link := a.victim.links
	before := link.Seen(seen)
	began := time.Now()
	breakIt(link)
	defer link.Pass()
	if err := a.cutOff(ctx, began); err != nil {
		return err
	}
	return a.kept(ctx, seen, before)
}

// cutOff checks a victim that cannot reach the service: if the fault lasts, the victim is notified of its loss, and
// others are granted its name. None of its later requests is granted meanwhile.
func (a *attack) cutOff(ctx context.Context, began time.Time) error {
	since := a.all.marks.Now()
	if err := a.goOn(ctx, began, a.outlasted()); err != nil {
		return err
	}
	if a.outlasted() {
		if _, err := a.lost(ctx); err != nil {
			return err
		}
	}
	a.last(ctx, began)
	if name := a.victim.now().name; a.all.served(name, since) {
		return fmt.Errorf("%w: %s was cut off and was granted its request", errNoFault, name)
	}
	return nil
}

// kept waits until the links of the victim have received undelivered bytes.
func (a *attack) kept(ctx context.Context, dir fault.Direction, before int64) error {
	return a.eventually(ctx, "nothing was kept back", func(context.Context) bool {
		return a.victim.links.Seen(dir) > before
	})
}

func (a *attack) delay(ctx context.Context) error {
	link := a.victim.links
	dir := []fault.Direction{fault.Requests, fault.Replies, fault.Both}[a.Variant%3]
	by := a.TTL / 100 * time.Duration(1+a.Variant/3%30)
	before := link.Seen(dir)
	began := time.Now()
	link.Delay(dir, by)
	defer link.Pass()
	if err := a.goOn(ctx, began, false); err != nil {
		return err
	}
	a.last(ctx, began)
	return a.kept(ctx, dir, before)
}

func (a *attack) reset(ctx context.Context) error {
	began := time.Now()
	if err := a.sever(ctx, a.victim.links.Reset); err != nil {
		return err
	}
	a.last(ctx, began)
	return a.goOn(ctx, began, false)
}

func (a *attack) refuse(ctx context.Context) error {
	link := a.victim.links
	defer link.Pass()
	began := time.Now()
	err := a.sever(ctx, func() {
		link.Pass() // a client without connections opens one, which Refuse then breaks
		pause(ctx, settle)
		link.Refuse()
	})
	if err != nil {
		return err
	}
	return a.cutOff(ctx, began)
}

// sever breaks connections until at least one was open. Only proxies report that; for other links it breaks them
// once.
func (a *attack) sever(ctx context.Context, breakThem func()) error {
	link := a.victim.links
	tells := false
	for _, l := range link {
		_, ok := l.(interface{ Severed() int64 })
		tells = tells || ok
	}
	before := link.Severed()
	return a.eventually(ctx, "there was no connection to break", func(context.Context) bool {
		breakThem()
		return !tells || link.Severed() > before
	})
}

// late holds back the victim's requests while it releases its name, and delivers them when other clients hold it.
func (a *attack) late(ctx context.Context) error {
	link := a.victim.links
	before := link.Seen(fault.Requests)
	began := time.Now()
	link.Hold(fault.Requests)
	defer link.Pass()
	if err := a.finish(ctx); err != nil { // the release is held back, too, and times out after a TTL
		return err
	}
	if err := a.goOn(ctx, began, true); err != nil {
		return err
	}
	a.last(ctx, began)
	if err := a.kept(ctx, fault.Requests, before); err != nil {
		return err
	}
	delivered := time.Now()
	link.Pass()
	return a.goOn(ctx, delivered, true)
}
