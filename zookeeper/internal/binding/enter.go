package binding

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
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
	foreign map[string]bool // nodes that look like entries, and nobody will ever remove them
	made    bool            // an entry of the request stands, as far as this Enter knows
}

// own is the entry of a request, as it was read last.
type own struct {
	entry
	value
	version int32
	owner   int64 // the session
}

// maxWrites bounds the tries of "read, then write if it is unchanged", and of requests that a server throttles.
const maxWrites = 8

// Enter is engine.Service's. The first one of an attempt creates the entry and reads the queue behind it in one
// exchange, so that the queue has the entry in it. A repetition forbids what was sent before, and looks for the entry;
// that of a waiter reads the queue, and then the entry.
func (e *service) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	w := &wish{Entering: r, e: e, s: sessionOf(r.Session), dir: e.dir(r.Name), use: kit.UseOf(r.Request)}
	p, err := w.run(ctx)
	if w.made && err != nil && !errors.Is(err, engine.ErrNoSession) {
		if _, unanswered := err.(*engine.Unanswered); !unanswered {
			err = fmt.Errorf("%w: %w", backend.ErrUnknown, err) // whatever has failed since
		}
	}
	return p, err
}

func (w *wish) run(ctx context.Context) (engine.Position, error) {
	r := w.Entering
	if r.Place != "" {
		if p := placeOf(r.Place); p.session == w.s.id {
			if queue, x, err := w.look(ctx, p.path); err != nil {
				return engine.Position{}, err
			} else if x != nil && x.Token == p.token && x.owner == w.s.id {
				return w.decide(ctx, queue, *x)
			}
		}
		return w.find(ctx, true) // an Enter may have created another one
	}
	if r.Again {
		return w.find(ctx, true)
	}
	return w.create(ctx)
}

// create makes the entry, and the node of the name if it may be missing.
func (w *wish) create(ctx context.Context) (engine.Position, error) {
	v := valueOf(w.Request, w.Attempt)
	missing := !w.e.useDir(w.dir)
	for range maxWrites {
		var reqs []request
		if missing {
			reqs = append(reqs, create(opCreateContainer, w.dir, nil, w.e.o.ACL, flagContainer))
		}
		fence := w.s.fenceNumber()
		reqs = append(reqs, multi(w.s.fenced(fence),
			create(opCreate, w.dir+"/"+nodeName(w.Request)+".", v.encode(), w.e.o.ACL, flagEphemeralInSeq)),
			children(w.dir))
		replies, err := w.s.do(ctx, reqs...)
		if err != nil {
			return engine.Position{}, err
		}
		if missing {
			if err := replies[0].err; err != nil && !isOneOf(err, codeNodeExists, codeNoNode) {
				return engine.Position{}, err
			}
			replies = replies[1:]
		}
		done, failed, err := replies[0].results()
		switch {
		case err == nil:
			queue, _, err := replies[1].names()
			if err != nil {
				return engine.Position{}, fmt.Errorf("%w: %w", errBroken, err) // the entry stands
			}
			x, ok := entryOf(w.dir, path.Base(done.path))
			if !ok {
				return engine.Position{}, fmt.Errorf("%w: ZooKeeper has created %s", backend.ErrUnknown, done.path)
			}
			v.Token, w.made = done.zxid, true
			return w.enter(ctx, entriesOf(w.dir, queue), own{x, v, 0, w.s.id})
		case failed == 0 && isOneOf(err, codeNoNode): // it was replaced meanwhile
			err = w.s.advance(ctx, fence)
		case failed == 1 && isOneOf(err, codeNoNode):
			if missing { // the root may be missing, too
				err = w.e.Probe(ctx)
			}
			missing = true
		case isOneOf(err, codeNodeExists): // two nodes of one name: the server counts no further
			err = errSpent
		}
		if err != nil && !isOneOf(err, codeNoNode) {
			return engine.Position{}, err
		}
	}
	return engine.Position{}, errChanged
}

// enter decides on a new entry. An earlier acquire of the request may have one that this one did not know of: then that
// one counts.
func (w *wish) enter(ctx context.Context, queue []entry, x own) (engine.Position, error) {
	if len(ofRequest(queue, w.RequestID)) > 1 {
		return w.find(ctx, false)
	}
	return w.decide(ctx, queue, x)
}

// find looks for the request's entry. forbid: first it forbids creations that were sent before, so that the answer is
// complete. An entry on another session
// moves to this one. The oldest counts; later ones on this session are deleted, so that the request never stands in
// its own way.
func (w *wish) find(ctx context.Context, forbid bool) (engine.Position, error) {
	for range maxWrites {
		a, err := w.s.readQueue(ctx, w.dir, forbid)
		if err != nil {
			return engine.Position{}, err
		}
		forbid = false
		names, stat, err := a.names()
		if err != nil && !isOneOf(err, codeNoNode) {
			return engine.Position{}, err
		}
		all := ofRequest(entriesOf(w.dir, names), w.RequestID)
		if len(all) == 0 {
			if err == nil && spentCount(stat) {
				return w.spent(ctx, entriesOf(w.dir, names), len(names))
			}
			return w.create(ctx)
		}
		found, err := w.s.read(ctx, all)
		if err != nil {
			return engine.Position{}, err
		}
		if len(found) == 0 {
			continue
		}
		x := found[0]
		if x.Use != w.use {
			err := &backend.LimitError{Name: w.Name, Kind: x.Use.Kind, Limit: x.Use.Limit, Holder: x.Owner}
			return engine.Position{}, err
		}
		w.made = true
		var deletes []request
		for _, later := range found[1:] {
			if later.owner == w.s.id {
				deletes = append(deletes, remove(later.path, later.version))
			}
		}
		if len(deletes) > 0 {
			if _, err := w.s.do(ctx, deletes...); err != nil {
				return engine.Position{}, err
			}
		}
		if x.owner != w.s.id {
			if w.e.session(x.owner) == nil {
				x.Attempt = w.Attempt // another client's
			}
			if x, err = w.s.move(ctx, x); err != nil {
				if isOneOf(err, codeNoNode, codeBadVersion) {
					continue
				}
				return engine.Position{}, err
			}
		}
		queue, again, err := w.look(ctx, x.path)
		if err != nil {
			return engine.Position{}, err
		}
		if again != nil && again.owner == w.s.id && again.Token == x.Token {
			return w.decide(ctx, queue, *again)
		}
	}
	return engine.Position{}, errChanged
}

// look reads the queue and then, later, an entry. x is nil if that has gone.
func (w *wish) look(ctx context.Context, at string) (queue []entry, x *own, err error) {
	replies, err := w.s.do(ctx, children(w.dir), getData(at, false))
	if err != nil {
		return nil, nil, err
	}
	names, _, err := replies[0].names()
	if err != nil && !isOneOf(err, codeNoNode) {
		return nil, nil, err
	}
	n, err := replies[1].node()
	if isOneOf(err, codeNoNode) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	found, ok := ownOf(n, at)
	if !ok {
		return nil, nil, nil
	}
	return entriesOf(w.dir, names), &found, nil
}

// ownOf is an entry as it was read. It is false for a foreign node, which is not ephemeral, whatever its name.
func ownOf(n node, at string) (own, bool) {
	x, ok := entryOf(path.Dir(at), path.Base(at))
	return own{x, decode(n.data, n.stat.Czxid), n.stat.Version, n.stat.EphemeralOwner}, ok && n.stat.EphemeralOwner != 0
}

// read reads entries, and returns those that stand, in order.
func (s *session) read(ctx context.Context, all []entry) (found []own, err error) {
	reqs := make([]request, len(all))
	for i, x := range all {
		reqs[i] = getData(x.path, false)
	}
	if len(reqs) == 0 {
		return nil, nil
	}
	replies, err := s.do(ctx, reqs...)
	if err != nil {
		return nil, err
	}
	for i, a := range replies {
		n, err := a.node()
		if err != nil && !isOneOf(err, codeNoNode) {
			return nil, err
		}
		if x, ok := ownOf(n, all[i].path); err == nil && ok {
			found = append(found, x)
		}
	}
	return found, nil
}

// maxMoves bounds the versions of entries that move.
const maxMoves = 30

// move replaces an entry by one with the same name, content and token on s, in one transaction. The number is part of
// the name, so the place in the queue stays; the token travels in the content. The version rises with each move, so that
// a deletion of the earlier entry does not delete the later one.
func (s *session) move(ctx context.Context, x own) (own, error) {
	reqs, moved := s.moving(x)
	replies, err := s.do(ctx, reqs)
	if err == nil {
		_, _, err = replies[0].results()
	}
	return moved, err
}

func (s *session) moving(x own) (request, own) {
	moved := x
	moved.owner, moved.version = s.id, x.version%maxMoves+1
	data := moved.encode()
	ops := []request{
		s.fenced(s.fenceNumber()), remove(x.path, x.version), create(opCreate, x.path, data, s.e.o.ACL, flagEphemeral),
	}
	for range moved.version {
		ops = append(ops, setData(x.path, data, anyVersion))
	}
	return multi(ops...), moved
}

// passTime bounds how long an attempt waits for others that are refused and remove their entries. They need one round
// trip for that. An older one belongs to a client that has died.
const passTime = time.Second

// decide returns the position of an entry in a queue, which has the entry in it or was read before it.
//
// Entries before an entry can only leave, because the server numbers the nodes of a name in the order of their creation,
// up to maxNumber. So a queue that grants goes on granting while the entry stands. An entry with a higher number waits
// for those with lower ones, which are before it, and then leaves instead of holding.
func (w *wish) decide(ctx context.Context, queue []entry, x own) (engine.Position, error) {
	pos := engine.Position{Placed: true, Place: place{w.s.id, x.path, x.Token, w.Attempt}.String()}
	patience := w.e.clock.Now().Add(passTime)
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, passTime/20) {
		at := slices.IndexFunc(queue, func(other entry) bool { return other.path == x.path })
		if at < 0 {
			w.made = false
			return engine.Position{}, errGone
		}
		front := slices.DeleteFunc(queue[:at:at], func(other entry) bool { return other.spent() || w.foreign[other.path] })
		block := blockers(front, x.entry)
		switch {
		case len(block) == 0 && x.spent():
			return engine.Position{}, w.stepDown(ctx, x)
		case len(block) == 0:
			return w.held(ctx, pos, x)
		}
		again, err := w.blocked(ctx, &pos, front, block, x, w.e.clock.Now() > patience)
		if err == nil && (pos.Holder != nil || pos.Refused != nil) && x.Attempt == w.Attempt {
			return w.withdraw(ctx, pos, x)
		}
		if err != nil || !again {
			return pos, err
		}
		timer := time.NewTimer(pause)
		_, how := engine.Await(ctx, timer.C, w.s.over)
		timer.Stop()
		if how != engine.Answered {
			return pos, errChanged
		}
		next, own, err := w.look(ctx, x.path)
		switch {
		case err != nil:
			return pos, err
		case own == nil || own.owner != w.s.id || own.Token != x.Token:
			w.made = false
			return engine.Position{}, errGone
		}
		queue, x = next, *own
	}
}

// withdraw removes the entry of a refused attempt, which then stands in nobody's way. If the server does not delete it,
// the engine tries later.
func (w *wish) withdraw(ctx context.Context, pos engine.Position, x own) (engine.Position, error) {
	replies, err := w.s.do(ctx, remove(x.path, x.version))
	if err == nil && (replies[0].err == nil || isOneOf(replies[0].err, codeNoNode)) {
		pos.Placed, pos.Place, w.made = false, "", false
	}
	return pos, err
}

// held is the position of an entry without blockers. If another attempt may have been answered with the entry, or may
// be, that attempt must not delete it.
func (w *wish) held(ctx context.Context, pos engine.Position, x own) (engine.Position, error) {
	if x.Attempt != "" && x.Attempt != w.Attempt {
		x.Attempt = ""
		replies, err := w.s.do(ctx, setData(x.path, x.encode(), x.version))
		if err != nil {
			return pos, err
		}
		if err := replies[0].err; err != nil {
			if isOneOf(err, codeNoNode, codeBadVersion) {
				return engine.Position{}, errGone
			}
			return pos, err
		}
		x.version++
	}
	pos.Held, pos.Token, pos.Nonce = true, tokenOf(x.Use, x.Token), x.nonce()
	pos.Incarnation = incarnation(path.Base(x.path), x.Token)
	w.s.place(x, 0)
	return pos, nil
}

// blocked says in pos why an entry does not hold. again: that is not known, and the queue has to be read again.
//
// An attempt without Wait makes its entry before it knows whether it is refused, so entries stand in the queue that are
// about to leave. Only an entry that stays may refuse another one. Firm entries hold or wait; passing ones will be
// refused. An entry of an attempt that is the first may hold, or may have been refused because of a holder who has gone
// since: it is read a second time.
func (w *wish) blocked(
	ctx context.Context, pos *engine.Position, front, block []entry, x own, late bool,
) (again bool, err error) {
	odd := slices.ContainsFunc(front, func(other entry) bool { return !other.Mixes(x.Use) })
	if w.Wait && !odd {
		real, err := w.real(ctx, block)
		pos.Behind = watching(w.s, block)
		return len(real) < len(block), err
	}
	some, err := w.real(ctx, front[:min(len(front), maxReads)])
	if err != nil || len(some) == 0 {
		return true, err
	}
	first, sure := some[0], !some[0].Try
	firm := []entry{first.entry}
	switch {
	case !first.Mixes(x.Use):
	case w.Wait:
		real, err := w.real(ctx, block)
		pos.Behind = watching(w.s, block)
		return len(real) < len(block), err
	case len(blockers(firm, x.entry)) == 0:
		for _, other := range some[1:] {
			if len(blockers(firm, other.entry)) > 0 && (other.Try || !other.Mixes(first.Use)) {
				continue
			}
			if firm = append(firm, other.entry); len(blockers(firm, x.entry)) > 0 {
				sure = true
				break
			}
		}
		if sure = len(blockers(firm, x.entry)) > 0; !sure && !late {
			return true, nil
		}
		sure = true
	}
	if !sure {
		replies, err := w.s.do(ctx, confirmed(), exists(first.path))
		if err != nil {
			return false, err
		}
		if _, err := replies[1].stat(); err != nil {
			return isOneOf(err, codeNoNode), ignore(err, codeNoNode)
		}
	}
	if !first.Mixes(x.Use) {
		pos.Refused = &backend.LimitError{Name: w.Name, Kind: first.Use.Kind, Limit: first.Use.Limit, Holder: first.Owner}
		return false, nil
	}
	pos.Holder = &backend.HeldError{Name: w.Name, Holder: first.Owner, HoldID: first.HoldID}
	return false, nil
}

// maxReads bounds the entries that are read together.
const maxReads = 100

// real reads entries, and returns those that stand. It notes foreign nodes: a persistent node in the place of an entry
// would otherwise close the name, since nobody removes it.
func (w *wish) real(ctx context.Context, all []entry) ([]own, error) {
	found, err := w.s.read(ctx, all)
	if err != nil || len(found) == len(all) {
		return found, err
	}
	if w.foreign == nil {
		w.foreign = map[string]bool{}
	}
	for _, x := range all {
		if !slices.ContainsFunc(found, func(f own) bool { return f.path == x.path }) {
			w.foreign[x.path] = true // or it has gone
		}
	}
	return found, nil
}

// ignore returns err unless it is one of some.
func ignore(err error, some ...error) error {
	if isOneOf(err, some...) {
		return nil
	}
	return err
}

// stepDown removes an entry that may not hold, and the node of the name if that is empty then. The attempt makes no
// other entry before the name's node was made anew.
func (w *wish) stepDown(ctx context.Context, x own) error {
	replies, err := w.s.do(ctx, remove(x.path, x.version), exists(w.dir))
	if err != nil {
		return err
	}
	if err := ignore(replies[0].err, codeNoNode); err != nil {
		return err
	}
	w.made = false
	stat, err := replies[1].stat()
	return w.renewDir(ctx, err == nil && stat.NumChildren == 0 && spentCount(stat))
}

// spent is the position of a request whose queue takes no new entries.
func (w *wish) spent(ctx context.Context, queue []entry, nodes int) (engine.Position, error) {
	if nodes == 0 {
		return engine.Position{}, w.renewDir(ctx, true)
	}
	some, err := w.real(ctx, queue[:min(len(queue), maxReads)])
	switch {
	case err != nil:
	case len(some) == 0 && nodes <= maxReads:
		err = &backend.ConfigError{
			Setting: "node of the name " + w.Name, Value: w.dir, Want: "no children but entries of locks",
			Why: "its count is used up and it cannot be removed: delete its foreign children",
		}
	case len(some) > 0 && !w.Wait:
		first := some[0]
		return engine.Position{
			Holder: &backend.HeldError{Name: w.Name, Holder: first.Owner, HoldID: first.HoldID},
		}, nil
	default:
		err = errSpent
	}
	return engine.Position{}, err
}

// renewDir lets a queue begin anew that has used up its numbers, if it is empty. It comes to that after 2³⁰ requests for
// a name that is never free for as long as an unused name's node stays. Nobody can remove the node while an entry stands
// in it, such as one of a client that knows no bound, which may hold.
func (w *wish) renewDir(ctx context.Context, empty bool) error {
	if empty {
		replies, err := w.s.do(ctx, remove(w.dir, anyVersion))
		if err != nil {
			return err
		}
		if err := ignore(replies[0].err, codeNoNode, codeNotEmpty); err != nil {
			return err
		}
	}
	return errSpent
}

// place is Position.Place: an entry as an attempt knows it.
type place struct {
	session int64
	path    string
	token   int64
	attempt string
}

// String returns the text that placeOf reads, and that Watch reads for the path.
func (p place) String() string {
	return fmt.Sprintf("%x\n%s\n=%d\n=%s", uint64(p.session), p.path, p.token, p.attempt)
}

func placeOf(text string) (p place) {
	parts := strings.Split(text, "\n")
	if len(parts) == 4 {
		var id uint64
		_, _ = fmt.Sscanf(parts[0], "%x", &id)
		_, _ = fmt.Sscanf(parts[2], "=%d", &p.token)
		p.session, p.path, p.attempt = int64(id), parts[1], strings.TrimPrefix(parts[3], "=")
	}
	return p
}

// watching names nodes for Watch.
func watching(s *session, some []entry) string {
	text := fmt.Sprintf("%x", uint64(s.id))
	for _, x := range some {
		text += "\n" + x.path
	}
	return text
}

// Watch is engine.Watches's: it watches entries over the session of the waiter. If they stand when the watch does,
// nothing has happened since they were read. A node that was written, or moved, is watched again.
func (e *service) Watch(ctx context.Context, what string, wake func()) error {
	parts := strings.Split(what, "\n")
	var id uint64
	_, _ = fmt.Sscanf(parts[0], "%x", &id)
	paths := slices.DeleteFunc(parts[1:], func(part string) bool { return part[0] != '/' })
	s := e.session(int64(id))
	if s == nil {
		return engine.ErrNoSession
	}
	events := make(chan int32, 1)
	for {
		w := &watcher{func(typ int32) {
			select {
			case events <- typ:
			default: // the next round reads all
			}
		}}
		unlisten := s.listen(w, paths)
		stand, err := s.watch(ctx, paths, wake)
		paths = stand
		typ := int32(0)
		if err == nil && len(paths) > 0 {
			select {
			case typ = <-events:
			case <-ctx.Done():
				err = ctx.Err()
			case <-s.over:
				err = engine.ErrNoSession
			}
		}
		unlisten()
		switch {
		case err != nil:
			return err
		case len(paths) == 0:
			<-ctx.Done()
			return ctx.Err()
		case typ == 0:
			return errBroken
		}
		wake()
	}
}

// watch sets watches, and returns the nodes that stand. It wakes if one does not, or is foreign.
func (s *session) watch(ctx context.Context, paths []string, wake func()) (stand []string, err error) {
	reqs := make([]request, len(paths))
	for i, path := range paths {
		reqs[i] = getData(path, true)
	}
	replies, err := s.do(ctx, reqs...)
	if err != nil {
		return nil, err
	}
	for i, a := range replies {
		switch n, err := a.node(); {
		case err == nil && n.stat.EphemeralOwner != 0:
			stand = append(stand, paths[i])
		case err == nil || isOneOf(err, codeNoNode):
			wake()
		default:
			return nil, err
		}
	}
	return stand, nil
}

// useDir notes that a name is used, and reports whether the driver has used it lately: then its node is likely to be
// there.
func (e *service) useDir(dir string) (known bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, known = e.dirs[dir]
	if len(e.dirs) > maxDirs {
		clear(e.dirs)
	}
	e.dirs[dir] = e.clock.Now()
	return known
}

// maxDirs bounds the names that are remembered.
const maxDirs = 20000

// emptyAfter is the time from the last use of a name until its node is removed. Removing and remaking it costs two
// writes, which a name that is used all the time should not pay.
const emptyAfter = 2 * time.Second

// Settle is engine.Settles's: it removes the node of a name that is not used any more. ZooKeeper removes empty
// containers as well, but once a minute, and some 150 in a second. A node that tells why holders lost the name is left
// to the servers. The server refuses to remove a node with entries.
func (e *service) Settle(ctx context.Context, name string) (again time.Duration, err error) {
	dir := e.dir(name)
	e.mu.Lock()
	used, known := e.dirs[dir]
	left := used.Add(emptyAfter).Sub(e.clock.Now())
	if s := e.standing(); s != nil && known && left <= 0 {
		delete(e.dirs, dir)
		e.mu.Unlock()
		replies, err := s.do(ctx, exists(dir))
		if err != nil {
			return 0, nil
		}
		if stat, err := replies[0].stat(); err == nil && stat.NumChildren == 0 && stat.DataLength == 0 {
			_, _ = s.do(ctx, remove(dir, stat.Version))
		}
		return 0, nil
	}
	e.mu.Unlock()
	return max(0, left), nil
}
