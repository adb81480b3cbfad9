package machine

import (
	"bytes"
	"crypto/sha256"
	"io"
	"maps"
	"slices"
	"time"
)

// Frozen is the state of a machine at one moment. It stays as it is while the machine goes on, so it can be written
// from another goroutine.
type Frozen struct {
	revision uint64
	now      int64
	clock    time.Duration
	limits   Limits
	level    uint32
	rules    *Rules
	policies *Policies
	sessions []session // without holds and waits
	holds    map[uint64]*hold
	waits    map[uint64]*wait
}

// Freeze returns the present state. It copies pointers only: a few milliseconds for 100,000 locks, during which Apply
// waits.
func (m *Machine) Freeze() *Frozen {
	m.mu.RLock()
	defer m.mu.RUnlock()
	f := &Frozen{
		revision: m.revision, now: m.now, clock: m.clock, limits: m.limits, level: m.level, rules: m.rules,
		policies: m.policies,
		sessions: make([]session, 0, len(m.sessions)),
		holds:    maps.Clone(m.holds),
		waits:    maps.Clone(m.waits),
	}
	n := 0
	for _, s := range m.sessions {
		n += len(s.results)
	}
	results := make([]remembered, 0, n) // one allocation for all of them
	for _, s := range m.sessions {
		from := len(results)
		results = append(results, s.results...)
		f.sessions = append(f.sessions,
			session{
				id: s.id, ttl: s.ttl, due: s.due, client: s.client, principal: s.principal, acked: s.acked,
				results: results[from:],
			})
	}
	return f
}

// Hash returns a checksum of the whole state, without the kept events. Replicas that applied the same commands agree.
// It costs as much as writing a snapshot.
func (f *Frozen) Hash() [sha256.Size]byte {
	sum := sha256.New()
	_ = f.encode(func(piece []byte) error {
		sum.Write(piece) // never fails
		return nil
	})
	return [sha256.Size]byte(sum.Sum(nil))
}

// Revision returns the revision of the frozen state.
func (f *Frozen) Revision() uint64 { return f.revision }

// WriteTo writes the snapshot: versioned, and with a checksum at its end, which is Machine.Hash. The same state gives
// the same bytes.
func (f *Frozen) WriteTo(w io.Writer) (int64, error) {
	sum := sha256.New()
	both := io.MultiWriter(w, sum)
	var written int64
	err := f.encode(func(piece []byte) error {
		n, err := both.Write(piece)
		written += int64(n)
		return err
	})
	if err != nil {
		return written, err
	}
	n, err := w.Write(sum.Sum(nil))
	return written + int64(n), err
}

// Hash returns the checksum of the present state: see Frozen.Hash.
func (m *Machine) Hash() [sha256.Size]byte { return m.Freeze().Hash() }

// magic begins every snapshot; its version follows, in one byte.
const magic = "fencelock\x00"

// The versions of snapshots. The version depends on the level of the state, so that every member of a cluster can
// read the others' snapshots.
const (
	snapshotFirst     = 2
	snapshotDeadlines = 3 // from LevelDeadlines: the clock, each session's deadline, and its client
	snapshotHiddenIDs = 4 // from LevelHiddenIDs: hashes in place of ids, and the principals of sessions
	snapshotRules     = 5 // from LevelRules: rules, policies, and maximum hold times
)

func snapshotVersion(level uint32) byte {
	switch {
	case level < LevelDeadlines:
		return snapshotFirst
	case level < LevelHiddenIDs:
		return snapshotDeadlines
	case level < LevelRules:
		return snapshotHiddenIDs
	}
	return snapshotRules
}

// encode writes everything but the checksum, in pieces.
func (f *Frozen) encode(write func([]byte) error) error {
	var b []byte
	flush := func(most int) error {
		if len(b) <= most {
			return nil
		}
		err := write(b)
		b = b[:0]
		return err
	}
	version := snapshotVersion(f.level)
	b = append(append(b, magic...), version)
	b = appendUint(b, f.revision)
	b = appendInt(b, f.now)
	b = appendLimits(b, &f.limits)
	b = appendUint(b, uint64(f.level))
	if version >= snapshotDeadlines {
		b = appendInt(b, int64(f.clock))
		b = appendInt(b, int64(f.limits.ClientShare))
	}
	if version >= snapshotRules {
		b = appendText(b, f.rules.Text)
		b = appendUint(b, f.rules.Version)
		b = appendText(b, f.policies.Text)
	}
	const piece = 1 << 16

	sessions := slices.Clone(f.sessions)
	slices.SortFunc(sessions, func(a, b session) int { return bytes.Compare(a.id[:], b.id[:]) })
	b = appendUint(b, uint64(len(sessions)))
	for i := range sessions {
		b = appendSession(b, &sessions[i], version)
		if err := flush(piece); err != nil {
			return err
		}
	}
	b = appendUint(b, uint64(len(f.holds)))
	for _, h := range sorted(f.holds) {
		b = appendHold(b, h, version)
		if err := flush(piece); err != nil {
			return err
		}
	}
	b = appendUint(b, uint64(len(f.waits)))
	for _, w := range sorted(f.waits) {
		b = appendWait(b, w)
		if err := flush(piece); err != nil {
			return err
		}
	}
	return flush(0)
}

func appendSession(dst []byte, s *session, version byte) []byte {
	dst = append(dst, s.id[:]...)
	dst = appendInt(dst, int64(s.ttl))
	if version >= snapshotDeadlines {
		dst = appendInt(dst, int64(s.due))
		dst = appendText(dst, s.client)
	}
	if version >= snapshotHiddenIDs {
		dst = appendText(dst, string(s.principal))
	}
	dst = appendUint(dst, s.acked)
	dst = appendUint(dst, uint64(len(s.results)))
	for _, r := range s.results {
		dst = appendUint(dst, r.seq)
		dst = appendResult(dst, r.result)
	}
	return dst
}

func appendHold(dst []byte, h *hold, version byte) []byte {
	dst = appendUint(dst, h.token.Order())
	dst = append(dst, h.session[:]...)
	dst = appendInt(dst, h.since)
	if version >= snapshotRules {
		dst = appendInt(dst, int64(h.max))
	}
	return appendRequest(dst, &h.Request)
}

func appendWait(dst []byte, w *wait) []byte {
	dst = appendUint(dst, w.ticket)
	dst = append(dst, w.session[:]...)
	dst = appendInt(dst, w.since)
	dst = appendRequests(dst, w.requests)
	return appendTexts(dst, w.under)
}

// appendResult writes a remembered result; code zero stands for a command that is remembered without one. Remembered
// results have neither grants nor a ticket.
func appendResult(dst []byte, r *Result) []byte {
	if r == nil {
		return append(dst, 0)
	}
	dst = append(dst, byte(r.Code))
	dst = appendFlags(dst, r.Holder != nil, len(r.Cycle) > 0, r.Field != "" || r.Detail != "")
	if r.Holder != nil {
		dst = appendBlocker(dst, r.Holder)
	}
	if len(r.Cycle) > 0 {
		dst = appendUint(dst, uint64(len(r.Cycle)))
		for i := range r.Cycle {
			dst = appendBlocker(dst, &r.Cycle[i])
		}
	}
	if r.Field != "" || r.Detail != "" {
		dst = appendText(dst, r.Field)
		dst = appendText(dst, r.Detail)
	}
	return dst
}

func appendBlocker(dst []byte, b *Blocker) []byte {
	dst = appendText(dst, b.Name)
	dst = append(dst, b.Session[:]...)
	dst = appendText(dst, b.Owner)
	dst = appendText(dst, b.HoldID)
	return appendFlags(dst, b.Waits)
}

// duration reads a value of appendInt.
func (r *reader) duration() time.Duration { return time.Duration(r.int()) }
