package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

const explainHelp = `Usage: fencelock explain NAME [options]

Explains why the lock NAME cannot be acquired. It shows the holders, with the start and origin of each hold; the locks
that the holders themselves wait for; the queue in order; and the same for those locks. Holders that wait for each
other are printed as a cycle. This needs a cluster of the bundled server; with others, use "fencelock holder".

A holder waits for the locks that its program acquires while it holds the lock, or on the same session without a lock,
and for the locks of nested "fencelock run" commands. The last forced release is shown while the leader still stores
the event. The output may already be out of date.

Options:

{options}

Exit codes:

    0  NAME is held, or a client waits for it
    1  NAME is free
   64  the command line is invalid, or the backend is not a cluster of the bundled server
   69  the lock service cannot be reached, or has no leader
`

// explainedName is the printed form of a name.
type explainedName struct {
	Name    string           `json:"lockKey"`
	Holders []explainedClaim `json:"holders,omitempty"`
	Queue   []explainedClaim `json:"queue,omitempty"`
	Waiters uint32           `json:"waiters"`
	Forced  *explainedForced `json:"lastForcedRelease,omitempty"`
	// Cycle has the names of holders that wait for each other, from this name back to it.
	Cycle []string `json:"cycle,omitempty"`
}

type explainedClaim struct {
	Owner      string            `json:"ownerId"`
	HoldID     string            `json:"holdId,omitempty"`
	Client     string            `json:"client,omitempty"`
	Kind       string            `json:"kind"`
	Permits    uint32            `json:"permits,omitempty"`
	Limit      uint32            `json:"limit,omitempty"`
	AgeMillis  int64             `json:"ageMillis"`
	LeftMillis int64             `json:"expiresInMillis,omitempty"`
	Token      uint64            `json:"fencingToken,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	WaitsFor   []string          `json:"waitsFor,omitempty"`
	Under      []string          `json:"under,omitempty"`
	Lingering  bool              `json:"lingering,omitempty"`
}

type explainedForced struct {
	Owner     string `json:"ownerId"`
	By        string `json:"by,omitempty"`
	Principal string `json:"principal,omitempty"`
	Reason    string `json:"reason,omitempty"`
	AgoMillis int64  `json:"agoMillis"`
}

func defineExplain(o *options) func([]string) error {
	s := o.look("explain")
	return func(args []string) error {
		return s.run(s.parse(args, "NAME"), func(ctx context.Context) error { return s.explain(ctx, s.args[0]) })
	}
}

func (s *lookSettings) explain(ctx context.Context, name string) error {
	if !isBundled(s.backend) {
		return fmt.Errorf("explain: only the bundled server reports waiters; use fencelock holder: "+
			"%w", backend.ErrUnsupported)
	}
	admin, err := builtin.OpenAdmin(s.backend)
	if err != nil {
		return err
	}
	reply, err := admin.Explain(ctx, name)
	if err != nil {
		return err
	}
	all := explained(reply)
	for i := range all {
		if s.json {
			err = json.NewEncoder(os.Stdout).Encode(&all[i])
		} else {
			_, err = os.Stdout.WriteString(all[i].text())
		}
		if err != nil {
			return err
		}
	}
	if reply.More {
		say("some locks that holders wait for are not shown")
	}
	if len(all[0].Holders) == 0 && all[0].Waiters == 0 {
		return nobodyError(name)
	}
	return nil
}

// explained converts the answer to its printed form, with the cycles.
func explained(reply *lockpb.ExplainReply) []explainedName {
	all := make([]explainedName, len(reply.Names))
	edges := map[string][]string{}
	for i, n := range reply.Names {
		x := &all[i]
		x.Name, x.Waiters = n.Name, n.Waiters
		for _, h := range n.Holders {
			x.Holders = append(x.Holders, claimOf(h))
			edges[n.Name] = append(edges[n.Name], h.WaitsFor...)
		}
		for _, w := range n.Queue {
			x.Queue = append(x.Queue, claimOf(w))
		}
		if f := n.Forced; f != nil {
			x.Forced = &explainedForced{f.Owner, f.By, f.Principal, f.Reason, f.AgoNanos / int64(time.Millisecond)}
		}
	}
	for i := range all {
		all[i].Cycle = cycleOf(edges, all[i].Name)
	}
	return all
}

func claimOf(c *lockpb.ExplainedClaim) explainedClaim {
	return explainedClaim{
		Owner: c.Owner, HoldID: c.HoldId, Client: c.Client, Kind: backend.Kind(c.Kind).String(), Permits: c.Permits,
		Limit: c.Limit, AgeMillis: c.AgeNanos / int64(time.Millisecond), LeftMillis: c.LeftNanos / int64(time.Millisecond),
		Token: c.Token, Metadata: c.Metadata, WaitsFor: c.WaitsFor, Under: c.Under, Lingering: c.Lingering,
	}
}

// cycleOf returns a shortest way from a name back to it along the edges, or nil.
func cycleOf(edges map[string][]string, name string) []string {
	ways := [][]string{{name}}
	seen := map[string]bool{}
	for len(ways) > 0 {
		way := ways[0]
		ways = ways[1:]
		for _, next := range edges[way[len(way)-1]] {
			if next == name {
				return append(slices.Clone(way), name)
			}
			if !seen[next] {
				seen[next] = true
				ways = append(ways, append(slices.Clone(way), next))
			}
		}
	}
	return nil
}

// text is for people.
func (x *explainedName) text() string {
	var b strings.Builder
	name := cell(x.Name)
	if len(x.Holders) == 0 {
		fmt.Fprintf(&b, "%s is not held\n", name)
	}
	for i := range x.Holders {
		h := &x.Holders[i]
		if h.Lingering {
			fmt.Fprintf(&b, "%s stays closed for its minimum; %s held it\n", name, h.text())
			continue
		}
		fmt.Fprintf(&b, "%s is held by %s", name, h.text())
		if h.LeftMillis > 0 {
			fmt.Fprintf(&b, ", for another %v unless renewed", ago(h.LeftMillis))
		}
		b.WriteByte('\n')
		if len(h.WaitsFor) > 0 {
			fmt.Fprintf(&b, "  this holder waits for %s\n", cells(h.WaitsFor))
		}
		for _, key := range slices.Sorted(maps.Keys(h.Metadata)) {
			fmt.Fprintf(&b, "  %s: %s\n", cell(key), cell(h.Metadata[key]))
		}
	}
	if x.Cycle != nil {
		fmt.Fprintf(&b, "  CYCLE: %s\n", strings.ReplaceAll(cells(x.Cycle), ", ", " -> "))
	}
	for i := range x.Queue {
		fmt.Fprintf(&b, "  %d. %s waits", i+1, x.Queue[i].text())
		if len(x.Queue[i].WaitsFor) > 1 {
			fmt.Fprintf(&b, " for all of %s", cells(x.Queue[i].WaitsFor))
		}
		b.WriteByte('\n')
	}
	if n := int(x.Waiters); n > len(x.Queue) {
		fmt.Fprintf(&b, "  and %d more wait\n", n-len(x.Queue))
	}
	if f := x.Forced; f != nil {
		fmt.Fprintf(&b, "  last forced release %v ago, of %s, by %s: %s\n",
			ago(f.AgoMillis), cell(f.Owner), cell(cmp.Or(f.By, f.Principal)), cell(f.Reason))
	}
	return b.String()
}

// text names a claim: who, from where, what and since when.
func (c *explainedClaim) text() string {
	t := cell(c.Owner)
	if c.Client != "" {
		t += " (" + cell(c.Client) + ")"
	}
	t += ", " + c.Kind
	if c.Permits > 0 {
		t += fmt.Sprintf(" %d of %d", c.Permits, c.Limit)
	}
	t += fmt.Sprintf(", since %v", ago(c.AgeMillis))
	if c.Token != 0 {
		t += fmt.Sprintf(", token %d", c.Token)
	}
	return t
}

func ago(millis int64) time.Duration {
	return (time.Duration(millis) * time.Millisecond).Round(100 * time.Millisecond)
}

func cells(names []string) string {
	shown := make([]string, len(names))
	for i := range names {
		shown[i] = cell(names[i])
	}
	return strings.Join(shown, ", ")
}
