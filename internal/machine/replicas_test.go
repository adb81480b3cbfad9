package machine

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

// cluster is three replicas of a machine with one log, the timers of the leader, and the clients, in simulated time.
// One goroutine draws everything from one seed.
type cluster struct {
	t *testing.T
	*rand.Rand
	now time.Duration

	w        *witness         // applies every entry first, and checks it
	origin   []byte           // the snapshot with which the log begins
	entries  [][]byte         // the log
	answers  [][]answer       // of each entry
	states   map[int][32]byte // the hash of the state, by the number of entries
	replicas [3]*replica

	leader  int           // or
	elected time.Duration // when there will be one, if the leader is noLeader
	expiry  map[SessionID]time.Duration
	frees   map[fencing.Token]free
	pool    []Command // on their way to the leader, in no order
	clients []*client
	opened  int
	backup  []byte // may be old
	tokens  map[string]uint64

	commands, grants, expiries, crashes, elections, restores, disasters int
}

const noLeader = -1

// replica is one member. Its machine is nil while it is down.
type replica struct {
	m       *Machine
	applied int
	disk    []byte // its last snapshot
	at      int    // after so many entries
	back    time.Duration
}

// free is the time at which the leader frees a lingering hold.
type free struct {
	name string
	at   time.Duration
}

// client sends commands on a session, until it dies and another client replaces it.
type client struct {
	session SessionID
	ttl     time.Duration
	seq     uint64
	sent    []Command // numbered commands, for repeats
	kept    time.Duration
	dies    time.Duration
	asks    int // ids so far
}

func newCluster(t *testing.T, seed uint64) *cluster {
	c := &cluster{
		t: t, Rand: rand.New(rand.NewPCG(seed, 1)), states: map[int][32]byte{}, expiry: map[SessionID]time.Duration{},
		frees: map[fencing.Token]free{}, tokens: map[string]uint64{}, leader: noLeader,
	}
	c.w = &witness{t: t, m: New(1 << 12), seen: firstRevision, holders: map[fencing.Token]Event{}, every: 32}
	c.origin = snapshot(t, c.w.m)
	c.backup = c.origin
	for i := range c.replicas {
		c.replicas[i] = &replica{disk: c.origin}
		c.start(c.replicas[i])
	}
	for range 5 {
		c.clients = append(c.clients, &client{})
	}
	return c
}

func (c *cluster) one(n int) bool { return c.IntN(n) == 0 }

// within draws a duration up to most.
func (c *cluster) within(most time.Duration) time.Duration {
	return time.Duration(c.Int64N(int64(most))) + 1
}

// run simulates d, and then settles the cluster.
func (c *cluster) run(d time.Duration) {
	for c.now < d {
		c.now += time.Duration(c.ExpFloat64() * float64(600*time.Millisecond))
		c.weather()
		c.timers()
		for _, cl := range c.clients {
			c.turn(cl)
		}
		c.deliver()
		for _, r := range c.replicas {
			if r.m != nil && c.one(3) {
				c.apply(r, c.IntN(1+2*(len(c.entries)-r.applied)))
			}
		}
	}
	c.settle()
}

// weather stops and starts replicas, takes snapshots, and has elections and disasters.
func (c *cluster) weather() {
	for i, r := range c.replicas {
		switch {
		case r.m == nil && c.now >= r.back:
			c.start(r)
		case r.m == nil:
		case c.one(300): // it forgets what is not on its disk
			c.crashes++
			r.m, r.back = nil, c.now+c.within(20*time.Second)
			if c.leader == i {
				c.depose()
			}
		case c.one(80):
			r.disk, r.at = snapshot(c.t, r.m), r.applied
			c.compare(r)
		}
	}
	switch {
	case c.leader == noLeader && c.now >= c.elected:
		c.elect()
	case c.leader != noLeader && c.one(600):
		c.depose()
	case c.one(1000):
		r := c.replicas[c.IntN(3)]
		c.backup = r.disk // mostly older than the state that clients have seen
	case c.one(2000):
		c.disaster()
	}
}

// start starts a replica from its own snapshot, or from a snapshot of another replica.
func (c *cluster) start(r *replica) {
	from := r
	if other := c.replicas[c.IntN(3)]; other != nil && other.disk != nil && c.one(2) {
		from = other
	}
	r.m = New(1 + c.IntN(64))
	if err := r.m.Restore(bytes.NewReader(from.disk)); err != nil {
		c.t.Fatal(err)
	}
	r.disk, r.at, r.applied = from.disk, from.at, from.at
	c.restores++
	c.compare(r)
}

// apply lets r apply up to n entries, which must have the same effects as on the witness.
func (c *cluster) apply(r *replica, n int) {
	for ; n > 0 && r.applied < len(c.entries); n-- {
		b, err := DecodeBatch(c.entries[r.applied])
		if err != nil {
			c.t.Fatal(err)
		}
		for i := range b.Commands {
			got, want := answerOf(r.m.Apply(b.At, &b.Commands[i])), c.answers[r.applied][i]
			if !reflect.DeepEqual(got, want) {
				c.t.Fatalf("entry %d, command %+v:\n%+v, elsewhere\n%+v", r.applied, b.Commands[i], got, want)
			}
		}
		r.applied++
	}
	c.compare(r)
}

// compare checks that r has the state that the others had at the same place of the log.
func (c *cluster) compare(r *replica) {
	if want, known := c.states[r.applied]; known && r.m.Hash() != want {
		c.t.Fatalf("after %d entries the replicas differ", r.applied)
	}
}

// depose leaves the cluster without a leader for a while. Commands on their way get lost, or arrive at the next
// leader.
func (c *cluster) depose() {
	c.leader, c.elected = noLeader, c.now+c.within(4*time.Second)
	c.pool = slices.DeleteFunc(c.pool, func(Command) bool { return c.one(2) })
}

// elect makes a replica the leader, if a majority is up. A new leader has applied the whole log, and gives every
// session and every lingering hold its full time from now.
func (c *cluster) elect() {
	var up []int
	for i, r := range c.replicas {
		if r.m != nil {
			up = append(up, i)
		}
	}
	if len(up) < 2 {
		return
	}
	c.elections++
	c.leader = up[c.IntN(len(up))]
	r := c.replicas[c.leader]
	c.apply(r, len(c.entries))
	clear(c.expiry)
	for _, s := range r.m.Sessions() {
		c.expiry[s.ID] = c.now + s.TTL
	}
	clear(c.frees)
	for _, h := range r.m.Lingering() {
		c.frees[h.Token] = free{h.Name, c.now + h.MinHold}
	}
}

// timers runs the timers of the leader.
func (c *cluster) timers() {
	if c.leader == noLeader {
		return
	}
	for _, id := range slices.SortedFunc(
		maps.Keys(c.expiry), func(a, b SessionID) int { return bytes.Compare(a[:], b[:]) },
	) {
		if c.now >= c.expiry[id] {
			c.expiries++
			c.commit(Command{Op: OpExpire, Session: id, Linger: c.one(2)})
		}
	}
	if c.one(4) {
		checkpoint := Command{Op: OpCheckpoint, Clock: c.now}
		for _, s := range c.w.m.sessionsByID() {
			if c.one(2) {
				checkpoint.Deadlines = append(checkpoint.Deadlines, Deadline{s.id, c.now + s.ttl})
			}
		}
		c.commit(Command{Op: OpRaiseLevel, Level: LevelDeadlines}, checkpoint)
	}
	for _, token := range slices.Sorted(maps.Keys(c.frees)) {
		if f := c.frees[token]; c.now >= f.at {
			delete(c.frees, token)
			c.commit(Command{Op: OpFree, Name: f.name, Token: token})
		}
	}
}

// deliver hands some commands of the pool to the leader, in any order and sometimes twice.
func (c *cluster) deliver() {
	for n := c.IntN(4); c.leader != noLeader && n > 0 && len(c.pool) > 0; n-- {
		var batch []Command
		for range 1 + c.IntN(3) {
			if len(c.pool) == 0 {
				break
			}
			i := c.IntN(len(c.pool))
			batch = append(batch, c.pool[i])
			if !c.one(10) {
				c.pool = slices.Delete(c.pool, i, i+1)
			}
		}
		c.commit(batch...)
	}
}

// commit appends an entry to the log. The witness carries it out first, then the leader; the others when they reach
// the entry.
func (c *cluster) commit(commands ...Command) {
	at := int64(c.now) + int64(c.leader)*int64(time.Minute) // leaders' clocks differ
	entry := AppendBatch(nil, &Batch{At: at, Commands: commands})
	b, err := DecodeBatch(entry)
	if err != nil {
		c.t.Fatal(err)
	}
	var answers []answer
	for i := range b.Commands {
		answers = append(answers, c.carryOut(at, b.Commands[i]))
	}
	c.entries, c.answers = append(c.entries, entry), append(c.answers, answers)
	if len(c.entries)%8 == 0 {
		c.states[len(c.entries)] = c.w.m.Hash()
	}
	if leader := c.replicas[c.leader]; leader.m != nil {
		c.apply(leader, len(c.entries))
	}
}

// carryOut applies one command to the witness, and follows tokens, waits, and the timers of the leader.
func (c *cluster) carryOut(at int64, cmd Command) answer {
	c.commands++
	waits, revision := slices.Collect(maps.Keys(c.w.m.waits)), c.w.m.Revision()
	result, notices := c.w.apply(at, cmd)
	if cmd.Seq != 0 && result.Code != CodeNoSession && c.one(8) {
		c.w.checkRepeat(at, cmd, result)
	}

	ended := 0 // waits, by what others were notified of
	for _, n := range notices {
		switch n.Type {
		case NoticeGranted:
			c.granted(n.Grants, revision)
			ended++
		case NoticeLingering:
			c.frees[n.Token] = free{n.Name, c.now + n.MinHold}
		case NoticeSessionEnded:
			delete(c.expiry, n.Session)
		}
	}
	events, err := c.w.m.EventsSince(revision, 1<<12)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, e := range events {
		if e.Type == EventCancelled {
			ended++
		}
	}
	for _, ticket := range waits {
		if c.w.m.waits[ticket] == nil {
			ended--
		}
	}
	if ended != 0 {
		c.t.Fatalf("%+v: %d waits more were granted or cancelled than ended", cmd, ended)
	}
	switch {
	case result.Code == CodeGranted:
		c.granted(result.Grants, revision)
	case cmd.Op == OpOpenSession && result.Code == CodeOK:
		c.expiry[cmd.Session] = c.now + cmd.TTL
	}
	return answerOf(result, notices)
}

// granted checks that tokens increase, even across crashes and restores.
func (c *cluster) granted(grants []Grant, before uint64) {
	for _, g := range grants {
		if g.Token.Order() <= before {
			continue // a repeated answer for an earlier grant
		}
		c.grants++
		if last := c.tokens[g.Name]; g.Token.Order() <= last {
			c.t.Fatalf("%q was granted with token %v after %d", g.Name, g.Token, last)
		}
		c.tokens[g.Name] = g.Token.Order()
	}
}

// turn runs one step of a client.
func (c *cluster) turn(cl *client) {
	s, open := c.w.m.Session(cl.session)
	switch {
	case c.now >= cl.dies:
		if open && cl.session != (SessionID{}) && c.now < cl.dies+3*cl.ttl {
			return // dead, and its session runs out
		}
		c.opened++
		*cl = client{
			session: sid(fmt.Sprintf("session-%d", c.opened)), ttl: 3*time.Second + c.within(30*time.Second),
			dies: c.now + c.within(10*time.Minute), kept: c.now,
		}
		c.send(Command{Op: OpOpenSession, Session: cl.session, TTL: cl.ttl})
		return
	case !open:
		if c.one(20) { // it got lost, or ended while the client could not renew it
			cl.dies = c.now
		}
		return
	case c.leader != noLeader && c.now-cl.kept > cl.ttl/3:
		if at, timed := c.expiry[cl.session]; timed && c.now < at { // once it is proposed to expire, it is too late
			c.expiry[cl.session] = c.now + cl.ttl
		}
		cl.kept = c.now
	}
	if c.one(6) {
		c.send(c.order(cl, s))
	}
}

func (c *cluster) send(cmd Command) { c.pool = append(c.pool, cmd) }

// order draws the next command of a client.
func (c *cluster) order(cl *client, s Session) Command {
	cmd := Command{Session: cl.session, Linger: c.one(2)}
	holds, waits := len(s.Holds), len(s.Waits)
	switch n := c.IntN(20); {
	case n == 0 && len(cl.sent) > 0:
		return cl.sent[c.IntN(len(cl.sent))] // a repeat, as after a lost answer
	case n == 1:
		l := DefaultLimits()
		l.WaitersPerName, l.DeadlockSteps = 3+c.IntN(20), 1+c.IntN(60)
		return Command{Op: OpSetLimits, Limits: &l}
	case n == 2:
		return Command{Op: OpForceRelease, Name: c.name(), Reason: "because", By: "root"}
	case n == 3 && c.one(10):
		return Command{Op: OpCloseSession, Session: cl.session, Linger: cmd.Linger}
	case n == 3 && holds > 0:
		h := s.Holds[c.IntN(holds)]
		cmd.Op, cmd.Name, cmd.RequestID = OpMove, h.Name, h.RequestID
		cmd.Session = c.clients[c.IntN(len(c.clients))].session
		return cmd
	case n < 6 && waits > 0:
		r := s.Waits[c.IntN(waits)].Requests[0]
		cmd.Op, cmd.Name, cmd.RequestID, cmd.Linger = OpCancelWait, r.Name, r.ID, false
	case holds > 0 && n < 6+3*holds:
		h := s.Holds[c.IntN(holds)]
		cmd.Op, cmd.Name, cmd.RequestID = OpRelease, h.Name, h.RequestID
		if c.one(2) {
			cmd.Token = h.Token
		}
	default:
		cmd.Op, cmd.Wait, cmd.Linger = OpAcquire, !c.one(6), false
		for range []int{1, 1, 1, 2, 3}[c.IntN(5)] {
			cmd.Requests = append(cmd.Requests, c.request(cl))
		}
	}
	if c.one(4) {
		return cmd // a command may come without a number
	}
	cl.seq++
	cmd.Seq = cl.seq
	if c.one(4) && cl.seq > 4 {
		cmd.Acked = cl.seq - 4
	}
	cl.sent = append(cl.sent, cmd)
	if len(cl.sent) > 8 {
		cl.sent = cl.sent[1:]
	}
	return cmd
}

func (c *cluster) name() string { return worldNames[c.IntN(len(worldNames))] }

func (c *cluster) request(cl *client) Request {
	cl.asks++
	r := Request{
		Name: c.name(), ID: id(fmt.Sprintf("%s-%d", cl.session[:12], cl.asks)), Owner: "somebody",
		Kind: Kind(c.IntN(2)),
	}
	if r.Name == "z" {
		r.Kind, r.Limit, r.Permits = Permits, 4, 1+c.Uint32N(4)
	}
	r.ID = string(bytes.ReplaceAll([]byte(r.ID), []byte{0}, []byte{'-'}))
	r.Hierarchical = r.Name[0] == 't'
	if c.one(5) {
		r.MinHold = c.within(time.Minute)
	}
	return r
}

// disaster loses all replicas, and the cluster is restored from a backup.
func (c *cluster) disaster() {
	c.disasters++
	restored := New(1)
	if _, err := restored.RestoreBackup(bytes.NewReader(c.backup), uint64(c.IntN(3))); err != nil {
		c.t.Fatal(err)
	}
	c.origin = snapshot(c.t, restored)
	c.entries, c.answers, c.pool = nil, nil, nil
	clear(c.states)
	if err := c.w.m.Restore(bytes.NewReader(c.origin)); err != nil {
		c.t.Fatal(err)
	}
	c.w.seen = c.w.m.Revision()
	clear(c.w.holders) // every session has ended
	c.states[0] = c.w.m.Hash()
	for _, r := range c.replicas {
		r.disk, r.at = c.origin, 0
	}
	for _, r := range c.replicas {
		c.start(r)
	}
	c.backup = c.origin
	c.depose()
	clear(c.expiry)
	clear(c.frees)
	for _, cl := range c.clients {
		cl.dies = c.now
	}
}

// settle lets all replicas catch up, expires every session, frees lingering holds, and checks that nothing remains.
func (c *cluster) settle() {
	for _, r := range c.replicas {
		if r.m == nil {
			c.start(r)
		}
	}
	c.elect()
	for _, s := range c.w.m.Sessions() {
		c.commit(Command{Op: OpExpire, Session: s.ID, Linger: true})
	}
	for _, h := range c.w.m.Lingering() {
		c.commit(Command{Op: OpFree, Name: h.Name, Token: h.Token})
	}
	c.states[len(c.entries)] = c.w.m.Hash()
	for _, r := range c.replicas {
		c.apply(r, len(c.entries))
		checkState(c.t, r.m)
		if n := len(r.m.holds) + len(r.m.waits) + len(r.m.names) + len(r.m.claimants) + len(r.m.under); n > 0 {
			c.t.Fatalf("%d things are left over", n)
		}
	}
}

// TestReplicas runs clusters in simulated time. Three replicas of the machine read one log, each at a different pace,
// lose their memory, and start again from one of their snapshots. Leaders time sessions and follow each other.
// Commands of clients arrive in any order, late, twice or never. Disasters restore backups. Each hour has a seed.
// FENCELOCK_SEED runs one seed; FENCELOCK_SIM_HOURS sets the number of hours, by default 3, and 100 in the deep tier
// without the race detector, since the state machine has one goroutine.
func TestReplicas(t *testing.T) {
	if text := os.Getenv("FENCELOCK_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("FENCELOCK_SEED: %v", err)
		}
		c := newCluster(t, seed)
		c.run(time.Hour)
		t.Logf("seed %d: %d commands, %d grants, %d crashes, %d disasters, state %x", seed, c.commands, c.grants,
			c.crashes, c.disasters, c.w.m.Hash())
		return
	}
	hours := 3
	if testtier.Wanted() && !race.Enabled {
		hours = 100
	}
	if text := os.Getenv("FENCELOCK_SIM_HOURS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("FENCELOCK_SIM_HOURS is %q, want a positive number", text)
		}
		hours = n
	}
	var (
		mu    sync.Mutex // protects the following fields
		next  uint64
		total cluster
	)
	t.Cleanup(func() {
		text := fmt.Sprintf("%d commands, %d grants, %d sessions expired, %d crashes, %d starts from a snapshot, %d elections, "+
			"%d backups restored", total.commands, total.grants, total.expiries, total.crashes,
			total.restores, total.elections, total.disasters)
		testfindings.Write(t, testfindings.Simulation{What: "the bundled server's state machine", Hours: float64(hours), Text: text})
		t.Logf("%d h simulated: %s", hours, text)
		if n := uint64(hours); n >= 5 && !t.Failed() &&
			(uint64(total.commands) < 3000*n || uint64(total.grants) < 500*n ||
				uint64(total.crashes) < 40*n || uint64(total.expiries) < 5*n) {
			t.Error("the hours are idle ones")
		}
	})
	for i := range runtime.GOMAXPROCS(0) {
		t.Run(fmt.Sprint("worker-", i), func(t *testing.T) {
			t.Parallel()
			for {
				mu.Lock()
				next++
				seed := next
				mu.Unlock()
				if seed > uint64(hours) {
					return
				}
				t.Run(fmt.Sprint("seed-", seed), func(t *testing.T) {
					defer func() {
						if t.Failed() {
							t.Logf("FENCELOCK_SEED=%d go test -v -run 'TestReplicas$' ./internal/machine", seed)
						}
					}()
					c := newCluster(t, seed)
					c.run(time.Hour)
					mu.Lock()
					defer mu.Unlock()
					total.commands += c.commands
					total.grants += c.grants
					total.expiries += c.expiries
					total.crashes += c.crashes
					total.restores += c.restores
					total.elections += c.elections
					total.disasters += c.disasters
				})
			}
		})
	}
}

// A seed determines a run.
func TestReplicasRepeat(t *testing.T) {
	for seed := range uint64(3) {
		first, second := newCluster(t, seed), newCluster(t, seed)
		first.run(5 * time.Minute)
		second.run(5 * time.Minute)
		if !reflect.DeepEqual(first.entries, second.entries) || first.w.m.Hash() != second.w.m.Hash() {
			t.Errorf("seed %d: two runs differ", seed)
		}
	}
}
