package backend

import (
	"strings"
	"time"
)

// Description is what a driver says about itself in its present configuration.
type Description struct {
	// Name of the driver, such as "redis".
	Name string

	// Capabilities declared for this configuration.
	Capabilities Capabilities

	// MinTTL and MaxTTL bound Request.TTL, both included. TTLGranularity is the step: a TTL that is not a multiple of
	// it is refused by the core and never rounded.
	MinTTL, MaxTTL, TTLGranularity time.Duration

	// Margin is the driver's own term of the safety margin: what its service may be early beyond the 1 % + 50 ms that
	// every driver gets. See Validity.
	Margin time.Duration

	// Clock is the clock of every Instant that the driver reports. The core measures with the same one. Nil is
	// SystemClock().
	Clock Clock

	// Polling is the longest time between two looks of a waiter, where this configuration cannot wake it (a pooler that
	// passes no notifications on). Zero: a release wakes the next waiter, as it should.
	Polling time.Duration

	// Exclusion says what the exclusion of this configuration rests on. The correctness tier refuses
	// ExclusionUndeclared and ExclusionVolatileServer, and ExclusionAsyncReplica unless the caller opted in.
	Exclusion Exclusion

	// KeepsHolds: the driver keeps what it was granted alive by itself, on sessions, until Release or Close: a hold
	// does not end because nobody calls Renew. Unset: a hold ends in the service one TTL after the last call that
	// renewed it, and any driver of the same service may renew and release it by its Grant. Who speaks for holders that
	// may vanish ends their holds itself where it is set, see Expirer.
	KeepsHolds bool

	// TokenSpace names the cluster that issues the tokens, so that a guard can refuse tokens of another cluster or of
	// one restored from a backup. Empty if the driver does not fence, or before it has learnt the name.
	TokenSpace string

	// NoFencing says in one sentence why this configuration does not fence. Empty if it does. The tier error quotes it.
	NoFencing string
}

// Exclusion says what keeps two clients from holding one lock at once when a process or a machine of the service fails.
type Exclusion uint8

const (
	// ExclusionUndeclared: the driver does not say.
	ExclusionUndeclared Exclusion = iota
	// ExclusionInProcess: the holds live in this process and exclude nobody in another.
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

// Validity returns how long after SentAt a grant of ttl may be believed: ttl − (1 % of ttl + 50 ms + d.Margin). The 1 %
// covers clocks that run at different rates, the 50 ms scheduling and timer slack. It is not positive if ttl is too
// short to be of use.
func (d Description) Validity(ttl time.Duration) time.Duration {
	return ttl - ttl/100 - 50*time.Millisecond - d.Margin
}

// Capabilities is a set of things a driver can do.
type Capabilities uint32

const (
	// CapFencing: exclusive grants carry strictly increasing tokens. Only together with FencingDriver.
	CapFencing Capabilities = 1 << iota
	// CapFair: FIFO by arrival, no barging, not by TryAcquire either.
	CapFair
	// CapShared: KindShared.
	CapShared
	// CapPermits: KindPermits.
	CapPermits
	// CapMinHold: Request.MinHold.
	CapMinHold
	// CapMetadata: Request.Metadata.
	CapMetadata
	// CapPushLoss: Request.Lost is called within one second of a loss that the service can see.
	CapPushLoss
	// CapInspect: the driver is an Inspector.
	CapInspect
	// CapList: the driver is a Lister.
	CapList
	// CapWatch: the driver is a Watcher.
	CapWatch
	// CapWatchReplay: Watch replays from a revision, or answers ErrCompacted.
	CapWatchReplay
	// CapForceRelease: the driver is a ForceReleaser.
	CapForceRelease
	// CapMultiAcquire: the driver is a MultiAcquirer.
	CapMultiAcquire
	// CapHierarchy: a hold of "a/b" excludes holds of "a" and of "a/b/c".
	CapHierarchy
	// CapDeadlock: a request that would close a cycle is refused with ErrDeadlock.
	CapDeadlock

	capEnd
)

var capNames = [...]string{
	"fencing", "fair", "shared", "permits", "min-hold", "metadata", "push-loss", "inspect", "list", "watch",
	"watch-replay", "force-release", "multi-acquire", "hierarchy", "deadlock-detection",
}

// Has reports whether c contains all of want.
func (c Capabilities) Has(want Capabilities) bool { return c&want == want }

// Missing returns the members of want that c lacks.
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
