package machine

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// TestMain lets rapid draw more logs than by default, to cover rare interleavings of three commands.
func TestMain(m *testing.M) {
	flag.Parse()
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		_ = checks.Value.Set("500")
	}
	os.Exit(m.Run())
}

// The world of the random logs is small, so that commands meet each other.
var (
	worldSessions = []SessionID{sid("a"), sid("b"), sid("c"), sid("d")}
	worldClients  = []string{"", "me"}
	worldNames    = []string{"x", "y", "z", "t", "t/1", "t/1/1", "t/2"}
	worldIDs      = []string{id("one"), id("two"), id("three")}
	worldOps      = []Op{
		OpOpenSession, OpOpenSession, OpCloseSession, OpExpire,
		OpAcquire, OpAcquire, OpAcquire, OpAcquire, OpAcquire, OpAcquire, OpAcquire, OpAcquire,
		OpCancelWait, OpCancelWait, OpRelease, OpRelease, OpRelease, OpRelease, OpRelease, OpRelease, OpMove, OpMove,
		OpForceRelease, OpFree, OpFree, OpFree, OpSetLimits, OpRaiseLevel,
		OpCheckpoint, OpCheckpoint, OpRenew, OpSetRules, OpSetPolicies,
	}
)

// newWorld returns a machine in which all sessions are open.
func newWorld(events int) *Machine {
	m := New(events)
	m.Apply(0, &Command{Op: OpRaiseLevel, Level: MaxLevel})
	for _, s := range worldSessions {
		m.Apply(0, &Command{Op: OpOpenSession, Session: s, TTL: time.Second, Client: worldClients[s[0]%2]})
	}
	return m
}

// drawCommand draws a command that has something to do with the state of m, most of the time.
func drawCommand(t *rapid.T, m *Machine) Command {
	c := Command{Op: rapid.SampledFrom(worldOps).Draw(t, "op")}
	c.Session = rapid.SampledFrom(worldSessions).Draw(t, "session")
	c.Linger = rapid.Bool().Draw(t, "linger")
	switch c.Op {
	case OpOpenSession:
		c.TTL, c.Client = time.Second, worldClients[c.Session[0]%2]
	case OpAcquire:
		c.Wait = rapid.IntRange(0, 5).Draw(t, "wait") > 0
		drawUnder(t, m, &c)
		for range rapid.SampledFrom([]int{1, 1, 1, 2, 3}).Draw(t, "requests") {
			c.Requests = append(c.Requests, drawRequest(t, c.Session))
		}
	case OpCancelWait, OpRelease, OpMove:
		drawTarget(t, m, &c)
		if c.Op != OpMove {
			c.Principal = rapid.SampledFrom([]principal.Principal{principal.Nobody, principal.Process}).Draw(t, "principal")
		}
	case OpForceRelease:
		c.Name = rapid.SampledFrom(worldNames).Draw(t, "name")
		c.Reason, c.By = "because", "root"
		if e := m.names[c.Name]; e != nil && e.holds.len() > 0 && rapid.Bool().Draw(t, "conditional") {
			c.Principal, c.Nonce = "certificate x", e.holds.first().Nonce
			c.Token = rapid.SampledFrom([]fencing.Token{0, 7, e.holds.first().token}).Draw(t, "token")
		}
	case OpFree:
		for _, h := range m.Timed() {
			c.Name, c.Token = h.Name, h.Token
			if rapid.Bool().Draw(t, "this") {
				break
			}
		}
	case OpSetLimits:
		l := DefaultLimits()
		l.WaitersPerName = rapid.IntRange(2, 20).Draw(t, "waiters")
		l.Holds = rapid.IntRange(10, 40).Draw(t, "holds")
		l.ClientShare = rapid.SampledFrom([]int{10, 25, 100}).Draw(t, "share")
		l.DeadlockSteps = rapid.IntRange(1, 30).Draw(t, "steps")
		c.Limits = &l
	case OpRaiseLevel:
		c.Level = MaxLevel
	case OpSetRules:
		c.Session = SessionID{}
		c.Rules = rapid.SampledFrom([]string{"", "allow * acquire,force t\nallow * acquire x\n"}).Draw(t, "rules")
	case OpSetPolicies:
		c.Session = SessionID{}
		c.Rules = rapid.SampledFrom([]string{
			"", "max-hold=1m t\nmax-hold=1s x\npermits=3 z\n", "max-queue=2 \"\"\npermits=6 z\n", "permits=2 z\n",
		}).Draw(t, "policies")
	case OpCheckpoint:
		c.Session, c.Clock = SessionID{}, time.Duration(rapid.IntRange(0, 100).Draw(t, "clock"))
		for range rapid.IntRange(0, 3).Draw(t, "deadlines") {
			c.Deadlines = append(c.Deadlines, Deadline{
				rapid.SampledFrom(worldSessions).Draw(t, "of"), time.Duration(rapid.IntRange(0, 100).Draw(t, "due")),
			})
		}
	}
	drawNumbers(t, m, &c)
	return c
}

// drawUnder draws the holds of an acquire, from its session or from others.
func drawUnder(t *rapid.T, m *Machine, c *Command) {
	for _, h := range sorted(m.holds) {
		if !slices.Contains(c.Under, h.ID) && rapid.IntRange(0, 2).Draw(t, "under") == 0 {
			c.Under = append(c.Under, h.ID)
		}
	}
}

func drawRequest(t *rapid.T, s SessionID) Request {
	r := Request{
		Name: rapid.SampledFrom(worldNames).Draw(t, "name"),
		// Ids carry their session: two clients never draw the same 128 bits.
		ID:    rapid.SampledFrom(worldIDs).Draw(t, "id") + string(s[:1]),
		Owner: string(s[:1]),
		Kind:  Kind(rapid.SampledFrom([]int{0, 0, 1, 1, 2}).Draw(t, "kind")),
	}
	r.HoldID = fmt.Sprintf("h-%x", sha256.Sum256([]byte(r.ID)))[:20]
	switch {
	case r.Name == "z":
		r.Kind = Permits
	case rapid.IntRange(0, 9).Draw(t, "tidy") > 0 && r.Kind == Permits:
		r.Kind = Shared
	}
	if r.Kind == Permits {
		r.Limit = rapid.SampledFrom([]uint32{4, 4, 4, 5}).Draw(t, "limit")
		r.Permits = rapid.Uint32Range(1, r.Limit).Draw(t, "permits")
	}
	// The names with a slash are hierarchical, mostly.
	odd := rapid.IntRange(0, 15).Draw(t, "odd") == 0
	r.Hierarchical = r.Kind != Permits && (r.Name[0] == 't') != odd
	if rapid.IntRange(0, 3).Draw(t, "minimum") == 0 {
		r.MinHold = time.Minute
	}
	r.HeedsMaxHold = rapid.IntRange(0, 7).Draw(t, "heeds") > 0
	if n := rapid.Byte().Draw(t, "nonce"); n < 200 {
		r.Nonce[0] = n
	}
	if rapid.IntRange(0, 7).Draw(t, "metadata") == 0 {
		r.Metadata = map[string]string{"k": "v", "": "w"}
	}
	return r
}

// drawTarget makes c name a hold or a wait of its session, if there is one.
func drawTarget(t *rapid.T, m *Machine, c *Command) {
	s, _ := m.Session(c.Session)
	if c.Op == OpMove {
		c.Session = rapid.SampledFrom(worldSessions).Draw(t, "to")
	}
	n := rapid.IntRange(0, len(s.Holds)+len(s.Waits)).Draw(t, "which")
	switch {
	case n < len(s.Holds):
		h := s.Holds[n]
		c.Name, c.RequestID = h.Name, h.RequestID
		if c.Op == OpRelease && rapid.Bool().Draw(t, "with token") {
			c.Token = h.Token
		}
	case n < len(s.Holds)+len(s.Waits):
		w := s.Waits[n-len(s.Holds)]
		c.Name, c.RequestID = w.Requests[0].Name, w.Requests[0].ID
	default:
		r := drawRequest(t, c.Session)
		c.Name, c.RequestID, c.Token = r.Name, r.ID, fencing.Token(rapid.Uint64Range(0, 50).Draw(t, "token"))
	}
	if rapid.IntRange(0, 3).Draw(t, "elsewhere") == 0 {
		c.Session = SessionID{}
	}
}

// drawNumbers gives c a sequence number: usually the next one, sometimes a used or a later one.
func drawNumbers(t *rapid.T, m *Machine, c *Command) {
	s := m.sessions[c.Session]
	if s == nil || c.Op <= OpExpire || c.Op == OpRenew || rapid.IntRange(0, 2).Draw(t, "numbered") == 0 {
		return
	}
	last := s.acked
	if n := len(s.results); n > 0 {
		last = s.results[n-1].seq
	}
	c.Seq = last + 1
	if rapid.IntRange(0, 9).Draw(t, "repeats") == 0 {
		c.Seq = max(1, last-min(last, 2)+rapid.Uint64Range(0, 4).Draw(t, "seq"))
	}
	if rapid.IntRange(0, 3).Draw(t, "acknowledges") == 0 {
		c.Acked = rapid.Uint64Range(0, c.Seq-1).Draw(t, "acked")
	}
	if c.Op == OpRelease || c.Op == OpCancelWait {
		c.Target = rapid.Uint64Range(0, c.Seq+2).Draw(t, "target")
	}
}

// witness checks the effect of each command.
type witness struct {
	t       tester
	m       *Machine
	holders map[fencing.Token]Event // by the events alone
	seen    uint64
	every   int // checks the whole state after one in so many commands; 0: after each
	applied int
}

// apply applies c to the machine and checks everything that can be checked.
func (w *witness) apply(at int64, c Command) (Result, []Notice) {
	before := w.m.Freeze()
	result, notices := w.m.Apply(at, &c)
	if w.applied++; w.every == 0 || w.applied%w.every == 0 {
		checkState(w.t, w.m)
	} else if bad := badHolders(sorted(w.m.holds)); bad != "" {
		w.t.Fatal(bad)
	}
	w.checkOrder(before)
	w.checkEvents()
	w.checkAnswer(before, &c, &result)
	return result, notices
}

// checkOrder checks that no grant passed a waiter with an earlier ticket or took permits that there are not, and that
// tokens increased. Earlier holds may have more permits than a lowered limit.
func (w *witness) checkOrder(before *Frozen) {
	ticketOf := map[string]uint64{} // of the requests that were granted after a wait
	for _, old := range before.waits {
		for _, r := range old.requests {
			ticketOf[r.Name+" "+r.ID] = old.ticket
		}
	}
	taken := map[string]uint64{}
	for _, h := range w.m.holds {
		taken[h.Name] += uint64(h.Permits)
	}
	for order, h := range w.m.holds {
		if before.holds[order] != nil {
			continue
		}
		if taken[h.Name] > uint64(h.Limit) {
			w.t.Fatalf("%+v is one permit too many: %d", h, taken[h.Name])
		}
		if order <= before.revision {
			w.t.Fatalf("token %d was granted at revision %d", order, before.revision)
		}
		if h.lingering() {
			continue
		}
		ticket, waited := ticketOf[h.Name+" "+h.ID]
		for _, still := range w.m.waits {
			if (!waited || still.ticket < ticket) && still.ticket <= before.revision && waitsBehind(&h.Request, still) {
				w.t.Fatalf("%+v was granted before %+v", h, still)
			}
		}
	}
}

// checkEvents checks that the holders follow from the events alone.
func (w *witness) checkEvents() {
	events, err := w.m.EventsSince(w.seen, 1<<20)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range events {
		w.seen++
		if e.Revision != w.seen {
			w.t.Fatalf("revision %d follows %d", e.Revision, w.seen-1)
		}
		_, held := w.holders[e.Token]
		switch e.Type {
		case EventAcquired:
			if e.Token.Order() != e.Revision {
				w.t.Fatalf("token %v at revision %d", e.Token, e.Revision)
			}
			w.holders[e.Token] = e
		case EventReleased, EventExpired, EventForced:
			if !held {
				w.t.Fatalf("%+v, and nobody held it", e)
			}
			delete(w.holders, e.Token)
		}
	}
	if w.seen != w.m.Revision() {
		w.t.Fatalf("events end at %d, the revision is %d", w.seen, w.m.Revision())
	}
	n := 0
	for _, h := range w.m.holds {
		if h.lingering() {
			continue
		}
		n++
		if e := w.holders[h.token]; e.Name != h.Name || e.HoldID != h.HoldID {
			w.t.Fatalf("%+v is held, the events say %+v", h, e)
		}
	}
	if n != len(w.holders) {
		w.t.Fatalf("%d holds, %d by the events", n, len(w.holders))
	}
}

// checkAnswer checks that the code matches what happened.
func (w *witness) checkAnswer(before *Frozen, c *Command, r *Result) {
	changed := w.m.Revision() != before.revision
	switch r.Code {
	case CodeGranted:
		for _, g := range r.Grants {
			h := w.m.holds[g.Token.Order()]
			if h == nil || h.lingering() || h.Name != g.Name || h.ID != g.RequestID || h.token != g.Token {
				w.t.Fatalf("granted %+v, and the hold is %+v", g, h)
			}
		}
	case CodeQueued:
		if w.m.waits[r.Ticket] == nil {
			w.t.Fatalf("queued with ticket %d, which waits not", r.Ticket)
		}
	case CodeOK:
	default:
		if changed {
			w.t.Fatalf("%+v: code %d, and the revision went from %d to %d", c, r.Code, before.revision, w.m.Revision())
		}
	}
}

// checkRepeat repeats a numbered command: it must give the same answer and have no effect.
func (w *witness) checkRepeat(at int64, c Command, first Result) {
	hash := w.m.Hash()
	second, notices := w.m.Apply(at, &c)
	if first.Code == CodeNotHeld && second.Code == CodeNotHeld {
		first, second = Result{}, Result{}
	}
	if !reflect.DeepEqual(first, second) || len(notices) > 0 || w.m.Hash() != hash {
		w.t.Fatalf("%+v again:\n%+v, first\n%+v; %d notices", c, second, first, len(notices))
	}
}

// drain releases every hold, one by one: every waiter must get its grant, and nothing may remain.
func (w *witness) drain() {
	for steps := 0; len(w.m.holds)+len(w.m.waits) > 0; steps++ {
		if steps > 10_000 || len(w.m.holds) == 0 {
			w.t.Fatalf("%d waiters, %d holds after %d steps", len(w.m.waits), len(w.m.holds), steps)
		}
		h := sorted(w.m.holds)[0]
		c := Command{Op: OpRelease, Name: h.Name, RequestID: h.ID, Token: h.token}
		if h.lingering() {
			c = Command{Op: OpFree, Name: h.Name, Token: h.token}
		}
		if r, _ := w.apply(1, c); r.Code != CodeOK {
			w.t.Fatalf("%+v: code %d", c, r.Code)
		}
	}
	if n := len(w.m.names) + len(w.m.claimants) + len(w.m.under); n > 0 {
		w.t.Fatalf("%d names, claimants and holds to wait under are left over", n)
	}
}

// For any log, the invariants hold during and between commands, and the machine can be emptied.
func TestAnyLog(t *testing.T) { rapid.Check(t, anyLog) }

// FuzzAnyLog is TestAnyLog with logs that the fuzzer draws.
func FuzzAnyLog(f *testing.F) { f.Fuzz(rapid.MakeFuzz(anyLog)) }

func anyLog(t *rapid.T) {
	w := &witness{t: t, m: newWorld(1 << 16), seen: firstRevision, holders: map[fencing.Token]Event{}}
	for at := range int64(rapid.IntRange(10, 150).Draw(t, "length")) {
		c := drawCommand(t, w.m)
		result, _ := w.apply(at, c)
		if c.Seq != 0 && result.Code != CodeNoSession {
			w.checkRepeat(at, c, result)
		}
	}
	w.drain()
}

// Any log gives the same answers and the same state on a second replica that reads the log's encoding, and on a
// replica that starts from a snapshot at any entry.
func TestReplicasAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := newWorld(16)
		var (
			entries   [][]byte
			answers   []answer
			snapshots [][]byte
		)
		for range rapid.IntRange(5, 50).Draw(t, "length") {
			at := rapid.Int64Range(0, 1000).Draw(t, "at") // leaders' clocks go back
			snapshots = append(snapshots, snapshot(t, first))
			c := drawCommand(t, first)
			entries = append(entries, AppendBatch(nil, &Batch{At: at, Commands: []Command{c}}))
			answers = append(answers, answerOf(first.Apply(at, &c)))
		}
		for from := range entries {
			replica := New(1)
			if err := replica.Restore(bytes.NewReader(snapshots[from])); err != nil {
				t.Fatal(err)
			}
			for i := from; i < len(entries); i++ {
				b, err := DecodeBatch(entries[i])
				if err != nil {
					t.Fatal(err)
				}
				if got := answerOf(replica.Apply(b.At, &b.Commands[0])); !reflect.DeepEqual(got, answers[i]) {
					t.Fatalf("from %d, command %d %+v:\n%+v, first\n%+v", from, i, b.Commands[0], got, answers[i])
				}
			}
			checkState(t, replica)
			if replica.Hash() != first.Hash() {
				t.Fatalf("from %d: another state", from)
			}
		}
	})
}

// answer is the output of Apply.
type answer struct {
	result  Result
	notices []Notice
}

func answerOf(r Result, notices []Notice) answer { return answer{r, notices} }

func snapshot(t tester, m *Machine) []byte {
	var b bytes.Buffer
	if n, err := m.Freeze().WriteTo(&b); err != nil || n != int64(b.Len()) {
		t.Fatalf("WriteTo = %d, %v; wrote %d", n, err, b.Len())
	}
	return b.Bytes()
}

// A frozen state never changes, even if the machine does.
func TestFrozenStaysFrozen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newWorld(1)
		var (
			f    *Frozen
			want []byte
		)
		n := rapid.IntRange(10, 60).Draw(t, "length")
		cut := rapid.IntRange(0, n-1).Draw(t, "frozen at")
		for i := range n {
			if i == cut {
				f, want = m.Freeze(), snapshot(t, m)
			}
			c := drawCommand(t, m)
			m.Apply(int64(i), &c)
		}
		var got bytes.Buffer
		if _, err := f.WriteTo(&got); err != nil || !bytes.Equal(got.Bytes(), want) {
			t.Fatalf("the frozen state changed; %v", err)
		}
	})
}
