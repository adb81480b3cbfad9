// Package rules decides which principal may do what with which names.
//
// A rule allows or denies one principal, or one group, some verbs on all names under a prefix. Prefixes count by
// segments, which "/" separates: "acc" covers "acc" and "acc/1", not "account". The rule with the longest prefix
// decides. Among rules of that length a denial wins, then the rule for the principal before the rule for a group, then
// the first line. Without a rule everything is denied.
//
// Policies bound what anybody may do with all names under a prefix: see Policy.
package rules

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/internal/principal"
)

// Verb is an action of a principal.
type Verb uint8

const (
	Acquire Verb = iota // acquire and renew holds of a name
	Read                // see who holds a name, and follow its changes
	Force               // take a name away from its holder
	Admin               // change the cluster; its only prefix is ""
	Proxy               // act on behalf of other principals
	verbs
)

var verbNames = [verbs]string{"acquire", "read", "force", "admin", "proxy"}

// String returns the word for v in files of rules.
func (v Verb) String() string { return verbNames[v] }

// ParseVerb returns the verb of a word in files of rules.
func ParseVerb(word string) (v Verb, ok bool) {
	i := slices.Index(verbNames[:], word)
	return Verb(max(i, 0)), i >= 0
}

// Decision is the answer of rules.
type Decision struct {
	Allowed bool
	Line    int // of the rule that decides; 0 if there is none
}

// Rules are the rules of one file. Make them with Parse. They never change, so all methods are safe for concurrent use.
type Rules struct {
	digest   string
	grants   map[string][]grant // by prefix; each sorted by subject
	below    map[string][]mask  // by prefix: the denials under longer ones; each sorted by subject
	depths   uint64             // which depthBit some prefix has
	subjects map[string]int32
	may      []uint8 // by subject: the verbs that some rule allows
	// members are the subjects that a principal is, itself first. kinds are those of a principal that is in no rule and no
	// group.
	members map[principal.Principal][]int32
	kinds   map[string][]int32
}

// grant has, for each verb, the line of a subject's rule, negative if it denies; 0 if there is none.
type grant struct {
	subject int32
	lines   [verbs]int32
}

type mask struct {
	subject int32
	verbs   uint8
}

// Digest names the file among others: the first 6 bytes of its SHA-256, in hexadecimal.
func (r *Rules) Digest() string { return r.digest }

// Decide reports whether p may do v with name. It takes no longer with more rules.
func (r *Rules) Decide(p principal.Principal, v Verb, name string) Decision {
	subjects := r.subjectsOf(p)
	prefix, depth := name, depthOf(name)
	for prefix != "" {
		if r.depths&depthBit(depth) != 0 { // else the map need not be asked
			if d := decide(r.grants[prefix], subjects, v); d.Line != 0 {
				return d
			}
		}
		prefix, depth = parent(prefix), depth-1
	}
	return decide(r.grants[""], subjects, v)
}

// parent returns the next shorter prefix.
func parent(prefix string) string { return prefix[:max(strings.LastIndexByte(prefix, '/'), 0)] }

// depthOf is how many segments a prefix has that is not empty.
func depthOf(prefix string) int { return strings.Count(prefix, "/") + 1 }

// depthBit is the bit of a depth in Rules.depths. Depths from 63 on share one.
func depthBit(depth int) uint64 { return 1 << min(depth, 63) }

// DecideSubtree reports whether p may do v with name and with every name under it.
func (r *Rules) DecideSubtree(p principal.Principal, v Verb, name string) Decision {
	d := r.Decide(p, v, name)
	if !d.Allowed {
		return d
	}
	below := r.below[name]
	for _, s := range r.subjectsOf(p) {
		i, found := slices.BinarySearchFunc(below, s, func(m mask, s int32) int { return cmp.Compare(m.subject, s) })
		if found && below[i].verbs&(1<<v) != 0 {
			return Decision{} // the longest prefix of some name, where a denial wins
		}
	}
	return d
}

// Refusal says why p may not do v with name, or with name and every name under it. It is empty if p may.
func (r *Rules) Refusal(p principal.Principal, v Verb, name string, subtree bool) string {
	decide, of := r.Decide, strconv.Quote(name)
	if subtree {
		decide, of = r.DecideSubtree, "everything under "+of
	}
	d := decide(p, v, name)
	if d.Allowed {
		return ""
	}
	return Sentence(p, "may not "+v.String()+" "+of, d)
}

// Sentence says that p may not do something, and by which rule.
func Sentence(p principal.Principal, what string, d Decision) string {
	who, why := string(p), "no rule allows it"
	if p == principal.Nobody {
		who = "a client without a credential"
	}
	if d.Line > 0 {
		why = "line " + strconv.Itoa(d.Line) + " of the rules"
	}
	return who + " " + what + ": " + why
}

// Any reports whether there is a name with which p may be allowed to do v. Without one, no name need be tried.
func (r *Rules) Any(p principal.Principal, v Verb) bool {
	return slices.ContainsFunc(r.subjectsOf(p), func(s int32) bool { return s >= 0 && r.may[s]&(1<<v) != 0 })
}

// decide is the decision of the rules of one prefix.
func decide(grants []grant, subjects []int32, v Verb) (d Decision) {
	if len(grants) == 0 {
		return d
	}
	own := false // d is by the rule of the principal
	for i, s := range subjects {
		g := find(grants, s)
		if g == nil || g.lines[v] == 0 {
			continue
		}
		line := int(g.lines[v])
		next := Decision{line > 0, max(line, -line)}
		switch {
		case d.Line == 0, d.Allowed && !next.Allowed, d.Allowed == next.Allowed && !own && next.Line < d.Line:
			d, own = next, i == 0
		}
	}
	return d
}

// few is up to how many grants are searched one after the other.
const few = 8

// find returns the grant of a subject, or nil.
func find(grants []grant, subject int32) *grant {
	if len(grants) > few {
		i, found := slices.BinarySearchFunc(grants, subject,
			func(g grant, s int32) int { return cmp.Compare(g.subject, s) })
		if !found {
			return nil
		}
		return &grants[i]
	}
	for i := range grants {
		if grants[i].subject == subject {
			return &grants[i]
		}
	}
	return nil
}

// anyone is the group of all principals, Nobody too, and anyOf that of all principals of a kind.
const anyone = "*"

func anyOf(kind string) string { return kind + ":*" }

// subjectsOf returns what p is, itself first: -1 if no rule is about p itself.
func (r *Rules) subjectsOf(p principal.Principal) []int32 {
	if known, found := r.members[p]; found {
		return known
	}
	if of, found := r.kinds[p.Kind()]; found {
		return of
	}
	return r.kinds[""]
}
