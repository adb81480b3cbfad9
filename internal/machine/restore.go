package machine

import (
	"bytes"
	"crypto/sha256"
	"io"
	"slices"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// Restore replaces the state by a snapshot, which it reads to its end. On an error, a *FormatError or r's, the
// machine stays as it was. Earlier events are gone: EventsSince returns *CompactedError below the snapshot's
// revision.
func (m *Machine) Restore(r io.Reader) error {
	fresh, err := read(r)
	if err != nil {
		return err
	}
	m.become(fresh)
	return nil
}

// RestoreBackup is Restore for a backup, which may be older than the state that clients have seen. It sets the
// revision ahead by 1<<32 plus more, so that every later token is greater than all tokens issued after the backup was
// made, and marks all below as compacted. It ends every session, because its holds and waits may have changed after
// the backup: holds with a MinHold linger, all other holds and waits are gone, and clients find that their session
// ended.
//
// It returns the longest TTL of a session in the backup. All replicas need the result: freeze it, and hand that
// snapshot to the cluster.
func (m *Machine) RestoreBackup(r io.Reader, more uint64) (longest time.Duration, err error) {
	fresh, err := read(r)
	if err != nil {
		return 0, err
	}
	const ahead = 1 << 32
	if more >= maxRevision || fresh.revision+more >= maxRevision-ahead {
		return 0, &FormatError{What: "snapshot", Why: "no revisions are left"}
	}
	fresh.revision += ahead + more
	fresh.past.base = fresh.revision
	for _, s := range fresh.sessionsByID() {
		longest = max(longest, s.ttl)
		fresh.endSession(s, EventExpired, CauseExpired, true)
		fresh.settle()
	}
	m.become(fresh)
	return longest, nil
}

// become adopts the state of fresh, which has no other user, and forgets all events.
func (m *Machine) become(fresh *Machine) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.revision, m.now, m.clock, m.limits, m.level = fresh.revision, fresh.now, fresh.clock, fresh.limits, fresh.level
	m.rules, m.policies = fresh.rules, fresh.policies
	m.sessions, m.holds, m.waits = fresh.sessions, fresh.holds, fresh.waits
	m.names, m.sorted, m.claimants, m.under, m.clients = fresh.names, fresh.sorted, fresh.claimants, fresh.under,
		fresh.clients
	m.past = history{base: m.revision, most: m.past.most}
}

func (m *Machine) sessionsByID() []*session {
	all := make([]*session, 0, len(m.sessions))
	for _, s := range m.sessions {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *session) int { return bytes.Compare(a.id[:], b.id[:]) })
	return all
}

func read(from io.Reader) (*Machine, error) {
	data, err := io.ReadAll(from)
	if err != nil {
		return nil, err
	}
	r := &reader{what: "snapshot", data: data}
	if len(data) < len(magic)+1+sha256.Size || string(data[:len(magic)]) != magic {
		r.fail("it is none, or cut off")
		return nil, r.err
	}
	body := data[:len(data)-sha256.Size]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], data[len(body):]) {
		r.fail("the checksum does not match")
		return nil, r.err
	}
	r.data, r.off = body, len(magic)
	version := r.byte()
	r.must(version >= snapshotFirst && version <= snapshotRules, "another version than this build reads")
	m := New(1)
	r.state(m, version)
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

func (r *reader) state(m *Machine, version byte) {
	m.revision = r.max(1<<63 - 1) // tokens carry a mark above
	m.past.base = m.revision
	m.now = r.int()
	m.limits = *r.limits()
	m.level = uint32(r.max(MaxLevel))
	r.must(m.level >= firstLevel && version == snapshotVersion(m.level), "the version is not that of the level")
	if version >= snapshotDeadlines {
		m.clock = r.duration()
		r.must(m.clock >= 0, "a negative clock")
		m.limits.ClientShare = int(r.int())
	}
	if version >= snapshotRules {
		text, count := r.text(), r.uint()
		given, err := newRules(text, count)
		r.must(err == nil && (text == "" || count > 0), "rules that make no sense")
		if r.err == nil {
			m.rules = given
		}
		policies, err := newPolicies(r.text())
		r.must(err == nil, "policies that make no sense")
		if r.err == nil {
			m.policies = policies
		}
	}
	_, wrong := m.limits.Wrong()
	r.must(!wrong, "a limit out of its bounds")

	var before SessionID
	for n := r.count(len(SessionID{})); n > 0 && r.err == nil; n-- {
		s := r.sessionState(version)
		r.must(bytes.Compare(s.id[:], before[:]) > 0, "sessions out of order")
		m.sessions[s.id], before = s, s.id
		m.use(s.client, Usage{Sessions: 1})
	}
	last := uint64(0)
	for n := r.count(minRequest); n > 0 && r.err == nil; n-- {
		h := r.hold(version)
		r.must(h.token.Order() > last && h.token.Order() <= m.revision, "tokens out of order")
		last = h.token.Order()
		r.must(h.Nonce == fencing.Nonce{} || m.level >= LevelNonces, "a nonce of a lower level")
		r.must(h.Sealed == "" || m.level >= LevelHiddenIDs, "a sealed id of a lower level")
		r.must(!h.HeedsMaxHold && h.For == "" || m.level >= LevelRules, "a request of a lower level")
		r.must(h.lingering() || m.sessions[h.session] != nil, "a hold of no session")
		if r.err == nil {
			m.shareOwner(h)
			m.addHold(h)
		}
	}
	last = 0
	for n := r.count(minRequest); n > 0 && r.err == nil; n-- {
		w := r.wait()
		r.must(w.ticket > last && w.ticket <= m.revision, "tickets out of order")
		last = w.ticket
		r.must(m.sessions[w.session] != nil, "a wait of no session")
		if r.err == nil {
			m.addWait(w)
		}
	}
}

func (r *reader) sessionState(version byte) *session {
	s := &session{id: r.session(), ttl: r.duration()}
	if version >= snapshotDeadlines {
		s.due = r.duration()
		r.must(s.due >= 0, "a negative deadline")
		s.client = r.text()
		r.must(checkText("", s.client, maxOwnerBytes) == nil, "a client that cannot be")
	}
	if version >= snapshotHiddenIDs {
		s.principal = principal.Principal(r.text())
		r.must(checkText("", string(s.principal), maxOwnerBytes) == nil, "a principal that cannot be")
	}
	s.acked = r.uint()
	last := s.acked
	for n := r.count(2); n > 0 && r.err == nil; n-- {
		seq := r.uint()
		r.must(seq > last, "results out of order")
		last = seq
		s.results = append(s.results, remembered{seq, r.result()})
	}
	return s
}

func (r *reader) hold(version byte) *hold {
	order := r.max(1<<63 - 1)
	h := &hold{token: fencing.Token(order), session: r.session(), since: r.int()}
	if version >= snapshotRules {
		h.max = r.duration()
		r.must(h.max >= 0 && (h.max == 0 || !h.lingering()), "a maximum that cannot be")
	}
	h.Request = r.request()
	if h.Kind != Exclusive {
		h.token = h.token.NotExclusive()
	}
	r.sane(&h.Request, version >= snapshotRules)
	return h
}

func (r *reader) wait() *wait {
	w := &wait{ticket: r.uint(), session: r.session(), since: r.int(), requests: r.requests(), under: r.texts()}
	for i := range w.requests {
		r.sane(&w.requests[i], false)
	}
	r.must(len(w.requests) > 0, "a wait for nothing")
	r.must(checkUnder(w.under) == nil, "a wait under what cannot be")
	if r.err == nil {
		claims, ok := mergeClaims(nil, w.requests)
		r.must(ok, "a wait that excludes itself")
		w.claims = claims
	}
	return w
}

// sane fails if q has fields on which the state depends and which no acquire would have accepted. over: a hold may
// have more permits than its limit, which was lowered later.
func (r *reader) sane(q *Request, over bool) {
	known := q.Kind <= Permits && q.Name != ""
	fits := q.Kind != Permits && q.Limit == 0 && q.Permits == 0 ||
		q.Permits >= 1 && q.Limit >= 1 && (over || q.Permits <= q.Limit) && !q.Hierarchical
	r.must(known && fits && q.MinHold >= 0, "a request that cannot be")
}

func (r *reader) result() *Result {
	code := Code(r.byte())
	if code == 0 {
		return nil
	}
	r.must(code <= CodeDenied && code != CodeGranted && code != CodeQueued, "a code that is not remembered")
	result := &Result{Code: code}
	has := r.flags(3)
	if has[0] {
		b := r.blocker()
		result.Holder = &b
	}
	if has[1] {
		n := r.count(len(SessionID{}))
		r.must(n > 0, "a cycle of nobody")
		for ; n > 0 && r.err == nil; n-- {
			result.Cycle = append(result.Cycle, r.blocker())
		}
	}
	if has[2] {
		result.Field, result.Detail = r.text(), r.text()
		r.must(result.Field != "" || result.Detail != "", "an empty explanation")
	}
	return result
}

func (r *reader) blocker() Blocker {
	return Blocker{
		Name: r.text(), Session: r.session(), Owner: r.text(), HoldID: r.text(), Waits: r.flags(1)[0],
	}
}
