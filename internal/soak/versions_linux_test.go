package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/oldversions"
	"github.com/fencelock/fencelock/internal/testtier"
)

// The sides of TestVersions.
const (
	olderSide = "older" // the previous release
	newerSide = "newer" // this tree
)

// programs are the programs of both sides.
type programs struct{ contender, fencelock map[string]string }

// meeting is a service at which clients of both sides contend.
type meeting struct {
	service
	t     *testing.T
	p     programs
	first string // the side that comes first
	url   string
	dir   string

	server  *fault.Child // of the bundled server, as peer
	peer    string
	clients sync.WaitGroup
	stop    chan struct{} // closed to end the clients
}

// service is a service with its rules.
type service struct {
	ttl    time.Duration // of holds
	tokens bool          // the driver issues fencing tokens
	// start starts the service for the first side, and returns its URL.
	start func(m *meeting) string
	// halfway, if not nil, is done in the middle.
	halfway func(m *meeting)
	// refuses, if not nil, matches the error by which a side refuses the layout of the other one. It has to name both.
	refuses *regexp.Regexp
}

var services = map[string]service{
	"redis": {
		ttl:   2 * time.Second,
		start: func(m *meeting) string { return "redis://" + containers.Redis(m.t).Addr() + "/0" },
	},
	"redlock": {
		ttl: 2 * time.Second,
		start: func(m *meeting) string {
			var all []string
			for range 3 {
				all = append(all, containers.Redis(m.t).Addr())
			}
			return "redlock://" + strings.Join(all, ",") + "?trust-fresh=true&node-timeout=1s"
		},
	},
	"etcd": {
		ttl: 2 * time.Second, tokens: true,
		start: func(m *meeting) string { return "etcd://" + containers.Etcd(m.t).Addr() },
	},
	"zookeeper": {
		ttl: 4 * time.Second, tokens: true, // the driver takes no less with this tick
		start: func(m *meeting) string { return "zk://" + containers.ZooKeeper(m.t).Addr() + "/" },
	},
	// Where the older side comes first, the schema is migrated while its clients hold and wait.
	"postgres": {
		ttl: 2 * time.Second, tokens: true,
		refuses: regexp.MustCompile(`version of schema fencelock is "\d+", must be \d+`),
		start: func(m *meeting) string {
			url := containers.Postgres(m.t, containers.Args("-c", "fsync=on")).URL()
			m.migrate(m.first, url)
			return url
		},
		halfway: func(m *meeting) {
			if m.first == olderSide {
				m.migrate(newerSide, m.url)
				m.open(newerSide)
			}
		},
	},
	// Where the older side comes first, today's server takes over the older server's data and clients.
	"builtin": {
		ttl: 3 * time.Second, tokens: true, // the driver takes no less
		start:   func(m *meeting) string { return m.serve(m.first) },
		halfway: func(m *meeting) { m.serve(newerSide) },
	},
}

// migrate brings the schema of PostgreSQL to the version of a side.
func (m *meeting) migrate(side, url string) {
	m.t.Helper()
	cmd := exec.Command(m.p.fencelock[side], "postgres", "migrate")
	cmd.Env = append(os.Environ(), "FENCELOCK_DSN="+url, "FENCELOCK_BACKEND="+url)
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("%s: migrate: %v\n%s", side, err, out)
	}
}

// serve starts the bundled server of a side, in place of the running one and on its data.
func (m *meeting) serve(side string) string {
	m.t.Helper()
	if m.server == nil {
		all := freeport.Addresses(m.t, 2)
		m.url, m.peer = "fencelock://"+all[0], all[1]
	} else {
		if err := m.server.Terminate(); err != nil {
			m.t.Fatal(err)
		}
		_ = m.server.Wait()
	}
	m.server = fault.Start(m.t, exec.Command(m.p.fencelock[side], "serve", "--data-dir", filepath.Join(m.dir, "data"),
		"--listen", strings.TrimPrefix(m.url, "fencelock://"), "--peer-listen", m.peer))
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	if _, err := m.server.Await(ctx, "fencelock: serving clients at "); err != nil {
		m.t.Fatalf("%s: serve: %v\n%s", side, err, m.server.Stderr())
	}
	return m.url
}

// open starts the clients of a side: the first lives until the end, the second is replaced whenever it kills itself.
func (m *meeting) open(side string) {
	for _, mortal := range []bool{false, true} {
		m.clients.Go(func() {
			for m.run(side, mortal) {
			}
		})
	}
}

// run runs one client, and reports whether it killed itself.
func (m *meeting) run(side string, mortal bool) (killed bool) {
	child, err := fault.Spawn(exec.Command(m.p.contender[side], "-url", m.url, "-file", m.file(), "-side", side,
		"-ttl", m.ttl.String(), fmt.Sprint("-tokens=", m.tokens), fmt.Sprint("-mortal=", mortal)))
	if err != nil {
		m.t.Error(err)
		return false
	}
	defer child.Close()
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	select {
	case err = <-ended:
		killed = mortal && err != nil && strings.Contains(err.Error(), "killed")
		if !killed { // its warnings, such as of a new token space, are no errors
			m.t.Errorf("a client of the %s side ended: %v: %s", side, err, child.Stderr())
		}
		return killed
	case <-m.stop:
	}
	child.CloseStdin()
	select {
	case <-ended:
	case <-time.After(patience):
		m.t.Errorf("a client of the %s side does not end", side)
	}
	return false
}

func (m *meeting) file() string { return filepath.Join(m.dir, "holds") }

// patience bounds the waits of TestVersions.
const patience = 2 * time.Minute

// noted is a hold as its contender noted it. It has no end if its contender did not note it.
type noted struct {
	record
	ended int64
}

// record is a line of a contender.
type record struct {
	Who, What, Hold, Name, Kind string
	Token                       uint64
	Wait                        time.Duration
	At                          int64
	Text                        string
}

// tally counts the lines of one side.
type tally struct {
	grants, held, cancelled, lost int
	longest                       time.Duration
	errors, trouble, refused      map[string]int
}

// ledger is the result of a meeting.
type ledger struct {
	sides            map[string]*tally
	overlaps, tokens []string
}

// read reads the file.
func (m *meeting) read() *ledger {
	m.t.Helper()
	text, err := os.ReadFile(m.file())
	if err != nil {
		m.t.Fatal(err)
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1] // another line may be under way
	l := &ledger{sides: map[string]*tally{}}
	for _, side := range []string{olderSide, newerSide} {
		l.sides[side] = &tally{errors: map[string]int{}, trouble: map[string]int{}, refused: map[string]int{}}
	}
	open, all := map[string]*noted{}, map[string][]*noted{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			m.t.Fatalf("%v: %s", err, lines.Bytes())
		}
		side := l.sides[r.Who]
		switch r.What {
		case "began":
			side.grants++
			side.longest = max(side.longest, r.Wait)
			h := &noted{r, 1<<63 - 1}
			open[r.Hold+r.Name] = h
			all[r.Name] = append(all[r.Name], h)
		case "ended":
			open[r.Hold+r.Name].ended = r.At
			if r.Text != "" {
				side.lost++
				side.trouble[r.Text]++
			}
		case "held":
			side.held++
		case "cancelled":
			side.cancelled++
		case "error":
			side.errors[r.Text]++
		case "trouble":
			side.trouble[r.Text]++
		case "refused":
			side.refused[r.Text]++
		}
	}
	for _, holds := range all {
		slices.SortFunc(holds, func(a, b *noted) int { return int(a.At - b.At) })
		last := uint64(0)
		var held []*noted
		for _, h := range holds {
			held = slices.DeleteFunc(held, func(earlier *noted) bool { return earlier.ended <= h.At })
			for _, earlier := range held {
				if earlier.Kind != "shared" || h.Kind != "shared" {
					l.overlaps = append(l.overlaps,
						fmt.Sprintf("%v beside %v until %d", h.record, earlier.record, earlier.ended))
				}
			}
			if m.tokens && h.Kind == "exclusive" {
				if h.Token <= last {
					l.tokens = append(l.tokens, fmt.Sprintf("%v after token %d", h.record, last))
				}
				last = max(last, h.Token)
			}
			held = append(held, h)
		}
	}
	return l
}

// await waits until a condition holds for the holds so far.
func (m *meeting) await(what string, ok func(*ledger) bool) {
	m.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		if l := m.read(); ok(l) {
			return
		} else if f := l.sides[m.first]; time.Now().After(end) || f.grants == 0 && len(f.refused) > 0 {
			m.t.Fatalf("%s: not within %v: %+v %+v", what, patience, l.sides[olderSide], l.sides[newerSide])
		}
	}
}

// TestVersions lets clients of the previous release and of this tree contend for the same names on each service, for
// FENCELOCK_SOAK, five seconds by default: the older ones come first, and then the newer ones. Two of them never hold
// at a time, tokens rise over both, and no wait hangs; or one side refuses the other's layout with both versions.
func TestVersions(t *testing.T) {
	testtier.Only(t)
	length := 5 * time.Second
	if text := os.Getenv("FENCELOCK_SOAK"); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	p := buildPrograms(t)
	for name, s := range services {
		for first, second := range map[string]string{olderSide: newerSide, newerSide: olderSide} {
			t.Run(name+"/"+first, func(t *testing.T) {
				t.Parallel()
				m := &meeting{service: s, t: t, p: p, first: first, dir: t.TempDir(), stop: make(chan struct{})}
				if err := os.WriteFile(m.file(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				m.contend(second, length)
			})
		}
	}
}

func (m *meeting) contend(second string, length time.Duration) {
	var once sync.Once
	end := func() {
		once.Do(func() { close(m.stop) })
		m.clients.Wait()
	}
	defer end()
	m.url = m.start(m)
	// further waits until these sides were granted more.
	further := func(what string, sides ...string) {
		before := m.read()
		m.await("grants of the "+strings.Join(sides, " and the ")+" side "+what, func(l *ledger) bool {
			return !slices.ContainsFunc(sides, func(side string) bool {
				return l.sides[side].grants < before.sides[side].grants+10
			})
		})
	}
	m.open(m.first)
	further("at the beginning", m.first)
	m.open(second)
	both := []string{m.first, second}
	if m.refuses != nil {
		m.await("the refusal of the "+second+" side", func(l *ledger) bool { return len(l.sides[second].refused) > 0 })
		both = both[:1]
	}
	further("beside each other", both...)
	time.Sleep(length / 2)
	if m.halfway != nil {
		m.halfway(m)
	}
	if m.refuses != nil {
		both = []string{newerSide}
	}
	further("in the second half", both...)
	time.Sleep(length / 2)
	end()
	m.judge()
}

// judge logs the figures and fails the test for violations.
func (m *meeting) judge() {
	l := m.read()
	for _, side := range []string{olderSide, newerSide} {
		s := l.sides[side]
		m.t.Logf("%s: %d grants, %d times held, %d cancelled, %d lost, longest wait %v, trouble %v, refused %v",
			side, s.grants, s.held, s.cancelled, s.lost, s.longest.Round(time.Millisecond), s.trouble, s.refused)
		if len(s.errors) > 0 {
			m.t.Errorf("%s: errors %v", side, s.errors)
		}
		if m.refuses == nil && len(s.refused) > 0 {
			m.t.Errorf("%s: refused %v", side, s.refused)
		}
		named := slices.ContainsFunc(slices.Collect(maps.Keys(s.refused)), func(text string) bool {
			// Older programs that run during a migration pass on the server's words until their next probe.
			return m.refuses != nil && (m.refuses.MatchString(text) ||
				side == olderSide && strings.Contains(text, "cannot cast type record"))
		})
		if m.refuses != nil && !named && (side == olderSide || m.first == olderSide) {
			m.t.Errorf("%s: refused %v, want an error that matches %v", side, s.refused, m.refuses)
		}
	}
	m.t.Logf("%d overlaps, %d tokens out of order", len(l.overlaps), len(l.tokens))
	for _, some := range [][]string{l.overlaps, l.tokens} {
		if len(some) > 0 {
			m.t.Errorf("%d: %q", len(some), some[:min(3, len(some))])
		}
	}
}

// TestVersionsAreJudged finds two holders at a time, and a token that falls.
func TestVersionsAreJudged(t *testing.T) {
	m := &meeting{service: service{tokens: true}, t: t, dir: t.TempDir()}
	for _, c := range []struct {
		name             string
		lines            []string
		overlaps, tokens int
	}{
		{"in turn", []string{"older began a exclusive 1 10", "older ended a 20", "newer began b exclusive 2 20"}, 0, 0},
		{"at a time", []string{"older began a exclusive 1 10", "newer began b exclusive 2 19", "older ended a 20"}, 1, 0},
		{"a token falls", []string{"older began a exclusive 2 10", "older ended a 20", "newer began b exclusive 2 21"}, 0, 1},
		{"readers", []string{"older began a shared 1 10", "newer began b shared 1 11", "older ended a 20"}, 0, 0},
		{"a reader", []string{"older began a shared 1 10", "newer began b exclusive 2 11", "older ended a 20"}, 1, 0},
		{"permits", []string{"older began a permits 1 10", "newer began b permits 2 11"}, 1, 0},
	} {
		var text []byte
		for _, l := range c.lines {
			r := record{Name: "n"}
			if fmt.Sscan(l, &r.Who, &r.What, &r.Hold, &r.Kind, &r.Token, &r.At); r.What == "ended" {
				fmt.Sscan(l, &r.Who, &r.What, &r.Hold, &r.At)
			}
			line, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			text = append(append(text, line...), '\n')
		}
		if err := os.WriteFile(m.file(), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if l := m.read(); len(l.overlaps) != c.overlaps || len(l.tokens) != c.tokens {
			t.Errorf("%s: %q %q, want %d overlaps and %d tokens", c.name, l.overlaps, l.tokens, c.overlaps, c.tokens)
		}
	}
}

// buildPrograms builds the programs of both sides.
func buildPrograms(t *testing.T) programs {
	p := programs{contender: map[string]string{}, fencelock: map[string]string{}}
	dir := oldversions.Tree(t, oldversions.Release)
	to := filepath.Join(dir, "internal", "soak", "contender")
	if err := os.CopyFS(to, os.DirFS("contender")); err != nil {
		t.Fatal(err)
	}
	for side, dir := range map[string]string{olderSide: dir, newerSide: filepath.Join("..", "..")} {
		p.contender[side] = oldversions.Build(t, dir, "./internal/soak/contender")
		p.fencelock[side] = oldversions.Build(t, dir, "./cmd/fencelock")
	}
	return p
}
