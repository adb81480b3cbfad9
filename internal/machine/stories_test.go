package machine

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/fencelock/fencelock/fencing"
)

// Each file of testdata is a story: lines of commands to an empty machine, and after ---- the answers. The notices to
// others stand behind the answer, or indented below it. After a change of the machine,
//
//	go test -run TestStories ./internal/machine -rewrite
//
// records the answers again, and the diff shows the effect of the change.
//
// Several members apply a story: the first carries out all of it, and before every command a member joins with a
// snapshot. All must give the same answers and reach the same state.
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("the stories are %q, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			datadriven.RunTest(t, file, newStory(t, 1000).run)
		})
	}
}

// maxJoined bounds the members that have joined a story, and so its time.
const maxJoined = 6

// story is a file that is being run, or the beginning of another test.
type story struct {
	*testing.T
	m      *Machine   // has applied all commands
	joined []*Machine // with snapshots
	before uint64     // the revision before the last command
	last   Command
	names  map[string]string // of the ids of sessions and requests, and of their hashes
}

// newStory returns a story with an empty machine, which keeps some events.
func newStory(t *testing.T, events int) *story {
	s := &story{T: t, m: New(events), names: map[string]string{SessionID{}.String(): "the leader"}}
	s.m.now = 1 // so that a refused first command leaves the state as it was, too
	return s
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	s.T = t
	lines := slices.Collect(strings.Lines(d.Input))
	return strings.TrimPrefix(s.line(d.Cmd, d.CmdArgs)+"\n"+s.tell(lines...), "\n")
}

// tell carries out lines of a story, and returns the answers.
func (s *story) tell(lines ...string) string {
	var answers []string
	for _, line := range lines {
		cmd, args, err := datadriven.ParseLine(line)
		if err != nil {
			s.Fatal(err)
		}
		if answer := s.line(cmd, args); answer != "" {
			answers = append(answers, answer)
		}
	}
	return strings.Join(answers, "\n")
}

// wantTold fails the test if the answers to the lines are not want.
func (s *story) wantTold(want string, lines ...string) {
	s.Helper()
	if got := s.tell(lines...); got != want {
		s.Fatalf("%q is answered\n%s\nwant\n%s", lines, got, want)
	}
}

// line carries out the commands of one line, with semicolons between them. Labels tell their answers apart.
func (s *story) line(cmd string, args []datadriven.CmdArg) string {
	var answers []string
	var words []datadriven.CmdArg
	for _, w := range append([]datadriven.CmdArg{{Key: cmd}}, append(args, datadriven.CmdArg{Key: ";"})...) {
		last := &w.Key
		if len(w.Vals) > 0 {
			w.Vals = slices.Clone(w.Vals)
			last = &w.Vals[len(w.Vals)-1]
		}
		text, ends := strings.CutSuffix(*last, ";")
		if *last = text; w.Key != "" {
			words = append(words, w)
		}
		if !ends {
			continue
		}
		for _, c := range each(words[0].Key, words[1:]) {
			switch answer := s.command(c.cmd, c.args); {
			case c.cmd == "open" && answer == "ok":
			case c.label != "":
				answers = append(answers, c.label+": "+answer)
			default:
				answers = append(answers, answer)
			}
		}
		words = nil
	}
	return wrap(answers)
}

// fit joins parts in one line if they fit, and otherwise has one per line.
func fit(sep string, parts []string) string {
	if line := strings.Join(parts, sep); len(line) <= 120 && !strings.Contains(line, "\n") {
		return line
	}
	return strings.Join(parts, "\n  ")
}

// wrap fills lines with answers.
func wrap(answers []string) string {
	var lines []string
	for _, a := range answers {
		if n := len(lines) - 1; n < 0 || strings.Contains(lines[n]+a, "\n") || len(lines[n]+a) > 117 {
			lines = append(lines, a)
		} else {
			lines[n] += " | " + a
		}
	}
	return strings.Join(lines, "\n")
}

// step is one command. Its label identifies the answer.
type step struct {
	label, cmd string
	args       []datadriven.CmdArg
}

// each makes several commands of one: with a,b in place of a session or a name, one for a and one for b.
func each(cmd string, args []datadriven.CmdArg) []step {
	lines := []step{{cmd: cmd}}
	for i, a := range args {
		keys := strings.Split(a.Key, ",")
		var longer []step
		for _, l := range lines {
			for _, key := range keys {
				next := step{l.label, cmd, append(slices.Clone(l.args), datadriven.CmdArg{Key: key, Vals: a.Vals})}
				if operations[cmd] != 0 && a.Vals == nil && (i == 0 || len(keys) > 1) {
					next.label = strings.TrimSpace(l.label + " " + key)
				}
				longer = append(longer, next)
			}
		}
		lines = longer
	}
	return lines
}

// command carries out one command.
func (s *story) command(cmd string, args []datadriven.CmdArg) string {
	switch cmd {
	case "again": // the last command, as a client without its answer repeats it
		before := s.m.Hash()
		answer := s.apply(s.last)
		if s.m.Hash() != before {
			return answer + "; the state changed"
		}
		return answer
	case "show":
		return s.ask(func(m *Machine) string { return s.show(m, args[0].Key) })
	case "session":
		return s.ask(func(m *Machine) string { return s.session(m, args[0].Key) })
	case "timed":
		return s.ask(func(m *Machine) string { return s.holds(m.Timed()) })
	case "state":
		return s.ask(state)
	case "events":
		return s.events()
	}
	return s.apply(s.parse(cmd, args))
}

// operations are the words for the operations.
var operations = map[string]Op{
	"open": OpOpenSession, "close": OpCloseSession, "expire": OpExpire, "renew": OpRenew, "acquire": OpAcquire,
	"release": OpRelease, "cancel": OpCancelWait, "move": OpMove, "force": OpForceRelease, "free": OpFree,
	"limits": OpSetLimits, "raise": OpRaiseLevel, "checkpoint": OpCheckpoint, "rules": OpSetRules,
	"policies": OpSetPolicies, "nothing": 0, "unknown": 999,
}

// parse makes a command of its word, the session that it is about, names, and options. That session also sends it, and
// the ids of its requests are made of its name.
func (s *story) parse(cmd string, args []datadriven.CmdArg) Command {
	op, known := operations[cmd]
	if !known {
		s.Fatalf("there is no command %q", cmd)
	}
	limits := DefaultLimits()
	c, r := Command{Op: op}, Request{}
	switch op {
	case OpOpenSession, OpCloseSession, OpExpire, OpRenew, OpAcquire, OpRelease, OpCancelWait, OpMove:
		r.Owner, args = args[0].Key, args[1:]
		c.Session, r.ID = s.sid(r.Owner), s.id(r.Owner)
	case OpSetLimits:
		c.Limits = &limits
	}
	if op == OpOpenSession {
		c.TTL = time.Second
	}
	names := slices.DeleteFunc(slices.Clone(args), func(a datadriven.CmdArg) bool { return s.option(&c, &r, a) })
	for _, a := range names {
		if op != OpAcquire {
			c.Name = s.text(a.Key)
			continue
		}
		own := r
		own.Name = s.text(a.Key)
		for _, v := range a.Vals { // options of this name: id:other
			key, value, _ := strings.Cut(v, ":")
			s.option(&c, &own, datadriven.CmdArg{Key: key, Vals: []string{value}})
		}
		c.Requests = append(c.Requests, own)
	}
	switch op {
	case OpRelease, OpCancelWait:
		if c.Principal == "" { // as the leader has it from the connection
			c.Principal, _ = s.m.Principal(s.hidden(c).Session)
		}
		fallthrough
	case OpMove:
		c.RequestID = r.ID
	case OpForceRelease:
		c.Nonce = r.Nonce
	}
	return c
}

// option sets an option of a command or of its requests. It returns false if there is none of that name.
func (s *story) option(c *Command, r *Request, a datadriven.CmdArg) bool {
	value := ""
	if len(a.Vals) > 0 {
		value = s.text(a.Vals[0])
	}
	flags := map[string]*bool{
		"wait": &c.Wait, "linger": &c.Linger, "own": &c.Own, "tree": &r.Hierarchical, "heeds": &r.HeedsMaxHold,
	}
	texts := map[string]*string{
		"owner": &r.Owner, "hold": &r.HoldID, "rawid": &r.ID, "client": &c.Client, "reason": &c.Reason, "by": &c.By,
		"principal": (*string)(&c.Principal), "for": (*string)(&r.For),
	}
	numbers := map[string]*uint64{"seq": &c.Seq, "acked": &c.Acked, "target": &c.Target}
	durations := map[string]*time.Duration{"ttl": &c.TTL, "clock": &c.Clock, "min": &r.MinHold}
	switch key := a.Key; {
	case flags[key] != nil:
		*flags[key] = true
	case texts[key] != nil:
		*texts[key] = value
	case key == "token":
		c.Token = must(fencing.ParseToken(value))
	case numbers[key] != nil:
		*numbers[key] = number(value)
	case durations[key] != nil:
		*durations[key] = must(time.ParseDuration(value))
	case key == "exclusive" || key == "shared":
		r.Kind = map[string]Kind{"exclusive": Exclusive, "shared": Shared}[key]
	case key == "kind":
		r.Kind = Kind(number(value))
	case key == "permits": // 2/8
		n, limit, _ := strings.Cut(value, "/")
		r.Kind, r.Permits, r.Limit = Permits, uint32(number(n)), uint32(number(limit))
	case key == "id":
		r.ID = s.id(value)
	case key == "nonce":
		r.Nonce = fencing.Nonce{byte(number(value))}
	case key == "meta":
		k, v, _ := strings.Cut(value, ":")
		r.Metadata = map[string]string{k: v}
	case key == "from" || key == "to": // the session that sends it
		c.Session = s.sid(value)
	case key == "under":
		c.Under = append(c.Under, s.id(value))
	case key == "level":
		c.Level = uint32(number(value))
	case key == "set": // (one line & another line)
		c.Rules = s.text(strings.ReplaceAll(strings.Join(a.Vals, ","), " & ", "\n"))
	case c.Op == OpSetLimits && key == "none":
		c.Limits = nil
	case c.Op == OpSetLimits && key == "zero":
		*c.Limits = Limits{}
	case c.Op == OpSetLimits:
		i := slices.IndexFunc(c.Limits.All(), func(l Limit) bool { return l.Name == key })
		*c.Limits.All()[i].Value = int(number(value))
	case c.Op == OpCheckpoint:
		c.Deadlines = append(c.Deadlines, Deadline{s.sid(key), must(time.ParseDuration(value))})
	default:
		return false
	}
	return true
}

// must returns a value of a story. It panics if the story is malformed.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func number(text string) uint64 { return must(strconv.ParseUint(text, 10, 64)) }

// repeated is a text that is too long to write: n*513.
var repeated = regexp.MustCompile(`^(.)\*(\d+)$`)

// text reads a value: as it is, repeated, or quoted as in Go.
func (s *story) text(value string) string {
	switch r := repeated.FindStringSubmatch(value); {
	case r != nil:
		return strings.Repeat(r[1], int(number(r[2])))
	case strings.HasPrefix(value, `"`):
		return must(strconv.Unquote(value))
	}
	return value
}

// sid makes the id of a session of its name.
func (s *story) sid(name string) SessionID {
	if name == "none" {
		return SessionID{}
	}
	made := sid(name)
	s.names[made.String()], s.names[made.Hidden().String()] = name, name
	return made
}

// id makes the id of a request.
func (s *story) id(name string) string {
	made := id(name)
	s.names[made], s.names[HiddenRequest(made)] = name, name
	return made
}

// who returns the name of a session; the machine must not know more than the hash of its id if the level has those.
func (s *story) who(id SessionID) string {
	name := s.names[id.String()]
	if s.m.Level() >= LevelHiddenIDs && id == sid(name) {
		s.Errorf("the machine knows the id of session %s", name)
	}
	return name
}

// hidden is c as a leader proposes it at the present level.
func (s *story) hidden(c Command) Command {
	if s.m.Level() >= LevelHiddenIDs {
		c.Requests = slices.Clone(c.Requests)
		if bad := c.HideRequests(NewSeal(c.Session)); bad != nil {
			s.Fatalf("a leader refuses %+v: %+v", c, bad)
		}
		c.Session = c.Session.Hidden()
	}
	return c
}

// apply carries out c at all members.
func (s *story) apply(c Command) string {
	m, joins := s.m, New(1000)
	s.before, s.last = m.Revision(), c
	if err := joins.Restore(bytes.NewReader(snapshot(s.T, m))); err != nil {
		s.Fatal(err)
	}
	if len(s.joined) == maxJoined {
		leaves := int(m.Revision()) % maxJoined // any
		s.joined = slices.Delete(s.joined, leaves, leaves+1)
	}
	s.joined = append(s.joined, joins)
	c = s.hidden(c)
	timed := m.sessions[c.Session] != nil && m.sessions[c.Session].due > 0
	before, entry := m.Hash(), AppendBatch(nil, &Batch{At: 1, Commands: []Command{c}})
	var code Code
	answer := s.ask(func(m *Machine) string {
		b := must(DecodeBatch(entry))
		r, notices := m.Apply(b.At, &b.Commands[0])
		code = r.Code
		for i, g := range r.Grants {
			if g.RequestID != c.RequestID && g.RequestID != c.Requests[i].ID {
				s.Errorf("%+v: granted to the request %s", c, s.names[g.RequestID])
			}
		}
		told := []string{s.result(r)}
		for _, n := range notices {
			told = append(told, "to "+s.notice(n))
		}
		return fit("; ", told)
	})
	checkState(s.T, m)
	checkState(s.T, joins)
	for _, other := range s.joined {
		if other.Hash() != m.Hash() {
			s.Errorf("%+v: a member that began with a snapshot comes to another state", c)
		}
	}
	if code > CodeQueued && c.Seq == 0 && c.Target == 0 && !timed && m.Hash() != before {
		s.Errorf("%+v is refused, and changes the state", c)
	}
	return answer
}

// ask returns the answer of all members.
func (s *story) ask(question func(*Machine) string) string {
	answer := question(s.m)
	for _, m := range s.joined {
		if other := question(m); other != answer {
			s.Errorf("one member answers %s, a member that began with a snapshot %s", answer, other)
		}
	}
	return answer
}

// The words for codes, causes and events, and for kinds of holds. Grants and places in a queue have further details.
var (
	codeWords = map[Code]string{
		CodeOK: "ok", CodeHeld: "held", CodeNotHeld: "not held", CodeCancelled: "cancelled", CodeMismatch: "mismatch",
		CodeConflict: "conflict", CodeInvalid: "invalid", CodeLimit: "limit", CodeNoSession: "no session",
		CodeStale: "stale", CodeUnknown: "unknown", CodeDenied: "denied",
	}
	causeWords = map[Cause]string{
		CauseExpired: "expired", CauseClosed: "closed", CauseForced: "forced", CauseGivenBack: "released by another",
		CauseMoved: "moved", CauseMaxHold: "its maximum is over", CauseDenied: "denied",
	}
	eventWords = map[EventType]string{
		EventAcquired: "acquired", EventReleased: "released", EventExpired: "expired", EventForced: "forced",
		EventQueued: "queued", EventCancelled: "cancelled", EventFreed: "freed",
	}
)

// details writes the nonempty details: " (a, b)".
func details(all ...string) string {
	all = slices.DeleteFunc(all, func(s string) bool { return s == "" || s == fmt.Sprint(map[string]string{}) })
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, ", ") + ")"
}

// detail writes a value, unless it is zero.
func detail[T comparable](format string, value T) string {
	if value == *new(T) {
		return ""
	}
	return fmt.Sprintf(format, value)
}

func nonceDetail(n fencing.Nonce) string { return detail("nonce %v", n[0]) }

func kindDetail(k Kind, permits, limit uint32) string {
	switch k {
	case Shared:
		return "shared"
	case Permits:
		return fmt.Sprintf("%d of %d permits", permits, limit)
	}
	return ""
}

func (s *story) result(r Result) string {
	switch r.Code {
	case CodeGranted:
		return "granted " + s.grants(r.Grants, "")
	case CodeQueued:
		return fmt.Sprint("queued with ticket ", r.Ticket)
	case CodeHeld:
		return "refused: " + s.blocker(*r.Holder)
	case CodeDeadlock:
		var steps []string
		for _, b := range r.Cycle {
			steps = append(steps, s.blocker(b))
		}
		return "deadlock: " + strings.Join(steps, ", ")
	}
	return codeWords[r.Code] + detail(" %s", r.Field) + detail(": %s", strings.ReplaceAll(r.Detail, LimitReached, ""))
}

func (s *story) blocker(b Blocker) string {
	who := s.who(b.Session)
	if b.Owner != who {
		who += details("of " + b.Owner)
	}
	if b.Waits {
		return who + " waits for " + b.Name
	}
	return who + " holds " + b.Name
}

// grants writes grants to a session. The ids of requests that are not the usual ones are among the details.
func (s *story) grants(grants []Grant, who string) string {
	var all []string
	for _, g := range grants {
		all = append(all, g.Name+details(detail("token %v", g.Token), s.request(who, g.RequestID, g.Sealed),
			nonceDetail(g.Nonce), detail("at least %v", g.MinHold), detail("at most %v", g.MaxHold)))
	}
	return strings.Join(all, ", ")
}

// request writes the id of a request, unless it is the usual one. From LevelHiddenIDs on, its client must be able to
// read it, except in the rest of a set of which a part has moved.
func (s *story) request(who, request, sealed string) string {
	name := s.names[request]
	if s.m.Level() >= LevelHiddenIDs && name != "" && request == id(name) {
		s.Errorf("the machine knows the id of request %s", name)
	}
	if sealed != "" && who != "" && who != s.names[SessionID{}.String()] {
		if got := NewSeal(sid(who)).Open(request, sealed); got != id(name) {
			s.Errorf("%s reads the id of its request as %q, want %q", who, got, id(name))
		}
	}
	if who == "" || name == who {
		return ""
	}
	return name
}

func (s *story) notice(n Notice) string {
	who := s.who(n.Session)
	to := who + ": "
	request := s.request(who, n.RequestID, n.Sealed)
	switch n.Type {
	case NoticeGranted:
		return fmt.Sprintf("%sticket %d is granted %s", to, n.Ticket, s.grants(n.Grants, who))
	case NoticeLost:
		return to + "lost " + n.Name + details(detail("token %v", n.Token), detail("ticket %v", n.Ticket), request) + ": " +
			causeWords[n.Cause] + detail(" by %s", n.By) + detail(" as %s", n.Principal) + detail(": %s", n.Detail)
	case NoticeSessionEnded:
		return to + "the session is over: " + causeWords[n.Cause]
	case NoticeLingering:
		return to + n.Name + " lingers" + details(detail("token %v", n.Token), request, detail("at least %v", n.MinHold))
	}
	return to + "untimed" + details(detail("token %v", n.Token))
}

// show writes the holders of a name and its queue.
func (s *story) show(m *Machine, name string) string {
	info := m.Look(name)
	if info.Waiters != len(info.Queue) || info.Revision != m.Revision() {
		s.Errorf("%d waiters and a queue of %d at revision %d of %d", info.Waiters, len(info.Queue), info.Revision,
			m.Revision())
	}
	line := name + " is held by " + s.holds(info.Holders)
	switch {
	case len(info.Holders)+len(info.Queue) == 0:
		return name + " is free"
	case len(info.Holders) == 0:
		line = name + " has no holder"
	}
	var queue []string
	for _, w := range info.Queue {
		queue = append(queue, s.who(w.Session)+details(kindDetail(w.Kind, w.Permits, w.Limit)))
	}
	return line + detail("; waiting: %s", strings.Join(queue, ", "))
}

func (s *story) holds(holds []Hold) string {
	var all []string
	for _, h := range holds {
		who := s.who(h.Session)
		if h.Lingering {
			who = "nobody"
		}
		if h.Since != 1 {
			s.Errorf("a hold of %s since %d", h.Name, h.Since)
		}
		of := ""
		if h.Owner != who {
			of = "of " + h.Owner
		}
		all = append(all, who+details(of, kindDetail(h.Kind, h.Permits, h.Limit), detail("token %v", h.Token),
			nonceDetail(h.Nonce), detail("at least %v", h.MinHold), detail("at most %v", h.MaxHold), fmt.Sprint(h.Metadata)))
	}
	return strings.Join(all, ", ")
}

// session writes a session with its holds and waits.
func (s *story) session(m *Machine, name string) string {
	id := s.hidden(Command{Session: s.sid(name)}).Session
	shown, open := m.Session(id)
	if open != m.SessionOpen(id) {
		s.Errorf("session %s is open: %v", name, !open)
	}
	if !open {
		return name + " is not open"
	}
	all := m.Sessions()
	u := all[slices.IndexFunc(all, func(u SessionUsage) bool { return u.ID == id })]
	owner, _ := m.Principal(id)
	parts := []string{name + " is open" + details(detail("ttl %v", u.TTL), detail("due %v", u.Due),
		detail("client %v", u.Client), string(owner), detail("acknowledged %v", m.sessions[id].acked),
		detail("remembered %v", len(m.sessions[id].results)))}
	for _, h := range shown.Holds {
		parts = append(parts, "holds "+h.Name+details(detail("token %v", h.Token), fmt.Sprint(h.Metadata)))
	}
	for _, w := range shown.Waits {
		for _, r := range w.Requests {
			parts = append(parts, "waits for "+r.Name+details(detail("ticket %v", w.Ticket)))
		}
	}
	return fit(", ", parts)
}

// state writes the values that belong neither to a name nor to a session, unless they are the initial values.
func state(m *Machine) string {
	parts := []string{fmt.Sprint("level ", m.Level()), detail("clock %v", m.Clock()),
		detail("rules version %v", m.Rules().Version), detail("in force as %s", m.Rules().Revision()),
		detail("%q", m.Rules().Text), detail("policies %q", m.Policies().Text)}
	limits, defaults := m.Limits(), DefaultLimits()
	for i, l := range limits.All() {
		if *l.Value != *defaults.All()[i].Value {
			parts = append(parts, fmt.Sprint(l.Name, " ", *l.Value))
		}
	}
	return wrap(slices.DeleteFunc(parts, func(s string) bool { return s == "" }))
}

// events writes the events of the last command.
func (s *story) events() string {
	events, err := s.m.EventsSince(s.before, 1000)
	if err != nil {
		s.Fatal(err)
	}
	var lines []string
	for _, e := range events {
		lines = append(lines, fmt.Sprintf("%d %s %s of %s", e.Revision, eventWords[e.Type], e.Name, e.Owner)+
			details(kindDetail(e.Kind, 0, 0), detail("token %v", e.Token), detail("ticket %v", e.Ticket),
				detail("reason %v", e.Reason), detail("by %v", e.By), detail("as %v", e.Principal)))
	}
	return wrap(lines)
}
