package zookeeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// wish is an Enter in progress.
type wish struct {
	engine.Entering
	e       *service
	s       *session
	dir     string
	use     kit.Use
	foreign map[string]bool // nodes that look like entries, which no client will remove
	made    bool            // an entry of the request stands, as far as this Enter knows
}

const (
	// maxWrites bounds the tries of "read, then write if it is unchanged".
	maxWrites = 10
	// maxReads bounds the entries that are read together.
	maxReads = 100
	// maxGlance bounds the blockers that a waiter reads one by one: instead of more, it reads the queue.
	maxGlance = 16
)

// Enter is engine.Service's. The first one of an attempt creates the entry and reads the queue behind it in one
// exchange, so that the queue has the entry in it. A repetition looks for the entry first. That of a waiter reads the
// queue and its entry.
func (e *service) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	w := &wish{Entering: r, e: e, s: r.Session.(*session), dir: e.dir(r.Name), use: kit.UseOf(r.Request)}
	p, err := w.enter(ctx)
	switch err.(type) {
	case nil, *engine.Unanswered, *engine.Refusal:
	default:
		if w.made && !errors.Is(err, engine.ErrNoSession) {
			err = fmt.Errorf("%w: %w", backend.ErrUnknown, err) // whatever has failed since
		}
	}
	return p, err
}

func (w *wish) enter(ctx context.Context) (engine.Position, error) {
	p := placeOf(w.Place)
	if p.session == w.s.id {
		if pos, ok, err := w.glance(ctx, p); ok || err != nil {
			return pos, err
		}
		queue, x, err := w.look(ctx, p.path)
		if err != nil {
			return engine.Position{}, err
		}
		if x != nil && x.owner == w.s.id {
			return w.decide(ctx, queue, *x)
		}
	}
	if w.Place != "" || w.Again {
		return w.find(ctx)
	}
	return w.create(ctx)
}

// glance is the position of a waiter whose watches report no change: its own entry and those that block it are looked
// at in case a notification was lost. A queue of thousands is not read by each of its waiters.
func (w *wish) glance(ctx context.Context, p place) (pos engine.Position, ok bool, err error) {
	if len(p.behind) == 0 || len(p.behind) > maxGlance || !w.s.listening(p.behind) {
		return pos, false, nil
	}
	reqs := make([]request, len(p.behind), len(p.behind)+1)
	for i, blocker := range p.behind {
		reqs[i] = exists(blocker)
	}
	replies, err := w.s.ask(ctx, append(reqs, getData(p.path, false))...)
	if err != nil {
		return pos, false, err
	}
	n, err := replies[len(p.behind)].node()
	changed := err != nil || n.stat.EphemeralOwner != w.s.id ||
		slices.ContainsFunc(replies, func(a reply) bool { return a.err != nil })
	return engine.Position{Placed: true, Place: w.Place, Behind: watching(w.s, p.behind)}, !changed, nil
}

// create makes the entry, and the node of the name if that may be missing.
func (w *wish) create(ctx context.Context) (engine.Position, error) {
	v := valueOf(w.Request)
	missing := !w.e.useDir(w.dir)
	for range maxWrites {
		var reqs []request
		if missing {
			reqs = append(reqs, create(opCreateContainer, w.dir, nil, w.e.o.ACL, flagContainer))
		}
		replies, err := w.s.do(ctx, append(reqs,
			create(opCreate2, w.dir+"/"+nodeName(w.Request)+".", v.encode(), w.e.o.ACL, flagEphemeralInSeq),
			children(w.dir))...)
		if err != nil {
			return engine.Position{}, err
		}
		if missing {
			if err := ignore(replies[0].err, codeNodeExists, codeNoNode); err != nil {
				return engine.Position{}, err
			}
			if errors.Is(replies[0].err, codeNoNode) { // the root is missing
				if err := w.e.Probe(ctx); err != nil {
					return engine.Position{}, err
				}
			}
		}
		at, zxid, err := replies[len(reqs)].created()
		switch {
		case err == nil:
			w.made = true
			names, _, err := replies[len(reqs)+1].names()
			x, ok := entryOf(w.dir, path.Base(at))
			if err != nil || !ok {
				return engine.Position{}, fmt.Errorf("%w: the queue with %s: %v", errBroken, at, err)
			}
			queue := entriesOf(w.dir, names)
			if len(ofRequest(queue, w.RequestID)) > 1 { // an earlier acquire's entry counts
				return w.find(ctx)
			}
			v.Token = zxid
			return w.decide(ctx, queue, own{entry: x, value: v, owner: w.s.id})
		case errors.Is(err, codeNodeExists): // the server counts no further
			return w.spent(ctx)
		case !errors.Is(err, codeNoNode):
			return engine.Position{}, err
		}
		missing = true // or another client removes it whenever it is empty
	}
	return engine.Position{}, errChanged
}

// find looks for the request's entries, with all that was sent before. An entry on another session moves to this one.
// The oldest counts; later ones of this driver are deleted, so that the request never blocks itself.
func (w *wish) find(ctx context.Context) (engine.Position, error) {
	for range maxWrites {
		names, stat, err := w.s.names(ctx, w.dir)
		if err != nil {
			return engine.Position{}, err
		}
		all := ofRequest(entriesOf(w.dir, names), w.RequestID)
		if len(all) == 0 && spentCount(stat) {
			return w.spent(ctx)
		}
		if len(all) == 0 {
			return w.create(ctx)
		}
		found, err := w.s.read(ctx, all, false)
		if err != nil {
			return engine.Position{}, err
		}
		if len(found) == 0 {
			continue
		}
		for _, later := range found[1:] {
			if w.e.ours(later.owner) != nil {
				if _, err := w.s.delete(ctx, later.path, later.version); ignore(err, codeBadVersion) != nil {
					return engine.Position{}, err
				}
			}
		}
		x := found[0]
		if w.made = x.Use == w.use; !w.made {
			return engine.Position{}, &backend.LimitError{Name: w.Name, Kind: x.Kind, Limit: x.Limit, Holder: x.Owner}
		}
		if x.owner != w.s.id {
			if err := w.s.move(ctx, x); err != nil {
				return engine.Position{}, err
			}
		}
		queue, again, err := w.look(ctx, x.path)
		if err != nil {
			return engine.Position{}, err
		}
		if again != nil && again.owner == w.s.id {
			return w.decide(ctx, queue, *again)
		}
	}
	return engine.Position{}, errChanged
}

// look reads the queue and then, later, an entry. x is nil if that has gone.
func (w *wish) look(ctx context.Context, at string) (queue []entry, x *own, err error) {
	replies, err := w.s.ask(ctx, children(w.dir), getData(at, false))
	if err != nil {
		return nil, nil, err
	}
	names, _, err := replies[0].names()
	found, ok, failed := ownOf(replies[1], at)
	if err = cmp.Or(err, failed); err != nil || !ok {
		return nil, nil, err
	}
	return entriesOf(w.dir, names), &found, nil
}

// passTime bounds how long an attempt waits for others that are refused and remove their entries, which takes one round
// trip. An older entry belongs to a client that has died.
const passTime = time.Second

// decide returns the position of an entry in a queue, which has the entry in it or was read before it.
//
// Entries before an entry can only leave, because the server numbers the nodes of a name in the order of their
// creation, up to maxNumber. So a queue that grants still grants while the entry stands. An entry with a higher number
// waits for those with lower ones, which are before it, and then leaves instead of holding.
func (w *wish) decide(ctx context.Context, queue []entry, x own) (engine.Position, error) {
	late := w.e.clock.Now().Add(passTime)
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, passTime/20) {
		at := slices.IndexFunc(queue, func(other entry) bool { return other.path == x.path })
		if at < 0 {
			w.made = false
			return engine.Position{}, errGone
		}
		front := slices.DeleteFunc(queue[:at:at], func(other entry) bool { return other.spent() || w.foreign[other.path] })
		block := slices.Clone(blockers(front, x.entry))
		switch {
		case len(block) == 0 && x.spent():
			if _, err := w.s.delete(ctx, x.path, x.version); err != nil {
				return engine.Position{}, err
			}
			w.made = false
			return w.spent(ctx)
		case len(block) == 0:
			w.s.hold(x, sight{})
			return engine.Position{
				Held: true, Placed: true, Place: placed(w.s, x, nil), Token: tokenOf(x.Use, x.Token), Nonce: x.nonce(),
				Incarnation: incarnation(path.Base(x.path), x.Token),
			}, nil
		}
		pos := engine.Position{Placed: true, Place: placed(w.s, x, block), Behind: watching(w.s, paths(block))}
		again, err := w.blocked(ctx, &pos, front, block, x, w.e.clock.Now() > late)
		if err != nil || !again {
			return pos, err
		}
		if _, how := engine.Await(ctx, time.After(pause), w.s.over); how != engine.Answered {
			return pos, errChanged
		}
		next, there, err := w.look(ctx, x.path)
		switch {
		case err != nil:
			return pos, err
		case there == nil || there.owner != w.s.id:
			w.made = false
			return engine.Position{}, errGone
		}
		queue, x = next, *there
	}
}

// blocked completes the position of an entry that does not hold. again: the queue has to be read again.
//
// Every request makes its entry before it is refused, so that the queue has entries which are about to leave. Only an
// entry that stays may refuse another one. An example: a reader holds, and a writer tries without waiting. Before the
// writer has removed its entry, a second reader tries. The writer blocks it, but will leave, and the first reader
// admits it: so it waits until the writer has left, and holds.
//
// The firm entries hold, by the queue, or wait; the others will be refused. An attempt that holds by the queue may have
// been refused because of a holder that has ended since: so the leader is asked whether it stays.
func (w *wish) blocked(
	ctx context.Context, pos *engine.Position, front, block []entry, x own, late bool,
) (again bool, err error) {
	odd := slices.ContainsFunc(front, func(other entry) bool { return !other.Mixes(x.Use) })
	if w.Wait && !odd {
		return w.waits(ctx, block)
	}
	some, err := w.real(ctx, front[:1])
	if err == nil && len(some) > 0 && !w.Wait && some[0].Mixes(x.Use) && len(blockers(front[:1], x.entry)) == 0 {
		some, err = w.real(ctx, front[:min(len(front), maxReads)])
	}
	if err != nil || len(some) == 0 {
		return true, err
	}
	first, firm, sure := some[0], []entry{some[0].entry}, []entry{}
	held := &backend.HeldError{Name: w.Name, Holder: first.Owner, HoldID: first.HoldID}
	refuses := func(by []entry) bool { return len(blockers(by, x.entry)) > 0 }
	switch {
	case !first.Mixes(x.Use):
		refuses = func(by []entry) bool { return len(by) > 0 }
	case w.Wait:
		return w.waits(ctx, block)
	default:
		if !first.Try {
			sure = append(sure, first.entry)
		}
		for _, other := range some[1:] {
			if len(blockers(firm, other.entry)) > 0 && (other.Try || !other.Mixes(first.Use)) || refuses(firm) {
				continue
			}
			if firm = append(firm, other.entry); !other.Try {
				sure = append(sure, other.entry)
			}
		}
		if !refuses(firm) {
			if late {
				pos.Holder = held
			}
			return !late, nil
		}
	}
	if !refuses(sure) {
		reqs := make([]request, len(firm))
		for i, other := range firm {
			reqs[i] = exists(other.path)
		}
		replies, err := w.s.askLeader(ctx, reqs...)
		if err != nil {
			return false, err
		}
		var stay []entry
		for i, a := range replies {
			if a.err == nil {
				stay = append(stay, firm[i])
			}
		}
		if !refuses(stay) {
			return true, nil
		}
	}
	if first.Mixes(x.Use) {
		pos.Holder = held
	} else {
		return false, &engine.Refusal{
			Err: &backend.LimitError{Name: w.Name, Kind: first.Kind, Limit: first.Limit, Holder: first.Owner},
		}
	}
	return false, nil
}

// waits reads the blockers of a waiter, unless it has just come: the watch wakes it if one of them is missing or
// foreign.
func (w *wish) waits(ctx context.Context, block []entry) (again bool, err error) {
	if w.Place == "" {
		return false, nil
	}
	real, err := w.real(ctx, block)
	return len(real) < len(block), err
}

// real reads entries, and returns those that stand. It notes the others: a persistent node in the place of an entry
// would otherwise close the name, since no client removes it.
func (w *wish) real(ctx context.Context, all []entry) ([]own, error) {
	found, err := w.s.read(ctx, all, false)
	if err != nil || len(found) == len(all) {
		return found, err
	}
	if w.foreign == nil {
		w.foreign = map[string]bool{}
	}
	stand := byPath(found)
	for _, x := range all {
		if _, ok := stand[x.path]; !ok {
			w.foreign[x.path] = true // or it has gone
		}
	}
	return found, nil
}

// spent is the position of a request in a queue that takes no new entries, since its numbers are used up: see
// maxNumber. It begins anew when the node of the name is empty. That cannot be removed while an entry stands in it,
// such as one of a client without this bound, which may hold.
func (w *wish) spent(ctx context.Context) (engine.Position, error) {
	names, stat, err := w.s.names(ctx, w.dir)
	if err != nil {
		return engine.Position{}, err
	}
	if len(names) == 0 {
		if spentCount(stat) {
			if _, err := w.s.delete(ctx, w.dir, anyVersion); ignore(err, codeNotEmpty) != nil {
				return engine.Position{}, err
			}
		}
		return engine.Position{}, errSpent
	}
	queue := entriesOf(w.dir, names)
	some, err := w.real(ctx, queue[:min(len(queue), maxReads)])
	if err == nil && len(some) == 0 {
		err = w.onlyForeign(ctx, w.dir+"/"+names[0])
	}
	switch {
	case err != nil:
		return engine.Position{}, err
	case len(some) == 0 || w.Wait:
		return engine.Position{Poll: true}, nil
	}
	return engine.Position{
		Holder: &backend.HeldError{Name: w.Name, Holder: some[0].Owner, HoldID: some[0].HoldID},
	}, nil
}

// onlyForeign is the error of a queue that cannot begin anew, if a child of the name's node is foreign.
func (w *wish) onlyForeign(ctx context.Context, child string) error {
	replies, err := w.s.ask(ctx, exists(child))
	if err != nil {
		return err
	}
	if stat, err := replies[0].stat(); err != nil || stat.EphemeralOwner != 0 {
		return nil
	}
	return &backend.ConfigError{
		Setting: "node of the name " + w.Name, Value: w.dir, Want: "no children but entries of locks",
		Why: "its count is used up and it cannot be removed: delete " + child + " and its other foreign children",
	}
}
