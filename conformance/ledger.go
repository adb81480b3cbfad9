package conformance

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// ledger keeps the grants of all drivers in one clause, and checks every later answer against them. Its findings are
// failures on any machine, however slow: two holds valid at the same time, tokens out of order, a repeated nonce, an
// impossible SentAt.
//
// It uses the drivers' answers and the drivers' clock. If a hold may have ended meanwhile (by a release of its
// request, an eviction, a restart), the ledger assumes that it has.
type ledger struct {
	mu     sync.Mutex // protects the following fields
	holds  map[string][]*hold
	nonces map[fencing.Nonce]*hold
	shows  map[string][]*hold // by HoldID
	ends   map[string]int     // the step of the last attempt to end the holds of a request, of a name or of all
	doubt  map[string]bool    // requests with a release that may still arrive
	ran    bool               // a hold has expired
	step   int                // counts events, many of which share one instant in simulated time
}

// hold is one hold, as its driver granted and renewed it.
type hold struct {
	backend.Grant
	metadata map[string]string
	minimum  bool
	longest  time.Duration // of its TTLs
	at       int           // the step at which it was granted
	over     bool          // it may have ended before its TTL
	released bool          // its release was confirmed
	rival    int           // the step at which a rival was granted the name, or 0
}

// believed returns the end of the hold's validity.
func (h *hold) believed(t *trial) backend.Instant { return h.SentAt.Add(t.desc.Validity(h.TTL)) }

// lives reports whether the hold is still valid at an instant.
func (h *hold) lives(t *trial, at backend.Instant) bool { return !h.over && at < h.believed(t) }

// everything is the key in ends for actions that end all holds.
const everything = "\x00"

func (l *ledger) init() {
	if l.holds == nil {
		l.holds, l.nonces = map[string][]*hold{}, map[fencing.Nonce]*hold{}
		l.shows, l.ends, l.doubt = map[string][]*hold{}, map[string]int{}, map[string]bool{}
	}
}

// next starts a step and returns its number.
func (l *ledger) next() int {
	l.step++
	return l.step
}

// begins returns the step at which a call begins.
func (l *ledger) begins() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next()
}

// end records that holds may end now: those of one request, of one name, or all.
func (l *ledger) end(t *trial, name, request string) {
	now := t.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.init()
	key := name + "\x00" + request
	if name == "" {
		key = everything
	}
	l.ends[key] = l.next()
	for of, holds := range l.holds {
		for _, h := range holds {
			if (name == "" || name == of) && (request == "" || request == h.RequestID) {
				l.stop(h, now)
			}
		}
	}
}

// stop marks a hold as ended.
func (l *ledger) stop(h *hold, now backend.Instant) {
	l.ran = l.ran || !h.over && now >= h.SentAt.Add(h.TTL)
	h.over = true
}

// released records a confirmed release.
func (l *ledger) released(g backend.Grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.holds[g.Name] {
		if h.RequestID == g.RequestID && h.Incarnation == g.Incarnation && h.Incarnation != "" {
			h.released = true
		}
	}
}

// lost checks a loss that the driver reports. A report names the request, but not which of its holds was lost.
func (l *ledger) lost(t *trial, name, request string) {
	l.mu.Lock()
	holds, released := 0, 0
	for _, h := range l.holds[name] {
		if h.RequestID == request {
			holds++
			if h.released {
				released++
			}
		}
	}
	l.mu.Unlock()
	if holds > 0 && released == holds {
		t.Violatedf("a hold of %q is reported lost after its release was confirmed", name)
	}
	l.end(t, name, request)
}

// ending calls end before, and done calls it after, a call that may end holds.
func (t *trial) ending(name, request string) (done func()) {
	t.ledger.end(t, name, request)
	return func() { t.ledger.end(t, name, request) }
}

// requestOf returns the request of the hold with the nonce.
func (l *ledger) requestOf(n fencing.Nonce) (request string, found bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.nonces[n]
	if h == nil {
		return "", false
	}
	return h.RequestID, true
}

// doubtful records that a release of a request may arrive at any time.
func (l *ledger) doubtful(name, request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.init()
	l.doubt[name+"\x00"+request] = true
}

// forget drops all holds: after a wipe, tokens may start again.
func (l *ledger) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.holds)
}

// ranOut reports whether a hold of the clause has expired: a late step may then have caused the failure of the
// clause.
func (l *ledger) ranOut(now backend.Instant) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, holds := range l.holds {
		for _, h := range holds {
			if !h.over && now >= h.SentAt.Add(h.TTL) {
				return true
			}
		}
	}
	return l.ran
}

// granted checks one grant.
func (l *ledger) granted(t *trial, r backend.Request, g backend.Grant, when asking) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.init()
	for _, wrong := range []string{
		misstated(r, g), l.stamped(t, "the grant", g.SentAt, g.TTL, r.TTL, r.TTL, when), numbered(t, g),
	} {
		if wrong != "" {
			t.Violatedf("%s (of %q)", wrong, r.Name)
		}
	}
	before := l.repeated(t, r, g, when)
	if before == nil {
		before = &hold{at: l.next(), metadata: maps.Clone(r.Metadata), minimum: r.MinHold > 0}
		l.first(t, g, when)
		l.holds[g.Name] = append(l.holds[g.Name], before)
		l.shows[g.HoldID] = append(l.shows[g.HoldID], before)
	}
	before.Grant = g
	before.longest = max(before.longest, g.TTL)
	before.over = l.mayHaveEnded(g, when.step)
	if g.Nonce != (fencing.Nonce{}) {
		l.nonces[g.Nonce] = before
	}
	l.alone(t, before, when)
}

// misstated describes the fields of a grant that differ from the request.
func misstated(r backend.Request, g backend.Grant) string {
	want := r.Grant()
	got := backend.Grant{
		Name: g.Name, Owner: g.Owner, RequestID: g.RequestID, HoldID: g.HoldID, Kind: g.Kind, Permits: g.Permits,
		Limit: g.Limit, Hierarchical: g.Hierarchical, TTL: want.TTL,
	}
	if got != want {
		return fmt.Sprintf("the grant is %+v, want the values of the request: %+v", got, want)
	}
	if g.MinHoldUntil.IsZero() != (r.MinHold == 0) {
		return fmt.Sprintf("MinHoldUntil is %v after an acquire with MinHold %v", g.MinHoldUntil, r.MinHold)
	}
	return ""
}

// stamped describes what is wrong with an answer's SentAt or TTL.
func (l *ledger) stamped(
	t *trial, what string, sent backend.Instant, ttl, least, most time.Duration, when asking,
) string {
	switch age, step := when.to.Sub(sent), t.desc.TTLGranularity; {
	case sent.IsZero():
		return what + " has no SentAt"
	case age < 0:
		return fmt.Sprintf("SentAt of %s lies %v after the return of the call", what, -age)
	case age < when.delay:
		return fmt.Sprintf("SentAt of %s is %v old over a link that takes %v for a request and its answer: "+
			"it was read after sending", what, age, when.delay)
	case ttl < least:
		return fmt.Sprintf("the TTL of %s is %v, shorter than the requested %v", what, ttl, least)
	case ttl > most+step:
		return fmt.Sprintf("the TTL of %s is %v, longer than the requested %v and the granularity of %v",
			what, ttl, most, step)
	}
	return ""
}

// numbered describes what is wrong with a grant's token or nonce by itself.
func numbered(t *trial, g backend.Grant) string {
	fences := t.desc.Capabilities.Has(backend.CapFencing)
	switch {
	case !fences && g.Token != 0:
		return fmt.Sprintf("a driver that does not declare fencing granted token %v: a guard would trust it", g.Token)
	case fences && (!g.Token.Valid() || g.Token.Exclusive() != (g.Kind == backend.KindExclusive)):
		return fmt.Sprintf("token %v of a hold of kind %v: want one that is marked as not exclusive where the kind "+
			"is not", g.Token, g.Kind)
	case g.Nonce == fencing.Nonce{}:
		return "the grant has no nonce"
	}
	return ""
}

// repeated returns the hold that the request already has, or nil. The grant must be of the same hold.
func (l *ledger) repeated(t *trial, r backend.Request, g backend.Grant, when asking) *hold {
	for _, h := range l.holds[r.Name] {
		if h.RequestID != r.RequestID {
			continue
		}
		if same := h.Token == g.Token && h.Nonce == g.Nonce && g.Incarnation == h.Incarnation; same {
			return h
		}
		if !h.lives(t, when.to) || l.mayHaveEnded(g, h.at) {
			continue
		}
		if h.Token != g.Token || h.Nonce != g.Nonce {
			t.Violatedf("a request that holds %q with token %v and nonce %v was granted it with token %v and nonce %v: "+
				"want the same hold", r.Name, h.Token, h.Nonce, g.Token, g.Nonce)
		}
		return h
	}
	return nil
}

// first checks the token and the nonce of a new hold.
func (l *ledger) first(t *trial, g backend.Grant, when asking) {
	if other := l.nonces[g.Nonce]; other != nil {
		t.Violatedf("the hold of %q has the nonce %v, which an earlier hold of %q has had", g.Name, g.Nonce, other.Name)
	}
	if g.Kind != backend.KindExclusive || g.Token == 0 {
		return
	}
	for _, h := range l.holds[g.Name] {
		if h.at < when.step && h.Kind == backend.KindExclusive && h.Token >= g.Token {
			t.Violatedf("token %v of %q after %v: want a greater one", g.Token, g.Name, h.Token)
			return
		}
	}
}

// mayHaveEnded reports whether a call or an outage may have ended the hold since a step.
func (l *ledger) mayHaveEnded(g backend.Grant, since int) bool {
	of := g.Name + "\x00"
	for _, key := range []string{everything, of, of + g.RequestID} {
		if at, ok := l.ends[key]; ok && at > since {
			return true
		}
	}
	return l.doubt[of+g.RequestID]
}

// alone checks a grant against the conflicting holds that are still valid when it returns.
func (l *ledger) alone(t *trial, h *hold, when asking) {
	if !h.lives(t, when.to) {
		return
	}
	taken := h.Permits
	for name, holds := range l.holds {
		if name != h.Name && !(h.Hierarchical && (below(name, h.Name) || below(h.Name, name))) {
			continue
		}
		for _, other := range holds {
			switch {
			case other == h || other.RequestID == h.RequestID && name == h.Name:
			case h.Kind == backend.KindPermits && other.Kind == backend.KindPermits:
				if other.lives(t, when.to) {
					taken += other.Permits
				}
			case h.Kind == backend.KindShared && other.Kind == backend.KindShared:
			default:
				if other.lives(t, when.to) {
					t.Violatedf("two holders: %q was granted to %v while a hold of %v on %q is valid for another %v",
						h.Name, h.Kind, other.Kind, name, other.believed(t).Sub(when.to))
				}
				other.rival = h.at
			}
		}
	}
	if taken > h.Limit {
		t.Violatedf("%d of %d permits of %q are held at once", taken, h.Limit, h.Name)
	}
}

// below reports whether a path lies below another.
func below(path, other string) bool { return strings.HasPrefix(path, other+"/") }

// renewed checks one renewal.
func (l *ledger) renewed(t *trial, g backend.Grant, r backend.Renewal, when asking) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.init()
	var of *hold
	for _, h := range l.holds[g.Name] {
		if h.RequestID == g.RequestID && h.Incarnation == g.Incarnation && h.Token == g.Token {
			of = h
		}
	}
	switch {
	case errors.Is(r.Err, backend.ErrNotHeld):
		if of != nil {
			l.stop(of, when.to)
		}
	case r.Err != nil:
	default:
		most := g.TTL // renewals never shorten
		if of != nil {
			most = max(most, of.longest)
		}
		if wrong := l.stamped(t, "the renewal", r.SentAt, r.TTL, g.TTL, most, when); wrong != "" {
			t.Violatedf("%s (of %q)", wrong, g.Name)
		}
		if of == nil {
			return
		}
		if of.rival != 0 && of.rival < when.step {
			t.Violatedf("a hold of %q was renewed after a rival had been granted it", g.Name)
		}
		of.SentAt, of.TTL = max(of.SentAt, r.SentAt), r.TTL
		of.longest = max(of.longest, r.TTL)
	}
}

// shown checks an inspected state of a name.
func (l *ledger) shown(t *trial, s backend.State) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, who := range s.Holders {
		holds := l.shows[who.HoldID]
		if len(holds) != 1 || holds[0].Name != s.Name { // not a hold of this clause, or ambiguous
			continue
		}
		if wrong := disguised(t, who, holds[0]); wrong != "" {
			t.Violatedf("%s (of %q)", wrong, s.Name)
		}
	}
}

// disguised describes a field of a shown holder that differs from its hold.
func disguised(t *trial, who backend.Holder, h *hold) string {
	switch {
	case who.Owner != h.Owner:
		return fmt.Sprintf("owner %q is shown, want %q", who.Owner, h.Owner)
	case who.Kind != h.Kind || h.Kind == backend.KindPermits && who.Permits != h.Permits:
		return fmt.Sprintf("%v of %d permits is shown, want %v of %d", who.Kind, who.Permits, h.Kind, h.Permits)
	case who.Token != h.Token && !h.over:
		return fmt.Sprintf("token %v is shown, want %v", who.Token, h.Token)
	case who.Nonce != h.Nonce && !h.over:
		return fmt.Sprintf("nonce %v is shown, want %v", who.Nonce, h.Nonce)
	case !maps.Equal(who.Metadata, h.metadata):
		return fmt.Sprintf("metadata %q is shown, want %q", who.Metadata, h.metadata)
	case who.ExpiresIn > h.longest+t.desc.TTLGranularity+time.Second && !h.minimum:
		return fmt.Sprintf("ExpiresIn is %v of a TTL of %v", who.ExpiresIn, h.longest)
	case strings.Contains(who.Owner+" "+who.HoldID, h.RequestID):
		return "the request id is shown"
	}
	return ""
}
