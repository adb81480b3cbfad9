package nemesis

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// Kind is one way to break a service or its clients.
type Kind struct {
	Slug string // "leader-kill"
	What string // in words

	where       side
	needs       func(*Service) bool
	process     bool    // the victim has its own process
	waits       bool    // the victim need not hold a name
	least, most float64 // duration, in TTLs
	alone       bool    // never together with another fault
	reported    bool    // beyond the drivers' promises: counted, no failure
	strike      func(*attack, context.Context) error
}

// side is the target of a kind.
type side uint8

const (
	onClient side = iota + 1
	onNode
	onPeers // the paths between nodes
	onAdmin // no part breaks; an operator interferes
)

// Kinds returns the possible faults of a service, in the order of the matrix. With reported, the faults break the
// foundations of the service, and their violations are counted without a failure.
func Kinds(s Service, reported bool) []Kind {
	if s.resolve() != nil {
		return nil
	}
	return s.kinds(reported)
}

// kinds is Kinds once the service is resolved.
func (s *Service) kinds(reported bool) []Kind {
	return slices.DeleteFunc(slices.Concat(matrix(), s.More), func(k Kind) bool {
		return k.reported != reported || k.needs != nil && !k.needs(s)
	})
}

// lacks returns the slugs of the kinds that do not apply, because the service has no hooks or no capability for them.
func (s *Service) lacks() (slugs []string) {
	for _, k := range matrix() {
		if k.needs != nil && !k.needs(s) {
			slugs = append(slugs, k.Slug)
		}
	}
	return slugs
}

// NewKind returns a kind for one service. Strike breaks a part of it, waits until the fault has shown an effect, and
// heals; it gets the drawn variant, and the drawn length, between least and most TTLs. An error fails the run.
func NewKind(slug, what string, least, most float64,
	strike func(ctx context.Context, variant uint32, length time.Duration) error) Kind {
	return Kind{Slug: slug, What: what, where: onNode, least: least, most: most, alone: true,
		strike: func(a *attack, ctx context.Context) error {
			return a.within(ctx, func(ctx context.Context) error { return strike(ctx, a.Variant, a.Length) })
		}}
}

// NewLapse returns a kind that no driver promises to survive, for RunReported: forget makes the service forget the hold
// of a client, by its name. The holder must be notified of the loss; other effects are counted.
func NewLapse(slug, what string, forget func(ctx context.Context, name string) error) Kind {
	return Kind{Slug: slug, What: what, where: onAdmin, alone: true, reported: true, least: 0, most: 0.1,
		strike: func(a *attack, ctx context.Context) error { return a.lapse(ctx, forget) }}
}

func processes(s *Service) bool { return s.Processes > 0 }
func nodes(s *Service) bool     { return s.Kill != nil && s.Start != nil && s.Probe != nil }
func pauses(s *Service) bool    { return s.Pause != nil && s.Resume != nil && s.Probe != nil }
func revokes(s *Service) bool   { return s.RefuseRelease != nil }
func freezes(s *Service) bool   { return s.RefuseWrites != nil }
func leads(s *Service) bool     { return s.Leader != nil && s.quorum() }
func peers(s *Service) bool     { return leads(s) && s.Cut != nil && s.Heal != nil && s.Said != nil }

// matrix returns all kinds.
func matrix() []Kind {
	cut := func(slug, what string, breakIt func(fault.Link), seen fault.Direction) Kind {
		return Kind{Slug: slug, What: what, where: onClient, least: 0.2, most: 2.2,
			strike: func(a *attack, ctx context.Context) error { return a.cut(ctx, breakIt, seen) }}
	}
	return []Kind{
		{Slug: "stop-holder", What: "a process that holds is stopped for longer than the TTL (SIGSTOP), and goes on",
			where: onClient, process: true, needs: processes, least: 1.2, most: 2.4, strike: (*attack).stopHolder},
		{Slug: "stop-waiter", What: "a process that waits is stopped (SIGSTOP), and goes on",
			where: onClient, process: true, needs: processes, least: 0.3, most: 2.4, waits: true,
			strike: (*attack).stopWaiter},
		{Slug: "kill-holder",
			What:  "a process that holds ends without warning (SIGKILL), and another one takes its place",
			where: onClient, process: true, needs: processes, least: 0, most: 1.5, strike: (*attack).killHolder},
		cut("link-hold", "what a holder and the service say to each other is delivered late, both ways",
			func(l fault.Link) { l.Hold(fault.Both) }, fault.Requests),
		cut("link-drop", "what a holder and the service say to each other is lost, both ways",
			func(l fault.Link) { l.Drop(fault.Both) }, fault.Requests),
		cut("link-requests", "a holder's requests are delivered late, one way",
			func(l fault.Link) { l.Hold(fault.Requests) }, fault.Requests),
		cut("link-replies", "the replies to a holder are delivered late, one way",
			func(l fault.Link) { l.Hold(fault.Replies) }, fault.Replies),
		cut("link-lost-replies", "the replies to a holder are lost, one way",
			func(l fault.Link) { l.Drop(fault.Replies) }, fault.Replies),
		{Slug: "link-delay", What: "a holder's link is slow, one way or both", where: onClient, least: 0.5, most: 2,
			strike: (*attack).delay},
		{Slug: "link-reset", What: "a holder's connections are reset", where: onClient, least: 0, most: 0.2,
			strike: (*attack).reset},
		{Slug: "link-refuse", What: "a holder's connections are reset, and further ones refused", where: onClient,
			least: 0.2, most: 2.2, strike: (*attack).refuse},
		{Slug: "late-requests", What: "requests are delivered after their callers gave up", where: onClient,
			least: 0.4, most: 1.6, strike: (*attack).late},
		{Slug: "node-pause", What: "a node that does not lead freezes (a single server: all there is), and goes on",
			where: onNode,
			needs: pauses, least: 0.3, most: 2, strike: (*attack).nodePause},
		{Slug: "node-kill",
			What:  "a node that does not lead (a single server: all there is) ends without warning, and comes back",
			where: onNode, needs: nodes, least: 0.1, most: 1.5, strike: (*attack).nodeKill},
		{Slug: "leader-pause", What: "the leader freezes, and goes on when another one leads", where: onNode,
			needs: both(leads, pauses), least: 0.5, most: 2, strike: (*attack).leaderPause},
		{Slug: "leader-kill", What: "the leader ends without warning, and comes back", where: onNode,
			needs: both(leads, nodes), least: 0.3, most: 1.5, strike: (*attack).leaderKill},
		{Slug: "rolling-restart", What: "one node after the other ends without warning and comes back", where: onNode,
			alone: true,
			needs: both((*Service).quorum, nodes), least: 0, most: 0.1, strike: (*attack).rollingRestart},
		{Slug: "leader-partition", What: "the leader is cut off from the other nodes, but not from its clients",
			where: onPeers,
			needs: peers, least: 0.5, most: 1.5, strike: (*attack).leaderPartition},
		{Slug: "minority", What: "a follower is cut off from the other nodes, but not from its clients", where: onPeers,
			needs: peers, least: 0.5, most: 1.5, strike: (*attack).minority},
		{Slug: "one-way-peers", What: "a node hears the others and is not heard, or is heard and hears nothing",
			where: onPeers,
			needs: peers, least: 0.5, most: 1.5, strike: (*attack).oneWayPeers},
		{Slug: "force-release", What: "an operator takes a lock away", where: onAdmin, alone: true, least: 0, most: 0.1,
			needs: func(s *Service) bool {
				return s.caps.Has(backend.CapForceRelease)
			}, strike: (*attack).forceRelease},
		{Slug: "refuse-release", What: "the service refuses releases, and then accepts them again", where: onAdmin,
			alone: true, needs: revokes, least: 0.1, most: 2.2, strike: (*attack).refuseRelease},
		{Slug: "refuse-writes", What: "the service refuses whatever changes a lock, and then accepts it again",
			where: onAdmin, alone: true, needs: freezes, least: 0.1, most: 2.2, strike: (*attack).refuseWrites},
	}
}

func both(a, b func(*Service) bool) func(*Service) bool {
	return func(s *Service) bool { return a(s) && b(s) }
}
