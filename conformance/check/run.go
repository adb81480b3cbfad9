package check

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// never is later than all instants.
const never = backend.Instant(1<<63 - 1)

// call is a call with its return.
type call struct {
	Event                 // of the call
	ret   backend.Instant // never if missing
	out   Outcome         // Unknown if missing
	err   string
	gone  bool // its client was killed before it returned
	seen  []fencing.Token
	holds *hold // of an acquire: the granted hold; of a release: the released one
}

// hold is one hold of a name, assembled from its events.
type hold struct {
	start   backend.Instant // of the history, the origin of times in texts
	client  string
	name    string
	kind    backend.Kind
	permits int
	limit   int
	token   fencing.Token

	call, ret backend.Instant // of the acquire
	grants    []*call         // all acquires that returned it: several if its request was repeated

	// The hold was valid for its holder from begin until end, if begin is before end.
	begin, end backend.Instant

	sentAt  backend.Instant // of the last confirmation
	expires backend.Instant // the service keeps it at least until then, unless released; never without a TTL
	ttl     time.Duration   // the longest
	slack   time.Duration   // from the deadline to the end of the TTL, as granted
	until   backend.Instant // the deadline, or never

	// All releases: from the first call to the last return. never without a release.
	relCall, relRet backend.Instant
	relOut          Outcome

	told   backend.Instant   // when its holder was notified of the loss; never if not
	why    string            // the reason of the loss; empty if not lost
	forced backend.Instant   // the earliest instant of a force-release, or never
	taken  []backend.Instant // the instants of recorded force-releases
	killed backend.Instant   // when its holder was killed; never if not
	proofs []proof
}

// proof is a renewal that the service has confirmed.
type proof struct{ sent, seen backend.Instant }

// keeps returns the instant until which the service certainly keeps the hold.
func (h *hold) keeps() backend.Instant { return min(h.relCall, h.expires, h.forced) }

// takenBefore reports whether h may have been force-released before at. Its holder may notice that late, but without
// a renewal at the latest after the TTL.
func (h *hold) takenBefore(at backend.Instant, ttl time.Duration) bool {
	return h.forced <= at && (len(h.taken) == 0 || slices.ContainsFunc(h.taken, func(taken backend.Instant) bool {
		return taken <= at && h.end <= taken.Add(ttl)
	}))
}

// lost reports whether the hold was lost.
func (h *hold) lost() bool {
	return h.why != "" && h.why != string(backend.ReasonClosed) || h.relOut == Gone
}

func (h *hold) String() string {
	s := fmt.Sprintf("the %s hold of %q by %s with token %v, believed in from %v",
		h.kind, h.name, h.client, h.token, h.begin.Sub(h.start))
	switch {
	case h.end <= h.begin:
		s = strings.Replace(s, "believed in from", "never believed in, granted at", 1)
	default:
		s += fmt.Sprintf(" for %v", h.end.Sub(h.begin))
	}
	if h.why != "" {
		s += " (" + h.why + ")"
	}
	return s
}

// conflicts reports whether two holds of one name exclude each other. Permits are counted instead.
func conflicts(a, b *hold) bool {
	if a.kind == backend.KindPermits && b.kind == backend.KindPermits {
		return a.limit != b.limit
	}
	return a.kind != backend.KindShared || b.kind != backend.KindShared
}

// exceeds returns a hold of others beside which h cannot be granted, or nil.
func exceeds(h *hold, others []*hold) *hold {
	used, last := h.permits, (*hold)(nil)
	for _, o := range others {
		if conflicts(h, o) {
			return o
		}
		used, last = used+o.permits, o
	}
	if h.kind == backend.KindPermits && used > h.limit {
		return last
	}
	return nil
}

// name has the calls and holds of one name.
type name struct {
	name  string
	calls []*call // by call
	holds []*hold // by call
}

// run is an assembled history.
type run struct {
	rules     Rules
	names     []*name // by name
	calls     []*call
	begin     backend.Instant
	end       backend.Instant
	troubles  []span // from each fault until the end of all faults
	healed    []backend.Instant
	renewals  int
	faults    int
	malformed []Violation

	byRequest map[identity]*hold
	kills     []Event
	longest   time.Duration
}

type span struct{ from, to backend.Instant }

// key is an ID with its client.
type key struct {
	client string
	id     uint64
}

// gather pairs calls with returns, and collects the events of each hold.
func gather(history History, rules Rules) *run {
	r := &run{rules: rules, byRequest: map[identity]*hold{}}
	if n := len(history.Events); n > 0 {
		r.begin, r.end = history.Events[0].At, history.Events[n-1].At
	}
	calls := map[key]*call{}
	for _, e := range history.Events {
		k := key{e.Client, e.ID}
		c := calls[k]
		if what := e.unknown(); what != "" {
			r.odd(e, what)
			continue
		}
		switch e.Type {
		case TypeCall:
			if c != nil {
				r.odd(e, "there is another call with this number")
				continue
			}
			c = &call{Event: e, ret: never, out: Unknown}
			calls[k] = c
			r.calls = append(r.calls, c)
			if e.Op == OpRelease {
				if a := calls[key{e.Client, e.Hold}]; a != nil && a.holds != nil {
					c.holds = a.holds
					a.holds.release(e, rules)
				} else {
					r.odd(e, "nothing was granted that it could release")
				}
			}
		case TypeReturn:
			if c == nil || c.ret != never {
				r.odd(e, "there is no call that returns here")
				continue
			}
			r.returned(c, e)
		case TypeRenewed, TypeEnd:
			if c == nil || c.holds == nil {
				r.odd(e, "nothing was granted that it could tell of")
				continue
			}
			c.holds.hear(e, rules)
			if e.Type == TypeRenewed {
				r.renewals++
			}
		case TypeKilled:
			r.kills = append(r.kills, e)
		case TypeFault:
			r.faults++
			if n := len(r.troubles); n == 0 || r.troubles[n-1].to != never {
				r.troubles = append(r.troubles, span{e.At, never})
			}
		case TypeHealed:
			r.healed = append(r.healed, e.At)
			if n := len(r.troubles); n > 0 {
				r.troubles[n-1].to = min(r.troubles[n-1].to, e.At)
			}
		default:
			r.odd(e, "nobody knows this type of event")
		}
	}
	r.kill()
	r.sort()
	return r
}

func (r *run) odd(e Event, text string) {
	r.malformed = append(r.malformed, Violation{
		Kind: Malformed, Name: e.Name, At: e.At, Text: fmt.Sprintf("%s: %s", text, e.since(r.begin)),
	})
}

// returned records the return of a call.
func (r *run) returned(c *call, e Event) {
	c.ret, c.out, c.err, c.seen = e.At, e.Outcome, e.Err, e.Seen
	switch {
	case c.Op == OpRelease && c.holds != nil:
		h := c.holds
		h.relRet, h.relOut = e.At, e.Outcome
	case (c.Op == OpAcquire || c.Op == OpTry) && e.Outcome == OK:
		r.granted(c, e)
	}
}

// granted makes the hold that an acquire returned, or finds the existing one of a repeated request.
func (r *run) granted(c *call, e Event) {
	c.Request = e.Request
	again := identity{c.Name, e.Request, e.Token}
	if h := r.byRequest[again]; h != nil && e.Request != "" {
		c.holds = h
		h.client = c.Client
		h.grants = append(h.grants, c)
		h.relRet, h.relOut = never, "" // if a hold has several leases, the last release counts
		h.promise(e, r.rules)
		h.end, h.told, h.why = h.until, never, ""
		return
	}
	h := &hold{
		start:  r.begin,
		client: c.Client, name: c.Name, kind: kinds[e.Kind], permits: e.Permits, limit: e.Limit, token: e.Token,
		call: c.At, ret: e.At, grants: []*call{c}, begin: e.At, expires: never, until: never,
		relCall: never, relRet: never, told: never, forced: never, killed: never,
	}
	if e.TTL > 0 && e.Deadline != 0 {
		h.slack = max(0, e.SentAt.Add(e.TTL).Sub(e.Deadline))
	}
	h.promise(e, r.rules)
	h.end = h.until
	c.holds = h
	r.byRequest[again] = h
}

// identity identifies a hold: two grants with equal identities are the same hold.
type identity struct {
	name, request string
	token         fencing.Token
}

// promise records the last confirmation of the service.
func (h *hold) promise(e Event, rules Rules) {
	h.ttl = max(h.ttl, e.TTL)
	if e.Deadline != 0 {
		h.until = e.Deadline
	}
	switch {
	case e.TTL == 0 && e.Deadline == 0:
		if len(h.proofs) == 0 && h.expires == never && h.sentAt == 0 {
			h.expires = h.ret // without a confirmation it may have ended immediately
		}
		return
	case e.TTL == 0 && h.ttl != 0 && rules.Exact:
		h.expires = min(h.expires, e.Deadline.Add(h.slack)) // an earlier deadline takes effect
	case e.TTL == 0:
		h.expires = e.Deadline
	case e.Deadline == 0:
		h.expires = e.SentAt.Add(e.TTL)
	case rules.Exact:
		h.expires = min(e.SentAt.Add(e.TTL), e.Deadline.Add(h.slack))
	default:
		h.expires = e.Deadline
	}
	if e.SentAt > max(h.sentAt, h.call) && h.sentAt != 0 {
		h.proofs = append(h.proofs, proof{e.SentAt, e.At})
	}
	h.sentAt = max(h.sentAt, e.SentAt)
}

// release records that the holder releases the hold.
func (h *hold) release(e Event, rules Rules) {
	if e.Deadline != 0 || e.TTL != 0 {
		h.promise(e, rules)
	}
	h.relCall = min(h.relCall, e.At)
	h.relOut, h.relRet = Unknown, never
	if h.told == never {
		h.end = min(e.At, h.until)
	}
}

// hear records a renewal, or the end of the hold.
func (h *hold) hear(e Event, rules Rules) {
	if e.Deadline != 0 || e.TTL != 0 {
		h.promise(e, rules)
	}
	if e.Type == TypeRenewed {
		if h.relCall == never && h.told == never {
			h.end = h.until
		}
		return
	}
	h.told, h.why = e.At, e.Why
	h.end = min(e.At, h.until)
	switch backend.Reason(e.Why) {
	case backend.ReasonForceReleased, backend.ReasonClosed:
		h.forced = h.ret // the exact time is unknown
	}
}

// kill ends the calls and holds of killed clients.
func (r *run) kill() {
	for _, k := range r.kills {
		for _, c := range r.calls {
			if c.At > k.At || !of(c.Client, k.Client) {
				continue
			}
			c.gone = c.gone || c.ret > k.At
			if h := c.holds; h != nil && h.client == c.Client {
				h.killed = min(h.killed, k.At)
				h.end = min(h.end, k.At)
			}
		}
	}
}

// sort orders calls and holds by name and time, and records force-releases.
func (r *run) sort() {
	names := map[string]*name{}
	seen := map[*hold]bool{}
	var forces []*call
	for _, c := range r.calls {
		n := names[c.Name]
		if n == nil {
			n = &name{name: c.Name}
			names[c.Name] = n
		}
		n.calls = append(n.calls, c)
		if c.Op == OpForce {
			forces = append(forces, c)
		}
		if h := c.holds; h != nil && !seen[h] {
			seen[h] = true
			// The validity of a hold is unknown after the end of the history, but known at the end.
			h.end = min(h.end, r.end+1)
			n.holds = append(n.holds, h)
		}
	}
	for _, c := range forces {
		to := c.ret
		if c.out == Unknown {
			to = never
		}
		for _, h := range names[c.Name].holds {
			if c.out != Refused && h.call <= to && c.At <= min(h.relRet, max(h.end, h.expires)) {
				h.forced = min(h.forced, max(c.At, h.call))
				h.taken = append(h.taken, max(c.At, h.call))
			}
		}
	}
	for _, k := range slices.Sorted(maps.Keys(names)) {
		n := names[k]
		slices.SortStableFunc(n.holds, func(a, b *hold) int { return cmp.Compare(a.call, b.call) })
		r.names = append(r.names, n)
	}
}

// ttl returns the time for which the service may keep a hold that no client knows of.
func (r *run) ttl() time.Duration {
	if r.longest == 0 {
		r.longest = max(r.rules.TTL, time.Nanosecond)
		for _, n := range r.names {
			for _, h := range n.holds {
				r.longest = max(r.longest, h.ttl)
			}
		}
	}
	return r.longest
}

// since returns the time from the start of the history to at.
func (r *run) since(at backend.Instant) time.Duration { return at.Sub(r.begin) }

// killedAt returns the instant at which the client of an unreturned call was killed.
func (r *run) killedAt(c *call) backend.Instant {
	at := r.end
	for _, k := range r.kills {
		if k.At >= c.At && of(c.Client, k.Client) {
			at = min(at, k.At)
		}
	}
	return at
}

// of reports whether a client belongs to a process.
func of(client, process string) bool {
	return client == process || strings.HasPrefix(client, process+"/")
}
