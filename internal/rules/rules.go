// Package rules decides which principal may do what with which names.
//
// A rule allows or denies one principal, or one group, some verbs on all names under a prefix. Prefixes match whole
// segments, which "/" separates: "acc" covers "acc" and "acc/1", but not "account". The rule with the longest prefix
// decides. Among rules with the same prefix a denial takes precedence, then the rule for the principal over a rule for
// a group, then the first line. Anything without a rule is denied.
//
// Policies bound the use of all names under a prefix, for everybody: see Policy.
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

// Decision is the result of applying the rules.
type Decision struct {
	Allowed bool
	Line    int // the line of the rule that decides; 0 if there is no rule
}

// Rules are the rules of one file. Parse creates them. They are immutable, so all methods are safe for concurrent use.
type Rules struct {
	digest   string
	grants   map[string][]grant // by prefix; each sorted by subject
	below    map[string][]mask  // by prefix: the denials under longer prefixes; each sorted by subject
	depths   uint64             // the union of the depthBits of all prefixes
	subjects map[string]int32
	may      []uint8 // by subject: the verbs that any rule allows
	// members has the subjects of a principal: first itself, then its groups. kinds has, by kind, the subjects of a
	// principal without a rule and without a group.
	members map[principal.Principal][]int32
	kinds   map[string][]int32
}

// grant has, for each verb, the line of a subject's rule: negative if the rule denies, 0 if there is no rule.
type grant struct {
	subject int32
	lines   [verbs]int32
}

type mask struct {
	subject int32
	verbs   uint8
}

// Digest identifies the file: it returns the first 6 bytes of its SHA-256, in hexadecimal.
func (r *Rules) Digest() string { return r.digest }

// Decide reports whether p may do v with name. Its time does not depend on the number of rules.
func (r *Rules) Decide(p principal.Principal, v Verb, name string) Decision {
	subjects := r.subjectsOf(p)
	prefix, depth := name, depthOf(name)
	for prefix != "" {
		if r.depths&depthBit(depth) != 0 { // otherwise no prefix has this depth
			if d := decide(r.grants[prefix], subjects, v); d.Line != 0 {
				return d
			}
		}
		prefix, depth = parent(prefix), depth-1
	}
	return decide(r.grants[""], subjects, v)
}

// parent returns the next shorter prefix, without the last segment.
func parent(prefix string) string { return prefix[:max(strings.LastIndexByte(prefix, '/'), 0)] }

// depthOf returns the number of segments of a prefix that is not empty.
func depthOf(prefix string) int { return strings.Count(prefix, "/") + 1 }

// depthBit returns the bit of a depth in Rules.depths. Depths from 63 on share a bit.
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
			return Decision{} // the denial decides for a name at its prefix
		}
	}
	return d
}

// Refusal returns the reason why p may not do v with name, or, for a subtree, with name and every name under it. It is
// empty if p may.
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

// Sentence returns the sentence that p may not do something, with the rule that denies it.
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

// Any reports whether any rule allows p to do v. If it returns false, Decide denies v for every name.
func (r *Rules) Any(p principal.Principal, v Verb) bool {
	return slices.ContainsFunc(r.subjectsOf(p), func(s int32) bool { return s >= 0 && r.may[s]&(1<<v) != 0 })
}

// decide applies the rules of one prefix.
func decide(grants []grant, subjects []int32, v Verb) (d Decision) {
	if len(grants) == 0 {
		return d
	}
	own := false // d is from the rule for the principal itself
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

// few is the maximum number of grants for a linear search.
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

// anyone is the subject of all principals including Nobody; anyOf returns the subject of all principals of a kind.
const anyone = "*"

func anyOf(kind string) string { return kind + ":*" }

// subjectsOf returns the subjects of p. The first is p itself, or -1 if no rule is about p itself.
func (r *Rules) subjectsOf(p principal.Principal) []int32 {
	if known, found := r.members[p]; found {
		return known
	}
	if of, found := r.kinds[p.Kind()]; found {
		return of
	}
	return r.kinds[""]
}
