package rules

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/principal"
)

func parse(t testing.TB, text string) *Rules {
	t.Helper()
	r, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

const file = `# who may do what
group payments cert:pay token:ci
group payments spiffe:worker
group empty

allow group:payments acquire,read acc
deny  token:ci       acquire      acc/audit
allow group:payments acquire      acc/audit
allow cert:*         read         ""
allow *              read         public
allow cert:ops       admin,force  ""
deny  group:payments acquire      acc/same
allow cert:pay       acquire      acc/same
allow group:payments acquire      acc/who
allow cert:pay       acquire      acc/who
allow token:ci       acquire      "acc/with space"
allow group:empty    proxy        ""
`

func TestDecide(t *testing.T) {
	r := parse(t, file)
	for _, x := range []struct {
		p    principal.Principal
		v    Verb
		name string
		want Decision
	}{
		{"cert:pay", Acquire, "acc", Decision{true, 6}},
		{"cert:pay", Acquire, "acc/1/2", Decision{true, 6}},
		{"spiffe:worker", Acquire, "acc/1", Decision{true, 6}},
		{"cert:pay", Acquire, "account", Decision{}}, // prefixes match whole segments
		{"cert:pay", Acquire, "ac", Decision{}},
		{"cert:pay", Acquire, "/acc", Decision{}},
		{"cert:pay", Force, "acc", Decision{}},
		{"token:ci", Acquire, "acc/audit/x", Decision{false, 7}}, // a denial takes precedence
		{"token:ci", Read, "acc/audit", Decision{true, 6}},       // for its verb only
		{"cert:pay", Acquire, "acc/audit", Decision{true, 8}},
		{"cert:pay", Acquire, "acc/same", Decision{false, 12}}, // even if only the group is denied
		{"cert:pay", Acquire, "acc/who", Decision{true, 15}},   // the principal's rule decides
		{"spiffe:worker", Acquire, "acc/who", Decision{true, 14}},
		{"token:ci", Acquire, "acc/with space/1", Decision{true, 16}},
		{"cert:stranger", Read, "x", Decision{true, 9}},
		{"token:stranger", Read, "x", Decision{}},
		{"token:stranger", Read, "public/x", Decision{true, 10}},
		{principal.Nobody, Read, "public", Decision{true, 10}},
		{principal.Nobody, Acquire, "public", Decision{}},
		{principal.Process, Read, "public", Decision{true, 10}},
		{principal.Process, Read, "x", Decision{}},
		{"cert:ops", Admin, "", Decision{true, 11}},
		{"cert:pay", Admin, "", Decision{}},
		{"group:payments", Acquire, "acc", Decision{}}, // no principal has the name of a group
		{"cert:*", Read, "x", Decision{true, 9}},       // a certificate of that name is only one certificate
	} {
		if got := r.Decide(x.p, x.v, x.name); got != x.want {
			t.Errorf("%s %v %q: %+v, want %+v", x.p, x.v, x.name, got, x.want)
		}
	}
}

func TestDecideSubtree(t *testing.T) {
	r := parse(t, file)
	for _, x := range []struct {
		p    principal.Principal
		v    Verb
		name string
		want bool
	}{
		{"cert:pay", Acquire, "acc", false}, // acc/same
		{"cert:pay", Read, "acc", true},
		{"cert:pay", Acquire, "acc/other", true},
		{"cert:pay", Acquire, "acc/audit", true},
		{"token:ci", Acquire, "acc/audit", false},
		{"token:ci", Read, "acc/audit", true},
		{"cert:stranger", Read, "", true},
		{"cert:ops", Force, "", true},
		{"token:stranger", Read, "public", true},
		{"token:stranger", Read, "", false},
	} {
		if got := r.DecideSubtree(x.p, x.v, x.name).Allowed; got != x.want {
			t.Errorf("%s %v all of %q: %v", x.p, x.v, x.name, got)
		}
	}
}

func TestAny(t *testing.T) {
	r := parse(t, file)
	for _, x := range []struct {
		p    principal.Principal
		v    Verb
		want bool
	}{
		{"cert:pay", Acquire, true}, {"cert:pay", Force, false}, {"spiffe:worker", Acquire, true},
		{principal.Nobody, Read, true}, {principal.Nobody, Acquire, false}, {"token:stranger", Acquire, false},
		{"cert:ops", Admin, true},
	} {
		if got := r.Any(x.p, x.v); got != x.want {
			t.Errorf("%s %v anything: %v", x.p, x.v, got)
		}
	}
}

func TestRulesThatMakeNoSense(t *testing.T) {
	for text, want := range map[string]string{
		"permit cert:a read x":             `line 1: "permit": want group, allow or deny`,
		"\n#\nallow cert:a reed x":         `line 3: "reed": want one or some of acquire,read,force,admin,proxy`,
		"allow cert:a read,,acquire x":     `line 1: "": want one or some of`,
		"allow user:a read x":              `line 1: "user:a": want KIND:NAME`,
		"allow user:* read x":              `line 1: "user:*": want KIND:NAME`,
		"allow cert:a* read x":             `line 1: "cert:a*": the name has '*'`,
		"allow cert:a read":                `line 1: "read": the prefix is missing`,
		"allow cert:a":                     `line 1: "cert:a": the verbs are missing`,
		"allow":                            `line 1: "": want a principal or group`,
		"allow cert:a read acc/":           `line 1: "acc/": prefixes match whole segments: "acc" covers`,
		"allow cert:a read /":              `line 1: "/": prefixes match whole segments`,
		"allow cert:a read a b":            `line 1: "a b": put a prefix with white space in double quotes`,
		`allow cert:a read "a`:             `line 1: "\"a": it is not a string in double quotes`,
		`allow cert:a read "a" b`:          `line 1: "\"a\" b": it is not a string`,
		`allow cert:a read "a\n"`:          `it has the control character U+000A`,
		"allow cert:a read " + long:        `more than 512`,
		"allow cert:a admin acc":           `line 1: "acc": admin is about the cluster: its prefix is ""`,
		"allow group:g read x\n":           `line 1: "group:g": there is no such group`,
		"group a b cert:c":                 `line 1: "b": want KIND:NAME`,
		"group g group:h":                  `line 1: "group:h": want KIND:NAME`,
		"group g cert:*":                   `line 1: "cert:*": the name has '*'`,
		"group":                            `line 1: "": the name of a group: the name has 0 bytes`,
		"group a,b cert:c":                 `line 1: "a,b": the name of a group: the name has ','`,
		"allow cert:a read \xff":           `it is not valid UTF-8`,
		"allow cert:a read x\nallow * all": `line 2: "all": the prefix is missing`,
	} {
		_, err := Parse([]byte(text))
		if !errors.As(err, new(*SyntaxError)) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
}

var long = strings.Repeat("a", 513)

// naiveRule is one rule in a file.
type naiveRule struct {
	allow  bool
	who    string
	verbs  []Verb
	prefix string
}

func (n *naiveRule) String() string {
	words := make([]string, len(n.verbs))
	for i, v := range n.verbs {
		words[i] = v.String()
	}
	return fmt.Sprintf("%s %s %s %q", map[bool]string{true: "allow", false: "deny"}[n.allow], n.who,
		strings.Join(words, ","), n.prefix)
}

func covers(prefix, name string) bool {
	return prefix == "" || name == prefix || strings.HasPrefix(name, prefix+"/")
}

func (n *naiveRule) isFor(p principal.Principal, groups map[string][]principal.Principal) bool {
	group, isGroup := strings.CutPrefix(n.who, "group:")
	return n.who == "*" || n.who == string(p) || n.who == p.Kind()+":*" || isGroup && slices.Contains(groups[group], p)
}

// naive implements the documentation of Decide: it checks all rules. first is the line of the first rule.
func naive(all []naiveRule, first int, groups map[string][]principal.Principal, p principal.Principal, v Verb,
	name string,
) (d Decision) {
	best := -1
	for i := range all {
		n := &all[i]
		if !n.isFor(p, groups) || !slices.Contains(n.verbs, v) || !covers(n.prefix, name) {
			continue
		}
		if best >= 0 {
			b := &all[best]
			switch {
			case len(n.prefix) != len(b.prefix):
				if len(n.prefix) < len(b.prefix) {
					continue
				}
			case n.allow != b.allow:
				if n.allow {
					continue
				}
			case n.who != string(p) || b.who == string(p):
				continue
			}
		}
		best = i
	}
	if best < 0 {
		return Decision{}
	}
	return Decision{all[best].allow, first + best}
}

// Decide agrees with a check of all rules, and DecideSubtree allows a subtree if all of its names are allowed.
func TestDecideLikeNaive(t *testing.T) {
	segments := []string{"a", "b", "ab", "a b", ""}
	subjects := []string{"cert:a", "cert:b", "token:a", "cert:*", "token:*", "*", "group:g", "group:h"}
	who := []principal.Principal{"cert:a", "cert:b", "cert:c", "token:a", "spiffe:a", principal.Nobody, principal.Process}
	for seed := range uint64(60) {
		chance := rand.New(rand.NewPCG(seed, 35))
		path := func() string {
			var all []string
			for range chance.IntN(5) {
				all = append(all, segments[chance.IntN(len(segments))])
			}
			return strings.TrimRight(strings.Join(all, "/"), "/")
		}
		groups := map[string][]principal.Principal{"g": nil, "h": nil}
		text := ""
		for _, name := range []string{"g", "h"} {
			line := "group " + name
			for _, p := range who[:5] {
				if chance.IntN(2) == 0 {
					groups[name] = append(groups[name], p)
					line += " " + string(p)
				}
			}
			text += line + "\n"
		}
		var all []naiveRule
		for range chance.IntN(20) {
			n := naiveRule{allow: chance.IntN(2) == 0, who: subjects[chance.IntN(len(subjects))], prefix: path()}
			for v := range verbs {
				if v != Admin && chance.IntN(2) == 0 {
					n.verbs = append(n.verbs, v)
				}
			}
			if len(n.verbs) > 0 {
				all = append(all, n)
				text += n.String() + "\n"
			}
		}
		r := parse(t, text)
		names := make([]string, 60)
		for i := range names {
			names[i] = path()
		}
		for i := range all { // decisions change at prefixes
			names = append(names, all[i].prefix)
		}
		for _, p := range who {
			for v := range verbs {
				any := false
				for i := range all {
					any = any || all[i].allow && all[i].isFor(p, groups) && slices.Contains(all[i].verbs, v)
				}
				if r.Any(p, v) != any {
					t.Errorf("seed %d: %q %v anything: %v\n%s", seed, p, v, !any, text)
				}
				for _, name := range names {
					want := naive(all, 3, groups, p, v, name)
					if got := r.Decide(p, v, name); got != want {
						t.Fatalf("seed %d: %q %v %q: %+v, want %+v\n%s", seed, p, v, name, got, want, text)
					}
					whole := want.Allowed
					for _, under := range names {
						whole = whole && (!covers(name, under) || naive(all, 3, groups, p, v, under).Allowed)
					}
					if got := r.DecideSubtree(p, v, name).Allowed; got != whole {
						t.Fatalf("seed %d: %q %v all of %q: %v\n%s", seed, p, v, name, got, text)
					}
				}
			}
		}
	}
}

// No file and no request make the rules panic, and nobody may do anything without a rule that allows it.
func FuzzRules(f *testing.F) {
	f.Add(file, "cert:pay", "acc/1")
	f.Add("allow * acquire,read,force,admin,proxy \"\"", "", "a//b")
	f.Add("deny cert:* read a\nallow cert:a read \"a/\u00a0\"", "cert:a", "a/\u00a0")
	f.Fuzz(func(t *testing.T, text, who, name string) {
		r, err := Parse([]byte(text))
		if err != nil {
			if r != nil || !errors.As(err, new(*SyntaxError)) {
				t.Fatalf("%v, %v", r, err)
			}
			return
		}
		lines := strings.Split(text, "\n")
		for v := range verbs {
			d := r.Decide(principal.Principal(who), v, name)
			if d.Allowed != (d.Line > 0 && strings.HasPrefix(strings.TrimSpace(lines[d.Line-1]), "allow")) {
				t.Fatalf("%q %v %q: %+v\n%s", who, v, name, d, text)
			}
			whole := r.DecideSubtree(principal.Principal(who), v, name)
			if whole.Allowed && !d.Allowed || d.Allowed && !r.Any(principal.Principal(who), v) {
				t.Fatalf("%q %v %q: %+v, all of it %+v\n%s", who, v, name, d, whole, text)
			}
		}
	})
}

// BenchmarkDecide decides with 100,000 rules for 1,000 principals in 100 groups.
func BenchmarkDecide(b *testing.B) {
	var text strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&text, "group g%d token:p%d\ngroup h%d token:p%d\n", i%100, i, i%7, i)
	}
	for i := range 100_000 {
		who := fmt.Sprintf("token:p%d", i%1000)
		if i%3 == 0 {
			who = fmt.Sprintf("group:g%d", i%100)
		}
		word := "allow"
		if i%5 == 0 {
			word = "deny"
		}
		fmt.Fprintf(&text, "%s %s acquire,read tenant-%d/app-%d/part-%d\n", word, who, i%500, i%20_000, i)
	}
	r := parse(b, text.String())
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i = (i + 7919) % 100_000
		r.Decide(principal.Principal(who[i%1000]), Acquire, names[i%len(names)])
	}
}

var who, names = func() (who, names []string) {
	for i := range 1000 {
		who = append(who, fmt.Sprintf("token:p%d", i))
	}
	for i := range 20_000 {
		k := i * 5
		names = append(names, fmt.Sprintf("tenant-%d/app-%d/part-%d/lock-%d", k%500, k%20_000, k, i))
	}
	return who, names
}()

func TestPolicies(t *testing.T) {
	p, err := ParsePolicies([]byte("# all\nmax-queue=5000 \"\"\nmax-hold=1h,max-queue=100  accounts\n" +
		"max-hold=none,permits=3 accounts/audit\npermits=8 \"a b\"\nmax-hold=90s accounts/audit/x\n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]Policy{
		"x": {MaxQueue: 5000}, "account": {MaxQueue: 5000}, "a b/c": {MaxQueue: 5000, Permits: 8},
		"accounts": {MaxHold: time.Hour, MaxQueue: 100}, "accounts/1/2": {MaxHold: time.Hour, MaxQueue: 100},
		"accounts/audit": {MaxQueue: 100, Permits: 3}, "accounts/audit/y": {MaxQueue: 100, Permits: 3},
		"accounts/audit/x/y": {MaxHold: 90 * time.Second, MaxQueue: 100, Permits: 3},
	} {
		if got := p.Of(name); got != want {
			t.Errorf("%q: %+v, want %+v", name, got, want)
		}
	}
	if none := (*Policies)(nil); none.Of("x") != (Policy{}) {
		t.Error("there are policies without a file")
	}
	for text, want := range map[string]string{
		"max-hold=1h":                           `line 1: "max-hold=1h": the prefix is missing`,
		"\nmax-hold=1h a/":                      `line 2: "a/": prefixes match whole segments`,
		"max-hold a":                            `"max-hold": want none, or a duration from 1s to 8760h0m0s`,
		"max-hold=999ms a":                      "want none, or a duration",
		"max-queue=0 a":                         `"max-queue=0": want none, or a number from 1 to 1073741824`,
		"permits=2147483648 a":                  "want none, or a number from 1 to 2147483647",
		"max-wait=1 a":                          `"max-wait=1": want max-hold=DURATION`,
		"permits=1, a":                          `"": want max-hold=DURATION`,
		"permits=1 a\npermits=none,permits=2 a": `line 2: "permits=none": line 1 has it for this prefix`,
		"permits=1 \xff":                        "not valid UTF-8",
	} {
		_, err := ParsePolicies([]byte(text))
		if !errors.As(err, new(*SyntaxError)) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
}
