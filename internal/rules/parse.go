package rules

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/principal"
)

// SyntaxError describes an error in a line of a file of rules or policies.
type SyntaxError struct {
	Line  int
	Value string // the invalid part of the line
	Why   string
}

// Error implements error.
func (e *SyntaxError) Error() string { return fmt.Sprintf("line %d: %q: %s", e.Line, e.Value, e.Why) }

// groupKind is the kind of a subject that is a group in the file.
const groupKind = "group"

// Parse parses a file of rules. The error is a *SyntaxError.
//
//	# a comment
//	group payments  cert:pay spiffe:worker token:ci
//	allow group:payments  acquire,read  accounts
//	deny  token:ci        acquire       accounts/audit
//	allow cert:*          read          ""
//	allow cert:ops        admin,force   ""
//
// "" is the prefix of every name. A prefix with white space is a Go string in double quotes. KIND:* means all
// principals of a kind; * means everybody, including clients without a credential. A group may have several lines.
func Parse(text []byte) (*Rules, error) {
	b := &builder{
		groups: map[string]map[principal.Principal]bool{}, grants: map[string]map[int32]*grant{},
		below: map[string]map[int32]uint8{},
		r: &Rules{
			grants: map[string][]grant{}, below: map[string][]mask{}, subjects: map[string]int32{},
			members: map[principal.Principal][]int32{}, kinds: map[string][]int32{},
		},
	}
	n := 0
	for line := range bytes.Lines(text) {
		n++
		if err := b.line(n, string(line)); err != nil {
			return nil, err
		}
	}
	sum := sha256.Sum256(text)
	b.r.digest = hex.EncodeToString(sum[:6])
	return b.finish()
}

// builder builds Rules while Parse reads the file.
type builder struct {
	r      *Rules
	groups map[string]map[principal.Principal]bool
	used   []use                       // the groups in rules
	grants map[string]map[int32]*grant // by prefix and subject
	below  map[string]map[int32]uint8  // by prefix and subject
}

// use is the use of a group in a rule.
type use struct {
	line int
	name string
}

func (b *builder) line(n int, text string) error {
	wrong := func(value, why string) error { return &SyntaxError{n, value, why} }
	if !utf8.ValidString(text) {
		return wrong(text, "it is not valid UTF-8")
	}
	text = strings.TrimSpace(text)
	if text == "" || text[0] == '#' {
		return nil
	}
	word, rest := cutWord(text)
	switch word {
	case groupKind:
		name, rest := cutWord(rest)
		if err := principal.CheckName(name); err != nil {
			return wrong(name, "the name of a group: "+err.Error())
		}
		if b.groups[name] == nil {
			b.groups[name] = map[principal.Principal]bool{}
		}
		for rest != "" {
			word, rest = cutWord(rest)
			p, err := principal.Parse(word)
			if err != nil {
				return wrong(word, err.Error())
			}
			b.groups[name][p] = true
		}
		return nil
	case "allow", "deny":
		return b.rule(n, word == "allow", rest)
	}
	return wrong(word, "want group, allow or deny")
}

// rule reads the text after allow or deny.
func (b *builder) rule(n int, allow bool, text string) error {
	wrong := func(value, why string) error { return &SyntaxError{n, value, why} }
	who, rest := cutWord(text)
	what, rest := cutWord(rest)
	where, err := parsePrefix(rest)
	switch {
	case who == "":
		return wrong(text, "want a principal or group, verbs separated by commas, and a prefix")
	case what == "":
		return wrong(who, "the verbs are missing after it, and the prefix")
	case rest == "":
		return wrong(what, `the prefix is missing after it; "" is the prefix of every name`)
	case err != nil:
		return wrong(rest, err.Error())
	}
	kind, name, _ := strings.Cut(who, ":")
	switch {
	case kind == groupKind:
		b.used = append(b.used, use{n, name})
	case who == anyone, name == "*" && principal.IsKind(kind):
	default:
		p, err := principal.Parse(who)
		if err != nil {
			return wrong(who, err.Error())
		}
		who = string(p)
	}
	subject := b.subject(who)
	for word := range strings.SplitSeq(what, ",") {
		v, ok := ParseVerb(word)
		switch {
		case !ok:
			return wrong(word, "want one or some of "+strings.Join(verbNames[:], ","))
		case v == Admin && where != "":
			return wrong(rest, `admin is about the cluster: its prefix is ""`)
		}
		b.add(n, allow, subject, where, v)
	}
	if !allow {
		b.deny(where, subject, b.grants[where][subject])
	}
	return nil
}

// add records one verb of a rule. A denial replaces a permission of the same subject and prefix.
func (b *builder) add(n int, allow bool, subject int32, prefix string, v Verb) {
	if b.grants[prefix] == nil {
		b.grants[prefix] = map[int32]*grant{}
	}
	g := b.grants[prefix][subject]
	if g == nil {
		g = &grant{subject: subject}
		b.grants[prefix][subject] = g
	}
	switch {
	case allow && g.lines[v] == 0:
		g.lines[v] = int32(n)
	case !allow && g.lines[v] >= 0:
		g.lines[v] = -int32(n)
	}
	if allow {
		b.r.may[subject] |= 1 << v
	}
}

// deny records the denials at prefix at all shorter prefixes.
func (b *builder) deny(prefix string, subject int32, g *grant) {
	var denied uint8
	for v, line := range g.lines {
		if line < 0 {
			denied |= 1 << v
		}
	}
	for prefix != "" {
		prefix = parent(prefix)
		if b.below[prefix] == nil {
			b.below[prefix] = map[int32]uint8{}
		}
		b.below[prefix][subject] |= denied
	}
}

// subject returns the number of a principal or group.
func (b *builder) subject(name string) int32 {
	id, found := b.r.subjects[name]
	if !found {
		id = int32(len(b.r.may))
		b.r.subjects[name] = id
		b.r.may = append(b.r.may, 0)
	}
	return id
}

func (b *builder) finish() (*Rules, error) {
	for _, u := range b.used {
		if b.groups[u.name] == nil {
			return nil, &SyntaxError{u.line, groupKind + ":" + u.name, "there is no such group"}
		}
	}
	r := b.r
	for prefix, grants := range b.grants {
		all := make([]grant, 0, len(grants))
		for _, g := range grants {
			all = append(all, *g)
		}
		slices.SortFunc(all, func(a, b grant) int { return cmp.Compare(a.subject, b.subject) })
		r.grants[prefix] = all
		r.depths |= depthBit(depthOf(prefix))
	}
	for prefix, masks := range b.below {
		for _, subject := range slices.Sorted(maps.Keys(masks)) {
			r.below[prefix] = append(r.below[prefix], mask{subject, masks[subject]})
		}
	}
	b.members()
	return r, nil
}

// members resolves the subjects of each principal in the file, and those of all other principals of each kind.
func (b *builder) members() {
	r := b.r
	have := func(of []int32, names ...string) []int32 {
		for _, name := range names {
			if id, found := r.subjects[name]; found {
				of = append(of, id)
			}
		}
		return of
	}
	none := []int32{-1}
	r.kinds[""] = have(slices.Clone(none), anyone)
	for _, kind := range principal.Kinds() {
		r.kinds[kind] = have(slices.Clone(none), anyOf(kind), anyone)
	}
	all := map[principal.Principal][]string{}
	for subject := range r.subjects {
		if p, err := principal.Parse(subject); err == nil {
			all[p] = nil
		}
	}
	for name, members := range b.groups {
		for p := range members {
			all[p] = append(all[p], groupKind+":"+name)
		}
	}
	for p, groups := range all {
		of := slices.Clone(none)
		if id, found := r.subjects[string(p)]; found {
			of[0] = id
		}
		r.members[p] = have(have(of, groups...), anyOf(p.Kind()), anyone)
	}
}

// cutWord cuts text after its first word. text does not begin with white space.
func cutWord(text string) (word, rest string) {
	at := strings.IndexFunc(text, unicode.IsSpace)
	if at < 0 {
		return text, ""
	}
	return text[:at], strings.TrimSpace(text[at:])
}

// parsePrefix reads the prefix, the last word of a rule.
func parsePrefix(text string) (string, error) {
	if text == `""` {
		return "", nil
	}
	prefix := text
	switch {
	case text == "":
		return "", nil // the caller reports the missing prefix
	case text[0] == '"':
		var err error
		if prefix, err = strconv.Unquote(text); err != nil {
			return "", errors.New("it is not a string in double quotes")
		}
	case strings.ContainsFunc(text, unicode.IsSpace):
		return "", errors.New("put a prefix with white space in double quotes, and nothing after it")
	}
	if strings.HasSuffix(prefix, "/") {
		return "", fmt.Errorf("prefixes match whole segments: %q covers all names below it",
			strings.TrimRight(prefix, "/"))
	}
	return prefix, backend.ValidateName(prefix)
}
