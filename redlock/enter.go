package redlock

import (
	"context"
	mathrand "math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	// hedgeTime is for a first majority, before the other servers are asked beside it.
	hedgeTime = 3 * time.Millisecond
	// asideTime is the time for which a server that kept a call waiting is not asked first.
	asideTime = time.Second
	// tries bounds the polls of one Enter that meet faults, and splitTries the polls without a majority.
	tries, splitTries = 3, 12
	// patientFor is the number of Enters with split votes before a waiter drops its own: a release that has reached only
	// some servers looks the same.
	patientFor = 3
)

// attempt is one Enter.
type attempt struct {
	s       *service
	r       *backend.Request
	keys    redisscript.Keys
	attempt string // its name
	began   backend.Instant
	again   bool // an earlier Enter went unanswered: only an answer resolves that
	finds   bool // the next poll leaves an earlier hold of the request as it is
	place
	// The hold that the present try asks for, and its texts.
	h                          redisscript.Hold
	value, begins, incarnation string
}

// place is the state of an attempt between its Enters: Position.Place.
type place struct {
	may     set    // nodes that may have an entry of the request
	leader  int    // in whose queue it stands, unless it has reached
	reached int    // Enters since the leader gave its vote; 0: it has not
	nonce   string // of the present try
	px      string
}

func (p *place) String() string {
	return strings.Join([]string{
		strconv.Itoa(int(p.may)), strconv.Itoa(p.leader), strconv.Itoa(p.reached), p.nonce, p.px,
	}, " ")
}

func placeOf(text string) (p place) {
	if f := strings.Fields(text); len(f) == 5 {
		may, _ := strconv.Atoi(f[0])
		p.may, p.nonce, p.px = set(may), f[3], f[4]
		p.leader, _ = strconv.Atoi(f[1])
		p.reached, _ = strconv.Atoi(f[2])
	}
	return p
}

// prefixDigits is the length of the part of a nonce that names the attempt.
const prefixDigits = 2 * redisconn.KeyDigits

// start returns the common prefix of the values of all tries.
func (s *service) start(p place) string {
	return p.px + "|" + s.identity + "|" + p.nonce[:prefixDigits]
}

// Enter is engine.Service's. A free name takes one poll: a majority of the servers is asked, and the others where that
// does not decide, or not soon. A waiter then enters the queue of the leader, and asks the others when it has the
// leader's vote. Each vote that counts was given or confirmed in this Enter.
//
// A poll without a majority is no outcome. So Enter repeats it after a pause, in which Await sees the end of its time.
func (s *service) Enter(ctx context.Context, e engine.Entering) (engine.Position, error) {
	now := s.clock.Now()
	s.look(now)
	r := &e.Request
	a := &attempt{
		s: s, r: r, keys: s.keys(r.Name), place: placeOf(e.Place), attempt: e.Attempt, began: now,
	}
	if a.nonce == "" {
		a.next()
		if a.again = e.Again; e.Again || !r.Fresh { // it may be anywhere
			a.may = s.all()
		}
	} else {
		a.hold()
	}
	if a.may != 0 && e.Place == "" {
		s.sendLater(r.RequestID, "") // so that this poll finds them
		a.finds = true
	}
	if !r.Wait {
		return a.poll(ctx)
	}
	leader := s.leader()
	if e.Place == "" && (a.may != 0 || !s.wanted.Has(a.keys.Lock)) || leader < 0 && a.reached == 0 {
		v := a.vote(ctx)
		switch {
		case v.yes >= s.quorum:
			s.voteLater(a, v)
			return a.granted(), nil
		case count(v.holders) >= s.quorum:
			if p, ok := a.adopt(ctx, v); ok {
				return p, nil
			}
		case v.fault != nil && v.fault.Fatal:
			a.may |= v.left()
			return a.failed(v.fault)
		case v.fault != nil && v.left() == 0 && v.yes+v.no == 0: // no server was reached
			return engine.Position{}, v.undecided(false)
		case v.left() != 0:
			a.drop(v.left())
			a.next()
		}
		s.wanted.Note(a.keys.Lock)
		if v.ended || leader < 0 && s.leader() < 0 {
			return a.refused(v.held), nil
		}
	}
	return a.wait(ctx, e.Handed)
}

// next begins another try. Each has its own nonce: the removal of the last one, which may still be in flight, must not
// take from the next.
func (a *attempt) next() {
	b := redisconn.AppendKey(make([]byte, 0, 48), a.s.seed, a.r.RequestID)
	b = redisconn.AppendKey(b, a.s.seed, a.attempt)
	a.nonce = string(strconv.AppendUint(b, a.s.nonces.Add(1), 36))
	a.reached = 0
	a.hold()
	a.px = redisscript.Millis(a.h.PX)
}

func (a *attempt) hold() {
	a.h = redisconn.HoldOf(*a.r, a.s.identity, a.nonce)
	a.value, a.begins, a.incarnation = a.h.Texts()
}

// poll acquires without waiting. A poll with enough refusals to rule out a majority was split, whatever faults it met.
// An error after which nothing can be left is repeated by the engine.
func (a *attempt) poll(ctx context.Context) (engine.Position, error) {
	s := a.s
	for faults, splits := 0, 0; ; a.next() {
		v := a.vote(ctx)
		if v.yes >= s.quorum {
			s.voteLater(a, v)
			return a.granted(), nil
		}
		if count(v.holders) >= s.quorum {
			if p, ok := a.adopt(ctx, v); ok {
				return p, nil
			}
			continue
		}
		left := v.left()
		a.may |= left
		pause := time.Duration(0)
		switch {
		case v.top >= s.quorum: // held
			return a.refused(v.held), nil
		case v.fault == nil || v.no > len(s.nodes)-s.quorum: // split
			if splits++; splits == splitTries {
				return a.refused(v.held), nil
			}
			pause = splitPause(splits)
		case v.fault.Sent && !v.fault.Fatal, a.again && left != 0:
			return engine.Position{}, v.undecided(true)
		case a.again || left == 0 && !v.fault.Fatal: // the engine repeats it
			return engine.Position{}, v.undecided(false)
		default:
			if faults++; v.fault.Fatal || faults == tries {
				return a.failed(v.fault)
			}
			pause = redisconn.Backoff(faults)
		}
		a.drop(left)
		if !sleep(ctx, pause) {
			if v.held == nil && v.fault != nil {
				return a.failed(v.fault)
			}
			return a.refused(v.held), nil
		}
	}
}

// sleep returns false if the time of ctx is over before that.
func sleep(ctx context.Context, d time.Duration) bool {
	_, how := engine.Await(ctx, time.After(d), nil)
	return how == engine.Answered
}

// splitPause returns the pause after the n-th split vote: 1 ms and up to 128 ms more, growing with n, so that one of
// many attempts is likely to be alone for a round trip. A fixed pause would keep attempts together that came together.
func splitPause(n int) time.Duration {
	return time.Millisecond + mathrand.N(min(128*time.Millisecond, 2*time.Millisecond<<n))
}

// adopt returns the hold that the request has by another attempt, of which v found a majority of the votes. From then on
// only a release ends it: the removal of that attempt spares it. Without ok the hold has ended meanwhile.
func (a *attempt) adopt(ctx context.Context, v *vote) (p engine.Position, ok bool) {
	s := a.s
	a.drop(v.left())
	r := s.round(a.keys, s.nodeTimeout(a.r.TTL))
	r.to(v.holders, redisscript.TryAgain, a.value, a.px, a.r.RequestID, redisscript.KeepsShared)
	var votes set
	if !r.wait(ctx, s.nodeTimeout(a.r.TTL), func(p *step) bool {
		if of, kept := redisscript.ParseKept(p.Answer, a.r.RequestID); kept && of == v.found {
			votes |= only(p.node)
		}
		return count(votes) >= s.quorum
	}, nil) {
		r.silent()
	}
	if count(votes) < s.quorum {
		a.drop(v.holders)
		a.next()
		return p, false
	}
	a.drop(v.holders &^ votes) // if that attempt's vote was removed there meanwhile, this try has voted
	return a.grantedAs(v.found), true
}

// granted is the position of a hold.
func (a *attempt) granted() engine.Position { return a.grantedAs(a.incarnation) }

// grantedAs is the position of a hold. Its incarnation has the metadata, for servers that lack the hold.
func (a *attempt) grantedAs(incarnation string) engine.Position {
	p := engine.Position{
		Held: true, Incarnation: redisconn.WithMetadata(incarnation, a.h),
		Nonce: redisscript.NonceOf(redisscript.StartOf(incarnation, a.r.RequestID)),
	}
	if a.r.MinHold > 0 {
		p.MinHoldUntil = a.s.clock.Now().Add(a.r.MinHold) // not before the servers' grants
	}
	return p
}

// refused is the position of an attempt that others keep from the name. The engine removes its votes and places.
func (a *attempt) refused(held *backend.HeldError) engine.Position {
	return engine.Position{Placed: a.may != 0, Place: a.place.String(), Poll: true, Holder: held}
}

// failed is the position of an attempt that ends with a fault, and the fault.
func (a *attempt) failed(f *redisconn.Failure) (engine.Position, error) {
	return a.refused(nil), &engine.Refusal{Err: f}
}

// drop removes this try's entries on some nodes, and does not wait for that: later steps reach those nodes after it,
// and the end of the attempt removes any entry that remains.
func (a *attempt) drop(nodes set) {
	a.may |= nodes
	a.s.round(a.keys, a.s.nodeTimeout(a.r.TTL)).to(nodes, redisscript.Undo, a.begins)
}

// vote is one poll.
type vote struct {
	round
	a       *attempt
	args    []string
	again   bool
	healthy int // nodes that are known to answer
	kept    set // nodes that have, or may have, the try's vote
	yes, no int
	found   string             // the hold that the request has by another attempt: its incarnation
	holders set                // nodes that have its vote
	refused map[string]int     // how many nodes were held by each request that was in the way
	top     int                // the most refusals for one request
	held    *backend.HeldError // which is that
}

// vote polls: a first majority, and the other nodes if that does not decide, or not soon. It returns as soon as the
// outcome is certain, or the time is over.
func (a *attempt) vote(ctx context.Context) *vote {
	s := a.s
	v := &vote{a: a, again: a.may != 0}
	v.begin(s, a.keys, s.nodeTimeout(a.r.TTL))
	v.args = []string{a.value, a.px, a.r.RequestID, redisscript.KeepsSpared}
	if a.finds {
		v.args[3], a.finds = redisscript.Finds, false
	}
	for _, n := range s.nodes {
		if !n.sick.Load() {
			v.healthy++
		}
	}
	v.ask(v.first())
	if !v.wait(ctx, s.hedgeTime, v.answered, v.slow) && !v.certain() {
		v.silent()
	}
	return v
}

// first returns the nodes that a poll begins with: a majority of the healthy ones, in the order of the list, so that
// clients with the same view meet on the same servers. Random majorities of two clients may share one server only, and
// split the votes of the others. A request that was here before may have votes on any server, and all are replaced.
func (v *vote) first() (first set) {
	s := v.s
	if v.again || s.o.WaitForAll {
		return s.all()
	}
	now, left := time.Now().UnixNano(), s.quorum
	for i, n := range s.nodes {
		if n.aside.Load() < now {
			first |= only(i)
			if left--; left == 0 {
				return first
			}
		}
	}
	return s.all()
}

// ask asks nodes that were not asked before. An uncontended name is taken without the script.
func (v *vote) ask(nodes set) {
	code, args := redisscript.Set, v.args[:2]
	switch {
	case v.again:
		code, args = redisscript.TryAgain, v.args
	case v.s.wanted.Has(v.keys.Lock):
		code = redisscript.Try
	}
	v.to(nodes, code, args...)
}

// slow acts on a first majority that does not answer soon: the others are asked beside it, and the late ones are asked
// last for a while.
func (v *vote) slow() (done bool) {
	for i, n := range v.s.nodes {
		if v.open.has(i) {
			n.putAside()
		}
	}
	v.ask(v.s.all() &^ v.asked)
	return false
}

func (n *node) putAside() { n.aside.Store(time.Now().Add(asideTime).UnixNano()) }

// answered processes one answer, and reports whether no more are needed. If a server refused SET NX, the script is asked
// too, which names the holder: without it a lock that is held looks like a split vote.
func (v *vote) answered(p *step) (done bool) {
	s := v.s
	n, isNumber := p.Answer.(int64)
	switch {
	case p.Err != nil:
		s.nodes[p.node].putAside()
		if p.Err.Sent {
			v.kept |= only(p.node)
		}
	case p.Code == redisscript.Set && n != redisscript.TakeGranted:
		s.wanted.Note(v.keys.Lock)
		v.send(p.node, redisscript.Try, v.args[:2]...)
		return false
	case isNumber && n == 1:
		v.kept |= only(p.node)
		v.yes++
	default:
		if of, kept := redisscript.ParseKept(p.Answer, v.a.r.RequestID); kept {
			v.finds(p, of)
		} else {
			v.refusal(p.Answer)
		}
	}
	if v.certain() {
		// The later grant of a request replaces the earlier one on all nodes that are known to answer.
		return !v.again && !s.o.WaitForAll || v.yes+v.no >= v.healthy
	}
	if p.Err != nil || v.open == 0 {
		v.ask(s.all() &^ v.asked)
	}
	return false
}

// certain reports whether more answers cannot change the outcome: a majority for this try, or for one other holder.
func (v *vote) certain() bool {
	return v.yes >= v.s.quorum || v.top >= v.s.quorum || count(v.holders) >= v.s.quorum
}

// finds notes that a node has the vote of an earlier hold of the request. The next try replaces the votes of holds
// without a majority, and of this attempt's earlier tries.
func (v *vote) finds(p *step, incarnation string) {
	v.no++
	own := strings.HasPrefix(incarnation, v.s.start(v.a.place)) && p.Args[3] == redisscript.Finds
	if !own && (v.holders == 0 || v.found == incarnation) {
		v.found = incarnation
		v.holders |= only(p.node)
	}
}

// left returns the nodes that have, may have, or will have the try's vote.
func (v *vote) left() set { return v.kept | v.open }

// refusal notes who holds the vote of a node. A hold is counted by its request, so that two tries of one request are one
// holder; a closed name by its mark.
func (v *vote) refusal(answer any) {
	v.no++
	state, ok := redisscript.ParseState(answer)
	if !ok || state.Value == "" {
		return // it was free in the end
	}
	id := state.Value
	if state.Held {
		id = state.Hold.Request
	}
	if v.refused == nil {
		v.refused = map[string]int{}
	}
	v.refused[id]++
	if v.refused[id] > v.top {
		v.top, v.held = v.refused[id], redisconn.HeldError(v.a.r.Name, state)
	}
}

// wait enters the leader's queue, or with the leader's vote asks the other nodes, whose queues are almost empty then.
// Queues on all nodes would differ in their order, and with many waiters no request would get a majority.
//
// handed is the node that has offered its vote, and the nonce to which. An offer has to be accepted, or ends after a
// second.
func (a *attempt) wait(ctx context.Context, handed string) (engine.Position, error) {
	s, offered, nonce := a.s, -1, ""
	if handed != "" {
		node, of, _ := strings.Cut(handed, " ")
		offered, _ = strconv.Atoi(node)
		nonce = of
	}
	var votes, places set
	var r *round
	for range s.nodes {
		if offered >= 0 || a.reached > 0 {
			break
		}
		if a.leader = s.leader(); a.leader < 0 {
			return a.refused(nil), nil
		}
		r = s.round(a.keys, s.nodeTimeout(a.r.TTL))
		a.queue(r, a.leader)
		var answer any
		if r.wait(ctx, s.nodeTimeout(a.r.TTL), func(*step) bool { return true }, nil) {
			answer = r.steps[a.leader].Answer
		} else {
			r.silent()
		}
		switch {
		case r.ended || r.fault != nil && r.fault.Fatal:
			return engine.Position{}, r.undecided(false)
		case r.fault != nil:
			s.nodes[a.leader].sick.Store(true) // waiters choose another leader
		case answer == int64(0):
			return engine.Position{Placed: true, Queued: true, Place: a.place.String()}, nil
		case answer == int64(1):
			votes, offered = only(a.leader), a.leader
		}
	}
	if offered < 0 && a.reached == 0 {
		return engine.Position{}, r.undecided(false)
	}
	a.reached++
	r = s.round(a.keys, s.nodeTimeout(a.r.TTL))
	for i := range s.nodes {
		switch {
		case votes.has(i):
		case i == offered && nonce == a.nonce:
			a.may |= only(i)
			r.send(i, redisscript.Accept, a.begins, a.px)
		default:
			a.queue(r, i)
		}
	}
	if !r.wait(ctx, s.hedgeTime, func(p *step) bool {
		switch {
		case p.Err != nil:
		case p.Answer == int64(1):
			votes |= only(p.node)
		case p.Answer == int64(0) && p.Code != redisscript.Accept:
			places |= only(p.node)
		}
		return count(votes) >= s.quorum
	}, func() bool { return count(votes|places) >= s.quorum }) { // pushes notify the places
		r.silent()
	}
	switch {
	// Votes that took long are confirmed once more, while that may help: little of their time is left.
	case count(votes) >= s.quorum && (s.clock.Now().Sub(a.began) <= a.r.TTL/4 || a.reached > patientFor):
		p := a.granted()
		p.Queued = true
		return p, nil
	case r.fault != nil && r.fault.Fatal:
		return a.failed(r.fault)
	case count(votes) < s.quorum && a.reached > patientFor && !r.ended: // the votes are split: after a random pause one waiter is alone
		a.drop(a.may)
		a.next()
		if sleep(ctx, splitPause(patientFor)) {
			return a.wait(ctx, "")
		}
	}
	p := a.refused(nil)
	p.Queued = true
	return p, nil
}

// queue asks node i for its vote, or a place in its queue; without a subscription there, for its vote alone.
func (a *attempt) queue(r *round, i int) {
	once, again := redisscript.Wait, redisscript.WaitAgain
	if a.s.nodes[i].up.Load() != standing {
		once, again = redisscript.Try, redisscript.TryAgain
	}
	if a.may.has(i) {
		r.send(i, again, a.value, a.px, a.r.RequestID, redisscript.KeepsSpared)
	} else {
		r.send(i, once, a.value, a.px)
	}
	a.may |= only(i)
}
