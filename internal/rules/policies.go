package rules

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Policy is the policy for one name. A zero field is unset.
type Policy struct {
	// MaxHold is the maximum duration of a hold of the name.
	MaxHold time.Duration
	// MaxQueue is the maximum number of waiters for the name.
	MaxQueue int
	// Permits is the limit of the permits of the name. It overrides the limit in requests.
	Permits uint32
}

// Policies are the policies of one file. ParsePolicies creates them. They are immutable, so all methods are safe for
// concurrent use. A nil *Policies has no policies.
type Policies struct {
	by     map[string]*policy // by prefix
	depths uint64             // as in Rules
}

// setting is a field of Policy.
type setting uint8

const (
	maxHold setting = iota
	maxQueue
	permits
	settings
)

var settingNames = [settings]string{"max-hold", "max-queue", "permits"}

// policy has a file's settings for one prefix. lines has the line of each setting; 0 if the setting is missing.
type policy struct {
	Policy
	lines [settings]int
}

// The bounds of settings. minMaxHold is longer than the time for which a session outlives its TTL.
const (
	minMaxHold  = time.Second
	mostMaxHold = 365 * 24 * time.Hour
	mostQueue   = 1 << 30
	mostPermits = 1<<31 - 1
)

// ParsePolicies parses a file of policies. The error is a *SyntaxError.
//
//	# a comment
//	max-queue=5000             ""
//	max-hold=1h,max-queue=100  accounts
//	max-hold=none              accounts/audit
//	permits=8                  gpu/pool
//
// Prefixes have the same form and meaning as in rules. For each setting the longest prefix that has it decides; none
// means that there is no such policy.
func ParsePolicies(text []byte) (*Policies, error) {
	p := &Policies{by: map[string]*policy{}}
	n := 0
	for line := range bytes.Lines(text) {
		n++
		if err := p.line(n, strings.TrimSpace(string(line))); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Policies) line(n int, text string) error {
	wrong := func(value, why string) error { return &SyntaxError{n, value, why} }
	if !utf8.ValidString(text) {
		return wrong(text, "it is not valid UTF-8")
	}
	if text == "" || text[0] == '#' {
		return nil
	}
	what, rest := cutWord(text)
	prefix, err := parsePrefix(rest)
	switch {
	case rest == "":
		return wrong(what, `the prefix is missing after it; "" is the prefix of every name`)
	case err != nil:
		return wrong(rest, err.Error())
	}
	at := p.by[prefix]
	if at == nil {
		at = &policy{}
		p.by[prefix] = at
		if prefix != "" {
			p.depths |= depthBit(depthOf(prefix))
		}
	}
	for word := range strings.SplitSeq(what, ",") {
		if why := at.set(n, word); why != "" {
			return wrong(word, why)
		}
	}
	return nil
}

// set parses one setting of a line. It returns the reason if the setting is invalid.
func (p *policy) set(n int, word string) string {
	name, value, _ := strings.Cut(word, "=")
	of := settings
	for i, known := range settingNames {
		if name == known {
			of = setting(i)
		}
	}
	switch {
	case of == settings:
		return "want max-hold=DURATION, max-queue=NUMBER or permits=NUMBER, separated by commas"
	case p.lines[of] != 0:
		return fmt.Sprintf("line %d has it for this prefix", p.lines[of])
	}
	p.lines[of] = n
	if value == "none" {
		return ""
	}
	if of == maxHold {
		d, err := time.ParseDuration(value)
		if err != nil || d < minMaxHold || d > mostMaxHold {
			return fmt.Sprintf("want none, or a duration from %v to %v, such as 90s or 1h", minMaxHold, mostMaxHold)
		}
		p.MaxHold = d
		return ""
	}
	most := mostQueue
	if of == permits {
		most = mostPermits
	}
	number, err := strconv.Atoi(value)
	if err != nil || number < 1 || number > most {
		return fmt.Sprintf("want none, or a number from 1 to %d", most)
	}
	if of == permits {
		p.Permits = uint32(number)
	} else {
		p.MaxQueue = number
	}
	return ""
}

// Of returns the policy for name. Its time does not depend on the number of policies.
func (p *Policies) Of(name string) (is Policy) {
	if p == nil {
		return is
	}
	var found [settings]bool
	take := func(at *policy) {
		for of, line := range at.lines {
			if line == 0 || found[of] {
				continue
			}
			found[of] = true
			switch setting(of) {
			case maxHold:
				is.MaxHold = at.MaxHold
			case maxQueue:
				is.MaxQueue = at.MaxQueue
			case permits:
				is.Permits = at.Permits
			}
		}
	}
	for prefix, depth := name, depthOf(name); prefix != ""; prefix, depth = parent(prefix), depth-1 {
		if p.depths&depthBit(depth) != 0 {
			if at := p.by[prefix]; at != nil {
				take(at)
			}
		}
	}
	if at := p.by[""]; at != nil {
		take(at)
	}
	return is
}
