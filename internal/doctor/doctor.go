// Package doctor asks each address of a lock service separately, and compares the answers. A client cannot do that: it
// talks to one server at a time, and two servers that contradict each other both look sound to it.
//
// Each driver registers an Examiner for its URLs. The command fencelock doctor prints the members and the problems.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// The roles of a member.
const (
	Leader   = "leader" // accepts writes: the leader of a quorum, a primary
	Follower = "follower"
	Alone    = "standalone" // has no other members
)

// Member is the answer of one address.
type Member struct {
	Address string
	// Err is the reason for a missing answer. The fields below are empty then.
	Err error
	// ID of the server. Two addresses with the same ID are the same server, or copies of it. Empty: unknown.
	ID string
	// Cluster that the server belongs to. Empty: unknown.
	Cluster string
	// Role in the cluster. Empty: unknown.
	Role string
	// Space is the token space that the server has. Empty: no client has made one yet, or it has no tokens.
	Space string
	// Position in the server's history, for people.
	Position string
	// Version of the server.
	Version string
	// Facts are further properties, for people.
	Facts []string
	// Problems of this member alone, each a sentence without the address.
	Problems []string
}

// Report has the members in the order of the URL, and the problems that an Examiner has found between them.
type Report struct {
	Members []Member
	// Independent members do not form a cluster: each may lead, and no two may be the same server.
	Independent bool
	// NoTokens: the service has no token spaces.
	NoTokens bool
	Problems []string
}

// Examiner asks every address of a URL until the context ends. Its error is that of an invalid URL; a member that does
// not answer is no error. It changes nothing in the service.
type Examiner func(ctx context.Context, rawURL string) (*Report, error)

var (
	mu        sync.Mutex
	examiners = map[string]Examiner{}
)

// Register registers the examiner of a URL scheme.
func Register(e Examiner, schemes ...string) {
	mu.Lock()
	defer mu.Unlock()
	for _, s := range schemes {
		examiners[s] = e
	}
}

// Examine asks every address of a URL. A scheme without an examiner is backend.ErrUnsupported.
func Examine(ctx context.Context, rawURL string) (*Report, error) {
	scheme, _, _ := strings.Cut(rawURL, "://")
	mu.Lock()
	e := examiners[scheme]
	mu.Unlock()
	if e == nil {
		return nil, fmt.Errorf("doctor: a service of the scheme %q has no addresses to ask: %w", scheme, backend.ErrUnsupported)
	}
	return e(ctx, rawURL)
}

// Ask calls ask with the index of each address concurrently, and returns the members in order. It takes up to two
// thirds of the time of ctx: the rest is for questions to the members that answered.
func Ask(ctx context.Context, addresses []string, ask func(context.Context, int) (Member, error)) []Member {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 2*time.Until(deadline)/3)
		defer cancel()
	}
	members := make([]Member, len(addresses))
	var all sync.WaitGroup
	for i, address := range addresses {
		all.Go(func() {
			m, err := ask(ctx, i)
			if err != nil {
				m = Member{Err: err}
			}
			m.Address = address
			members[i] = m
		})
	}
	all.Wait()
	return members
}

// Diagnose returns every problem of the report, a sentence each.
func (r *Report) Diagnose() []string {
	var found []string
	var answered []*Member
	for i := range r.Members {
		m := &r.Members[i]
		if m.Err != nil {
			found = append(found, fmt.Sprintf("%s does not answer: %v", m.Address, m.Err))
			continue
		}
		answered = append(answered, m)
		for _, p := range m.Problems {
			found = append(found, m.Address+" "+p)
		}
	}
	for _, pair := range twins(answered) {
		found = append(found, fmt.Sprintf("%s and %s are the same server (%s): one server with two addresses, or a copy of its data",
			pair[0].Address, pair[1].Address, pair[0].ID))
	}
	if !r.Independent {
		found = append(found, contradictions(answered)...)
	}
	return append(found, r.Problems...)
}

// twins returns the pairs of members with the same ID.
func twins(members []*Member) (pairs [][2]*Member) {
	for i, m := range members {
		for _, other := range members[i+1:] {
			if m.ID != "" && m.ID == other.ID {
				pairs = append(pairs, [2]*Member{m, other})
			}
		}
	}
	return pairs
}

// contradictions compares the members of one cluster.
func contradictions(members []*Member) (found []string) {
	if len(members) == 0 {
		return nil
	}
	for _, c := range []struct {
		what string
		of   func(*Member) string
	}{
		{"belong to different clusters", func(m *Member) string { return m.Cluster }},
		{"have different token spaces", func(m *Member) string { return m.Space }},
	} {
		if text := differ(members, c.of); text != "" {
			found = append(found, "the servers "+c.what+": "+text)
		}
	}
	var leaders []string
	unknown := false
	for _, m := range members {
		unknown = unknown || m.Role == ""
		if m.Role == Leader || m.Role == Alone {
			leaders = append(leaders, m.Address)
		}
	}
	switch {
	case len(leaders) > 1:
		found = append(found, fmt.Sprintf("%d servers lead at once: %s", len(leaders), strings.Join(leaders, ", ")))
	case len(leaders) == 0 && !unknown:
		found = append(found, "no server that answers leads")
	}
	return found
}

// differ lists the values of a property with the addresses that have them, if there are several. Members without the
// property do not count.
func differ(members []*Member, of func(*Member) string) string {
	where := map[string][]string{}
	var values []string
	for _, m := range members {
		v := of(m)
		if v == "" {
			continue
		}
		if !slices.Contains(values, v) {
			values = append(values, v)
		}
		where[v] = append(where[v], m.Address)
	}
	if len(values) < 2 {
		return ""
	}
	var parts []string
	for _, v := range values {
		parts = append(parts, fmt.Sprintf("%s at %s", v, strings.Join(where[v], ", ")))
	}
	return strings.Join(parts, "; ")
}
