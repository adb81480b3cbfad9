package backend

// Description, with the bounds, the safety margin, the exclusion and the capabilities of a driver. It describes one
// configuration at one moment, since a probe can find an unfit server; the core reads it at every acquire.

import (
	"strings"
	"time"
)

// Description describes a driver in its current configuration.
//
// For example, of a driver after its probe has found a server that syncs every write to its disk:
//
//	backend.Description{
//		Name:         "myservice",
//		Capabilities: backend.CapFencing | backend.CapInspect,
//		MinTTL:       time.Second, MaxTTL: 24 * time.Hour, TTLGranularity: time.Second,
//		Clock:        d.clock,
//		Exclusion:    backend.ExclusionDurableServer,
//		TokenSpace:   d.clusterID,
//	}
//
// And of the same driver before a server without durable storage: ExclusionVolatileServer, without CapFencing and
// TokenSpace, and with NoFencing: "the server does not sync its log".
type Description struct {
	// Name of the driver, such as "redis". It appears in errors and events.
	Name string

	// Capabilities declared for this configuration. Requests that need another capability fail with ErrUnsupported:
	// in the core before a request is sent, and in the driver for direct callers.
	Capabilities Capabilities

	// MinTTL and MaxTTL bound Request.TTL, both included. TTLGranularity is the step: a TTL that is not a multiple of
	// it is refused by the core and never rounded, because a caller who counts on 1.5 s is not served by 1 s or by 2.
	// Zero MaxTTL and TTLGranularity: no bound.
	MinTTL, MaxTTL, TTLGranularity time.Duration

	// Margin is the driver's own term of the safety margin: the time by which its service may end a hold early, beyond
	// the 1 % + 50 ms that every driver gets. A larger one costs holding time in every lease. See Validity.
	Margin time.Duration

	// Clock is the clock of every Instant that the driver reports. The core measures with the same clock: with two
	// clocks a lease could seem to be valid for years. Nil is SystemClock().
	Clock Clock

	// Polling is the longest time between two looks of a waiter, where this configuration cannot wake it (a pooler that
	// passes no notifications on). Zero: a release wakes the next waiter, as it should.
	Polling time.Duration

	// Exclusion names the mechanism that excludes other holders in this configuration. The correctness tier refuses
	// ExclusionUndeclared and ExclusionVolatileServer, and ExclusionAsyncReplica unless the caller opted in. It may
	// become weaker after the driver has talked to the service; then the next grant is refused.
	Exclusion Exclusion

	// KeepsHolds: the driver keeps its holds alive on sessions until Release or Close: a hold does not end for lack
	// of Renew. Unset: a hold ends in the service one TTL after the last call that renewed it, and any driver of the
	// same service may renew and release it by its Grant. If it is set, callers that act for holders which may vanish
	// have to end such holds themselves, see Expirer. The core does not use it.
	KeepsHolds bool

	// TokenSpace names the cluster that issues the tokens, so that a guard can refuse tokens of another cluster or of
	// one restored from a backup. At most fencing.MaxSpaceBytes. Empty if the driver does not fence, or before it
	// knows the name; all drivers of one service have the same token space from their first grant on. A later change
	// is ErrHistoryLost.
	TokenSpace string

	// NoFencing is the reason, in one sentence, why this configuration does not fence. Empty if it does. The error of the
	// tier quotes it, so it names the change for an operator.
	NoFencing string

	// Shows declares which optional fields of inspections this driver fills in.
	Shows Shows
}

// Shows declares, field by field, the results of a driver's inspections. A declared field is always filled in;
// other fields are zero. Owner, HoldID, Kind, Permits, Token and Nonce of a holder need no declaration. The
// conformance suite compares the declaration with the answers.
type Shows struct {
	// Look is for Inspector.Look, List for Lister.List.
	Look, List StateFields
	// RetryAfter: a refused attempt returns HeldError.RetryAfter.
	RetryAfter bool
	// ChangeTime and ChangeAuthor are Change.Time and, for forced releases, Change.By and Change.Principal.
	ChangeTime, ChangeAuthor bool
}

// StateFields are the optional fields of a State.
type StateFields struct {
	// Since, ExpiresIn and Limit are fields of Holder. Limit is filled in for KindPermits only.
	Since, ExpiresIn, Limit bool
	// Waiters is State.Waiters. Queue is State.Queue, and QueueSince is Waiter.Since.
	Waiters, Queue, QueueSince bool
}

// Exclusion describes what prevents two concurrent holders when a process or a machine of the service fails.
// It is a word about the configuration, declared by the driver and tested by stopping servers; the fencing tokens of a
// driver may be sound although its exclusion is weak, and then only guards keep two holders apart.
type Exclusion uint8

const (
	// ExclusionUndeclared: the driver does not declare it. The correctness tier refuses such a driver.
	ExclusionUndeclared Exclusion = iota
	// ExclusionInProcess: the holds live in this process and exclude no other process.
	ExclusionInProcess
	// ExclusionVolatileServer: one server, or several without agreement, that may forget an acknowledged hold when it
	// restarts. No such configuration may declare CapFencing.
	ExclusionVolatileServer
	// ExclusionDurableServer: one server that has an acknowledged hold on disk. It does not answer while it is down.
	ExclusionDurableServer
	// ExclusionQuorum: a majority of servers has an acknowledged hold on disk.
	ExclusionQuorum
	// ExclusionAsyncReplica: a replica that may take over has acknowledged holds a little later, so that a failover can
	// forget the latest ones.
	ExclusionAsyncReplica
)

// exclusionNames are in the order of the constants.
var exclusionNames = [...]string{
	"undeclared", "in-process", "volatile-server", "durable-server", "quorum", "async-replica",
}

// String returns a word such as "quorum".
func (e Exclusion) String() string {
	if int(e) < len(exclusionNames) {
		return exclusionNames[e]
	}
	return "unknown exclusion"
}

// Validity returns the time after SentAt for which a grant of ttl is valid: ttl − (1 % of ttl + 50 ms + d.Margin). The
// 1 % covers clocks that run at different rates, the 50 ms scheduling and timer slack. It is not positive if ttl is
// too short to be of use. The core uses a little less if a client holds thousands of leases.
//
// With a TTL of 30 s and no term of the driver's own a grant is valid for 29.65 s, and renewed every 8 to 10 s.
func (d Description) Validity(ttl time.Duration) time.Duration {
	return ttl - ttl/100 - 50*time.Millisecond - d.Margin
}

// Capabilities is a set of optional features of a driver, in one configuration. The zero value is the empty set. The
// conformance suite knows every member and refuses a capability that it cannot test.
//
// A capability that a caller needs is asked for by the option or the method that needs it, and by
// fencelock.Options.Require at startup:
//
//	if missing := d.Describe().Capabilities.Missing(backend.CapFair | backend.CapShared); missing != 0 {
//		return fmt.Errorf("cannot use %s: it lacks %v", d.Describe().Name, missing)
//	}
type Capabilities uint32

const (
	// CapFencing: exclusive grants carry strictly increasing tokens. Only together with FencingDriver, and never over a
	// service that may forget an acknowledged hold when it restarts.
	CapFencing Capabilities = 1 << iota
	// CapFair: FIFO by arrival: no later request is granted first, neither a waiter nor an attempt without Wait.
	// Without it the order is unspecified.
	CapFair
	// CapShared: KindShared, with the rule that a waiting exclusive request stops new shared holds.
	CapShared
	// CapPermits: KindPermits.
	CapPermits
	// CapMinHold: Request.MinHold.
	CapMinHold
	// CapMetadata: Request.Metadata.
	CapMetadata
	// CapPushLoss: Request.Lost is called within one second of a loss that the service can see, and never for a hold
	// that lives. Without it, the core notices such a loss at the next renewal.
	CapPushLoss
	// CapInspect: the driver is an Inspector.
	CapInspect
	// CapList: the driver is a Lister.
	CapList
	// CapWatch: the driver is a Watcher.
	CapWatch
	// CapWatchReplay: Watch replays from a revision, or returns ErrCompacted; Look returns the revision.
	CapWatchReplay
	// CapForceRelease: the driver is a ForceReleaser.
	CapForceRelease
	// CapMultiAcquire: the driver is a MultiAcquirer. It need not serve every set.
	CapMultiAcquire
	// CapHierarchy: Request.Hierarchical: a hold of "a/b" excludes holds of "a" and of "a/b/c".
	CapHierarchy
	// CapDeadlock: a request that would close a cycle of holders that wait for each other is refused with
	// ErrDeadlock, and only such a request.
	CapDeadlock

	// capEnd is one bit beyond the last capability.
	capEnd
)

// capNames are in the order of the bits.
var capNames = [...]string{
	"fencing", "fair", "shared", "permits", "min-hold", "metadata", "push-loss", "inspect", "list", "watch",
	"watch-replay", "force-release", "multi-acquire", "hierarchy", "deadlock-detection",
}

// Has reports whether c contains all of want.
func (c Capabilities) Has(want Capabilities) bool { return c&want == want }

// Missing returns the members of want that c lacks; 0 if it has them all.
func (c Capabilities) Missing(want Capabilities) Capabilities { return want &^ c }

// All yields the single capabilities in c, in the order of their declaration.
func (c Capabilities) All() []Capabilities {
	var all []Capabilities
	for b := Capabilities(1); b < capEnd; b <<= 1 {
		if c&b != 0 {
			all = append(all, b)
		}
	}
	return all
}

// String returns the names of the capabilities, joined by commas, or "none".
func (c Capabilities) String() string {
	var names []string
	for i, name := range capNames {
		if c&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ",")
}
