// Package backend is the contract between the fencelock core and its drivers. It can be read alone: whoever writes a
// driver needs this package, package fencing and the conformance suite, and nothing else of the project.
//
//	locks.Acquire ─► core ─ Request ─► Driver.Acquire ─► lock service
//	lease.Context ◄─ core ◄─ Grant{Token, SentAt, TTL} ◄────┘
//
// A driver translates requests into the atomic steps of one lock service. It keeps no time and makes no decision about
// loss: the core alone schedules renewals, and the core alone declares a hold lost, from the instants that the driver
// reports. What the driver owes is written at each method below. The conformance suite (package conformance) numbers
// these obligations and prints the one that a driver breaks.
//
// # Clauses that hold for every method
//
// Concurrency. All methods of a Driver are safe for concurrent use.
//
// Context. Every method returns within its context, also while the network is silent: within 50 ms of the end of the
// context, whatever the client library below does with deadlines. A method never needs its context after it returned.
//
// Deadline. A grant is valid until SentAt + TTL − margin, where margin is 1 % of the TTL + 50 ms + Description.Margin
// (see Validity). SentAt is read from the driver's Clock before the first byte of the request on which the validity
// rests leaves the process. An instant read later, at the receipt of the answer for example, would promise time that
// the service never granted.
//
// Loss. Only an authoritative "not yours" is a loss (NotHeldError); a transport fault is not. After a driver reported
// a grant as not held, that grant is dead for ever.
//
// Identity. Request.RequestID is the key of one attempt to hold one lock: at least 128 random bits, made anew for every
// attempt, known to the client that made it and to the service, and to nobody else. Whoever presents it moves the hold;
// so it is compared whole, never by prefix and never through a hash shorter than itself, and nothing that looks at
// locks (State, Change, HeldError, logs) ever shows it. What they show is Request.HoldID, which moves nothing. Owner is
// text for people and decides nothing.
//
// One attempt, one key. The core never acquires again with a RequestID for which a Release has been sent, so that a
// Release that is delivered late can only meet the attempt it was sent for.
//
// Ambiguity. A timeout, a reset or a lost reply after the request left the process is resolved by reading back or by
// trying again with the same RequestID. What cannot be resolved within the context is answered with an error that
// wraps ErrUnknown; the core then calls Release for that RequestID in the background until it knows. A request that is
// delivered late, after its caller gave up, must not close the name for longer than one TTL. Silent retries of the
// client library are switched off, or made idempotent.
//
// Waiting is push: the driver watches its predecessor or receives a notification and never polls tightly; every push
// has a jittered poll as fallback, because notifications get lost. A configuration that nothing can be pushed through
// says so in Description.Polling, and its waiters poll. One release wakes at most one waiter of a queue. A waiter
// watches its own entry too, and proves before it reports a grant that its entry and its session live. A cancelled
// waiter is out of the queue within 500 ms. Where CapFair is declared, grants are FIFO by arrival, nobody barges, and
// an attempt without Wait does not barge either.
//
// Tokens are allocated in the same atomic step that grants, not in a step before or after it.
//
// Renewals never shorten. A renewal sets the end of the hold in the service to the later of what it is and now + TTL.
// Hence a renewal that is delivered late, or whose answer is lost, changes nothing for the worse.
//
// History. A service that has forgotten what it acknowledged (wiped, restored from a backup, another cluster behind the
// same address) is noticed by every driver that lived through it, wherever the service gives a sign: a cluster id, a
// term, a revision, a zxid that fell or changed. From then on every hold of the driver is lost with ReasonHistoryLost,
// and every acquire is refused with ErrHistoryLost, until the driver is made anew.
//
// Time. No driver trusts the client's wall clock for anything the service enforces; TTLs travel as durations. The
// driver owns the clock (Description.Clock), and the core measures with the same one.
//
// Names. Every name that passes ValidateName is accepted; the driver escapes injectively, so that no two names meet on
// one key. Foreign entries beside ours never break a driver.
//
// Capabilities are declared per configuration in Description.Capabilities, and proved both ways: a declared one works,
// an undeclared one answers ErrUnsupported and changes nothing.
//
// Errors keep their cause in the chain (%w), say which call on which name failed (CallError) and map to the sentinels
// of this package. Contended, deadline, lost, unavailable, unknown and unsupported are six different answers. The
// context's own error always stays in the chain.
//
// Kinds do not mix. Exclusive and shared holds belong together; using a name for permits that is in use otherwise, or
// the other way round, or with another Limit than its current holders and waiters, is ErrLimitMismatch, not undefined.
//
// Leftovers. After Close nothing remains: no goroutine, no key, no session, no connection that the driver opened.
//
// # Wrapping
//
// A wrapper around a Driver offers Unwrap() Driver, and the optional interfaces are then found through it with As. The
// fencing promise is never inherited, neither through Unwrap nor by embedding: IssuesFencingTokens returns the driver
// that promises, and the core refuses a driver whose promise is somebody else's.
package backend

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Driver talks to one lock service. The clauses in the package comment hold for every method.
type Driver interface {
	// Describe returns the driver's name, capabilities and bounds. It does no I/O and is cheap enough to be called on
	// every acquire. What only a probe can tell (a server that is not durable) may change the answer after the probe.
	Describe() Description

	// Acquire takes the lock that r describes.
	//
	// With r.Wait unset it makes one attempt: held by somebody else is an error that wraps ErrHeld, a *HeldError with
	// the holder where the service tells. With r.Wait set it waits until it holds the lock or ctx ends; the error then
	// wraps ctx.Err(), and the wait leaves nothing behind.
	//
	// Acquire is idempotent by r.RequestID: if that request holds the lock already, the answer is that same hold with
	// the same token and a fresh validity, never a second hold and never ErrHeld. The later grant may replace the earlier
	// one; a Release with the replaced grant may answer ErrNotHeld.
	//
	// If the service cannot be reached and nothing was sent, the error wraps ErrUnavailable; if something may have
	// been done that could not be undone or resolved, ErrUnknown.
	Acquire(ctx context.Context, r Request) (Grant, error)

	// Renew prolongs every grant to a full Grant.TTL and answers one Renewal per grant, in order. It costs a number of
	// round trips that does not grow with the number of grants. It never creates what it does not find: an entry that
	// is gone is a loss (Renewal.Err wraps ErrNotHeld, a *NotHeldError with the reason). A transport fault is reported
	// as ErrUnavailable or ErrUnknown and is no loss.
	//
	// A driver whose service has sessions keeps its session alive by itself while a holder or a waiter depends on it;
	// its Renew reports the send time of the last keepalive that was confirmed, and forces a new one when that is
	// older than a third of the TTL.
	Renew(ctx context.Context, grants []Grant) []Renewal

	// Release gives the hold back. It compares the request id and the incarnation (token, create revision, …), never
	// the name alone. Releasing what is no longer held is an error that wraps ErrNotHeld, and changes nothing.
	//
	// A Grant that is made by Request.Grant, without token and incarnation, names what one request may have left: its
	// hold or its place in the queue. Release then removes whichever exists.
	//
	// With Grant.MinHoldUntil in the future, the name stays closed until that instant although nobody holds it.
	Release(ctx context.Context, g Grant) error

	// Close releases the driver's own resources and ends its waiters with ErrClosed. It does not close a client that
	// the caller handed in, and does not release holds: the core has done so before. Calls after Close answer
	// ErrClosed. Close is idempotent.
	Close(ctx context.Context) error
}

// FencingDriver is a Driver whose every exclusive Grant carries a Token greater than that of every earlier grant of the
// same name: across release, expiry, crash, restart, failover, and deletion of everything that the driver keeps.
//
// The promise is this type: fencelock.ForCorrectness accepts nothing else. Description.Capabilities must carry
// CapFencing too; a configuration that cannot keep the promise (a server without durable storage) leaves CapFencing out
// and issues zero tokens, and the correctness tier refuses it at startup.
type FencingDriver interface {
	Driver

	// IssuesFencingTokens is the promise, and the conformance suite tests it. It returns its own receiver: the driver
	// that promises. A wrapper that embeds a driver would otherwise promise what it has never heard of; the correctness
	// tier refuses a driver for which IssuesFencingTokens returns another one.
	IssuesFencingTokens() Driver
}

// Request is one wish for a lock, resolved and validated by the core.
type Request struct {
	// Name of the lock: see ValidateName.
	Name string

	// Owner tells people who holds the lock, such as host/pid/random. At most 256 bytes of valid UTF-8 without control
	// characters. It decides nothing.
	Owner string

	// RequestID is the secret key of this attempt: 16 to 128 characters of A–Z a–z 0–9 - _ with at least 128 random
	// bits, see NewRequestID. A driver may use it unescaped. It is never shown to anybody.
	RequestID string

	// HoldID names the hold to people, logs and other clients: 1 to 64 characters of A–Z a–z 0–9 - _. It is stored
	// beside the hold and shown as Holder.HoldID and HeldError.HoldID; it decides nothing, and two holds may have the
	// same one.
	HoldID string

	// Fresh says that RequestID was made for this call and never sent before, so that the driver may skip looking for
	// an earlier hold of it. The zero value is always right.
	Fresh bool

	// TTL is how long the hold lives without renewal; within Description's range and granularity.
	TTL time.Duration

	// Wait: wait until granted. Unset: one attempt.
	Wait bool

	// Kind of hold. The zero value is Exclusive.
	Kind Kind

	// Permits and Limit belong to KindPermits: take Permits of Limit, 1 ≤ Permits ≤ Limit. Zero otherwise.
	Permits, Limit int

	// Hierarchical: the name is a path whose steps end with "/", and the hold counts for all that lies below it. It
	// excludes what its kind excludes on the name itself, on every ancestor and on everything below, among hierarchical
	// requests: "a/b" exclusively keeps out "a" and "a/b/c" of either kind, while "a/c" is free. A name is used with or
	// without it, never both: ErrLimitMismatch. Not for KindPermits. Needs CapHierarchy.
	Hierarchical bool

	// Under are the RequestIDs of the live holds under which the request is made: the work that waits keeps them until
	// it has been granted. A driver with CapDeadlock refuses a waiting request that would close a cycle: a hold or a
	// waiter that blocks it is one of Under, or itself waits through one of them. Two requests under one hold that want
	// the same name wait for each other like strangers. At most MaxUnder ids; empty: nothing is held meanwhile.
	Under []string

	// MinHold keeps the name closed for at least that long after the grant, also when the holder releases earlier or
	// dies. Zero: no minimum. Needs CapMinHold.
	MinHold time.Duration

	// Metadata is stored beside the hold and shown to those who look. Needs CapMetadata when not empty.
	Metadata map[string]string

	// Lost, if not nil, is called when the driver learns by itself that the granted hold is gone: a session expired, a
	// watched entry was deleted. It may be called from any goroutine, more than once and before Acquire has returned,
	// and never blocks. A callback, and not a channel in Grant, because watching 10,000 channels takes 10,000
	// goroutines. Drivers that declare CapPushLoss call it within one second of the loss; others need not.
	Lost func(Reason)
}

// Grant returns the grant that names whatever r may have left in the service: the argument for Driver.Release after an
// ambiguous outcome.
func (r Request) Grant() Grant {
	return Grant{
		Name: r.Name, Owner: r.Owner, RequestID: r.RequestID, HoldID: r.HoldID,
		Kind: r.Kind, Permits: r.Permits, Limit: r.Limit, Hierarchical: r.Hierarchical, TTL: r.TTL,
	}
}

// Grant is one hold, as the driver granted it. It is a value: the core keeps it and hands it back to Renew and Release.
type Grant struct {
	Name      string
	Owner     string
	RequestID string // the secret key of the hold: never log a Grant whole
	HoldID    string // what may be logged

	Kind           Kind
	Permits, Limit int
	Hierarchical   bool

	// Token fences writes. Zero if the driver does not fence. For a Kind other than Exclusive it is marked as not
	// exclusive (fencing.Token.Exclusive).
	Token fencing.Token

	// TTL granted. It may be longer than what was asked for if the service rounds up, never shorter.
	TTL time.Duration

	// SentAt is the instant, on the driver's clock, just before the first byte of the request or renewal on which this
	// validity rests was sent.
	SentAt Instant

	// Queued says that the request found the name taken and waited for it. It feeds observers only.
	Queued bool

	// MinHoldUntil is the instant until which the name stays closed, zero without a minimum.
	MinHoldUntil Instant

	// Incarnation is the driver's own mark of this hold (a create revision, a czxid, a nonce). Opaque to the core.
	Incarnation string
}

// Renewal is the outcome of renewing one grant.
type Renewal struct {
	// SentAt is the instant just before the request that proved the hold was sent. Valid only if Err is nil.
	SentAt Instant
	// TTL granted from SentAt. Valid only if Err is nil.
	TTL time.Duration
	// Err is nil if renewed; wraps ErrNotHeld on a loss; anything else is a fault that says nothing about the hold.
	Err error
}

// Kind says what a hold excludes.
type Kind uint8

const (
	// KindExclusive excludes every other hold of the name. It is the only kind that fencing tokens protect.
	KindExclusive Kind = iota
	// KindShared excludes exclusive holds only. A waiting exclusive request stops new shared holds. Needs CapShared.
	KindShared
	// KindPermits takes some of a limited number of permits. Needs CapPermits.
	KindPermits
)

// String returns "exclusive", "shared" or "permits".
func (k Kind) String() string {
	switch k {
	case KindExclusive:
		return "exclusive"
	case KindShared:
		return "shared"
	case KindPermits:
		return "permits"
	}
	return "unknown kind"
}
