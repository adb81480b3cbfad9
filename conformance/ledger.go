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

// ledger keeps the grants of the drivers of one clause, and compares every further answer with them. Its findings are
// failures on any machine, however slow: two holders that believe in their grants at once, tokens out of order, a
// repeated nonce, a SentAt that nobody can have read in time.
//
// It judges by the drivers' answers, on the drivers' clock. Where somebody may have ended a hold meanwhile (a
// release of its request, an eviction, a restart) the ledger believes that it has ended.
type ledger struct {
	mu     sync.Mutex // protects the following fields
	holds  map[string][]*hold
	nonces map[fencing.Nonce]*hold
	shows  map[string][]*hold // by HoldID
	ends   map[string]int     // the step of the last attempt to end the holds of a request, of a name or of all
	doubt  map[string]bool    // requests with a release that may still arrive
	ran    bool               // a hold has run out
	step   int                // counts what happens here: in simulated time much has one instant
}

// hold is one hold, as its driver has told of it.
type hold struct {
	backend.Grant
	metadata map[string]string
	minimum  bool
	longest  time.Duration // of its TTLs
	at       int           // the step at which it was granted
	over     bool          // somebody may have ended it
	released bool          // its release was confirmed
	rival    int           // the step at which a rival was granted the name, or 0
}

// believed is the end of the holder's belief.
func (h *hold) believed(t *trial) backend.Instant { return h.SentAt.Add(t.desc.Validity(h.TTL)) }

// lives reports whether the holder still believes at an instant.
func (h *hold) lives(t *trial, at backend.Instant) bool { return !h.over && at < h.believed(t) }

// everything is the key of what ends all holds.
const everything = "\x00"

func (l *ledger) init() {
	if l.holds == nil {
		l.holds, l.nonces = map[string][]*hold{}, map[fencing.Nonce]*hold{}
		l.shows, l.ends, l.doubt = map[string][]*hold{}, map[string]int{}, map[string]bool{}
	}
}

// next returns the number of one more step.
func (l *ledger) next() int {
	l.step++
	return l.step
}

// begins returns the step of a call.
func (l *ledger) begins() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next()
}

// end notes that what name and request say may end now: the holds of one request, of a name, or all.
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

// stop ends the belief in a hold.
func (l *ledger) stop(h *hold, now backend.Instant) {
	l.ran = l.ran || !h.over && now >= h.SentAt.Add(h.TTL)
	h.over = true
}

// released notes that a release was confirmed.
func (l *ledger) released(g backend.Grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.holds[g.Name] {
		if h.RequestID == g.RequestID && h.Incarnation == g.Incarnation && h.Incarnation != "" {
			h.released = true
		}
	}
}

// lost judges a loss that the driver pushes. A loss does not say which hold of a request it means.
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

// ending is end before and after a call that may end something.
func (t *trial) ending(name, request string) (done func()) {
	t.ledger.end(t, name, request)
	return func() { t.ledger.end(t, name, request) }
}

// requestOf returns the request of the hold that has the nonce.
func (l *ledger) requestOf(n fencing.Nonce) (request string, found bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.nonces[n]
	if h == nil {
		return "", false
	}
	return h.RequestID, true
}

// doubtful notes that a release of a request may arrive at any time.
func (l *ledger) doubtful(name, request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.init()
	l.doubt[name+"\x00"+request] = true
}

// forget makes the count of tokens begin anew.
func (l *ledger) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.holds)
}

// ranOut reports whether a hold of the clause has ended by its TTL: a failure of the clause may then be the
// consequence of the clause's late steps.
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

// granted judges one grant.
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
		return fmt.Sprintf("the grant says %+v, want what the request asked for: %+v", got, want)
	}
	if g.MinHoldUntil.IsZero() != (r.MinHold == 0) {
		return fmt.Sprintf("MinHoldUntil is %v after an acquire with MinHold %v", g.MinHoldUntil, r.MinHold)
	}
	return ""
}

// stamped describes the fault of an answer's validity.
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
		return fmt.Sprintf("the TTL of %s is %v, shorter than the %v that were asked for", what, ttl, least)
	case ttl > most+step:
		return fmt.Sprintf("the TTL of %s is %v, longer than the %v that were asked for and the granularity of %v",
			what, ttl, most, step)
	}
	return ""
}

// numbered describes the fault of a grant's token and nonce, without other grants.
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

// repeated returns the hold that the request has already, or nil. That must be the same hold.
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

// first judges the numbers of a new hold.
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

// mayHaveEnded reports whether somebody tried to end the hold since an instant.
func (l *ledger) mayHaveEnded(g backend.Grant, since int) bool {
	of := g.Name + "\x00"
	for _, key := range []string{everything, of, of + g.RequestID} {
		if at, ok := l.ends[key]; ok && at > since {
			return true
		}
	}
	return l.doubt[of+g.RequestID]
}

// alone judges a grant against the holders that at its return still believe in a conflicting hold.
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
					t.Violatedf("two holders: %q was granted to %v while a hold of %v on %q is believed for another %v",
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

// renewed judges one renewal.
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

// shown judges what people see of a name.
func (l *ledger) shown(t *trial, s backend.State) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, who := range s.Holders {
		holds := l.shows[who.HoldID]
		if len(holds) != 1 || holds[0].Name != s.Name { // not one of ours, or of several
			continue
		}
		if wrong := disguised(t, who, holds[0]); wrong != "" {
			t.Violatedf("%s (of %q)", wrong, s.Name)
		}
	}
}

// disguised tells what of a holder is not shown as it is.
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
