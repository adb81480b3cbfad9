// Package backend is the contract between the fencelock core and its drivers. It can be read alone: the author of a
// driver needs only this package, package fencing and the conformance suite. Package backend/kit has the parts that
// drivers share.
//
//	locks.Acquire ─► core ─ Request ─► Driver.Acquire ─► lock service
//	lease.Context ◄─ core ◄─ Grant{Token, SentAt, TTL} ◄────┘
//
// A driver translates requests into the atomic steps of one lock service. It keeps no time and makes no decision about
// loss: the core alone schedules renewals and declares a hold lost, from the instants that the driver reports. So
// drivers need no timers, retries or margins for renewals and losses. The obligations of the driver are documented at
// each method below. The conformance suite (package conformance) numbers these obligations and prints each obligation
// that a driver breaks.
//
// # The life of a hold
//
//  1. The core makes a Request with a new random RequestID and calls Acquire. The driver answers with a Grant, or with
//     an error that shows whether the request may have left state in the service.
//  2. The core checks that the grant is still valid. In the correctness tier it also checks the token: its kind, and
//     that it is greater than the earlier tokens of the name. The hold is valid until SentAt + Validity(TTL). The core
//     releases a grant that it does not accept.
//  3. At about a third of that time the core calls Renew, for up to a thousand grants together, and repeats the call
//     until it is confirmed. Each confirmation moves the end of the validity, never backwards.
//  4. The hold ends by Release, by an authoritative "not held" from the service, or because its validity ran out. In
//     the last case, too, the core calls Release: the service may still have the entry.
//  5. An acquire or a release with an unknown outcome is followed by Release in the background, until the service has
//     answered or can no longer have the entry.
//  6. At the end the core releases all holds and calls Close.
//
// # Answers
//
// Errors are matched with errors.Is, so a driver may wrap them as it likes. Of Acquire:
//
//   - ErrHeld, ErrQueueFull, ErrDeadlock, ErrLimitMismatch, ErrUnsupported, ErrMisconfigured, ErrDenied,
//     ErrUnavailable, ErrClosed, the ErrInvalid sentinels, and the bare error of a context mean that no entry was left
//     in the service. They go to the caller, without a cleanup.
//   - ErrUnknown means that an entry may have been left. So does an error that wraps no sentinel: an unclassified
//     error is treated as unknown for safety. The core calls Release with Request.Grant in the background.
//   - ErrHistoryLost ends every hold of the client with ReasonHistoryLost and refuses all acquires from then on.
//
// Of Renew, for each grant: ErrNotHeld and ErrHistoryLost end the hold immediately. Any other error is a fault; the
// core retries until the validity runs out.
//
// Of Release: nil completes the release, and so does ErrNotHeld, except after an ambiguous acquire, which may still
// arrive: then the core repeats the call until a TTL has passed. After a permanent error (ErrUnsupported,
// ErrInvalidName, ErrClosed, …) the core drops the release, with an event for the observer. After any other error it
// retries with growing pauses and without end, since a refusal may be temporary.
//
// # Clauses that hold for every method
//
// Concurrency. All methods of a Driver are safe for concurrent use. The core calls Renew concurrently for different
// grants, but never has two Renew calls in flight for one grant. It may call Release for a grant while a Renew that
// contains the grant is in flight.
//
// Context. Every method returns within its context, even while the network does not respond: within 50 ms of the end
// of the context, whatever deadlines the client library uses. Most libraries honour deadlines and ignore
// cancellation, so the driver has to leave the request behind and let it end on its own. A method never needs its
// context after it has returned.
//
// Deadline. A grant is valid until SentAt + TTL − margin, where margin is 1 % of the TTL + 50 ms + Description.Margin
// (see Validity). SentAt is read from the driver's Clock before the first byte of the request that proves the
// validity leaves the process. An instant read later, at the receipt of the answer for example, would promise time
// that the service never granted: the service counts from the receipt of the request, and the answer may take any
// time.
//
// Loss. Only an authoritative "not yours" is a loss (NotHeldError); a transport fault is not. A grant that the driver
// has reported as not held stays lost.
//
// Identity. Request.RequestID is the key of one attempt to hold one lock: at least 128 random bits, new for
// every attempt, known only to the client that made it and to the service. Presenting it is enough to release or
// renew the hold. So it is compared whole, never by prefix and never through a hash shorter than itself, and no
// inspection (State, Change, HeldError, logs) ever shows it. Inspections show Request.HoldID, which gives no power
// over the hold. Owner is text for people only.
//
// One attempt, one key. The core never acquires again with a RequestID for which a Release has been sent, so that a
// late Release can only meet its own attempt.
//
// Ambiguity. A timeout, a reset or a lost reply after the request left the process is resolved by reading back or by
// retrying with the same RequestID. If the outcome cannot be resolved within the context, the driver returns an error
// that wraps ErrUnknown; the core then calls Release for that RequestID in the background until it knows. A request
// that is delivered late, after its caller has returned, must not close the name for longer than one TTL. Hidden
// retries of the client library are switched off, or made idempotent. (This loop is in the core, and not in each
// driver, because Close has to wait for it: see docs/decisions, the-core-cleans-up.)
//
// Waiting is push: the driver watches its predecessor or receives a notification and never polls tightly. Every push
// has a jittered poll as fallback, because notifications get lost. A configuration without push declares
// Description.Polling, and its waiters poll. One release wakes at most one waiter of a queue. A waiter watches its own
// entry too, and proves before it reports a grant that its entry and its session live. A cancelled waiter is out of
// the queue within 500 ms. Where CapFair is declared, grants are FIFO by arrival: no waiter and no attempt without
// Wait overtakes another.
//
// Tokens are allocated in the same atomic step that grants, not in a step before or after it. With two steps, two
// grants can take effect in one order and be numbered in the other.
//
// Renewals never shorten. A renewal sets the end of the hold in the service to the later of its current end and now +
// TTL. Hence a late renewal, or a lost answer, does no harm, and the core may rely on the latest confirmation.
//
// History. Every driver that was running when a service lost acknowledged state (wiped, restored from a backup,
// another cluster behind the same address) detects that, wherever the service gives a sign: a cluster id, a term, a
// revision, a zxid that fell or changed. From then on every hold of the driver is lost with ReasonHistoryLost, and
// every acquire returns ErrHistoryLost, until the program creates a new driver.
//
// Time. No driver uses the client's wall clock for a time that the service enforces; TTLs travel as durations. The
// driver owns the clock (Description.Clock), and the core measures with the same clock, so that driver and core cannot
// disagree about the time.
//
// Names. Every name that passes ValidateName is accepted; the driver escapes injectively, so that no two names share
// one key. Foreign entries beside ours never break a driver.
//
// Capabilities are declared per configuration in Description.Capabilities, and tested both ways: a declared
// capability works, an undeclared one returns ErrUnsupported without side effects.
//
// Errors keep their cause in the chain (%w), name the failed call and its lock (CallError) and map to the sentinels of
// this package. Contended, deadline, lost, unavailable, unknown and unsupported are six different answers. The
// context's own error always stays in the chain.
//
// Kinds do not mix. Exclusive and shared holds belong together. Using a name for permits while it is in use otherwise,
// or the other way round, or with another Limit than its current holders and waiters, is ErrLimitMismatch, not
// undefined.
//
// Leftovers. After Close no goroutine, key, session or connection of the driver remains.
//
// # Wrapping
//
// A wrapper around a Driver offers Unwrap() Driver, and the optional interfaces are then found through it with As. The
// fencing promise is never inherited, neither through Unwrap nor by embedding: IssuesFencingTokens returns the driver
// that promises, and the core refuses a wrapper that returns the driver inside it.
package backend

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Driver talks to one lock service. The clauses in the package comment hold for every method.
//
// The smallest driver has these five methods and declares no capability; it serves the efficiency tier with exclusive
// locks. Package backend/engine implements them over a binding; examples/newdriver is a driver with fencing to copy.
//
// An attempt without Wait, on a service with one atomic step that acquires a free name:
//
//	func (d *Driver) attempt(ctx context.Context, r backend.Request) (backend.Grant, error) {
//		sent := d.clock.Now() // before the first byte leaves, not when the answer comes
//		token, holder, err := d.service.Take(ctx, r.Name, r.RequestID, r.TTL)
//		switch {
//		case errors.Is(err, service.ErrNoConnection): // the request was not sent
//			return backend.Grant{}, fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
//		case err != nil: // sent, and no answer: the core releases it
//			return backend.Grant{}, fmt.Errorf("%w: %w", backend.ErrUnknown, err)
//		case holder != "":
//			return backend.Grant{}, &backend.HeldError{Name: r.Name, Holder: holder}
//		}
//		g := r.Grant()
//		g.Token, g.SentAt = token, sent
//		return g, nil
//	}
type Driver interface {
	// Describe returns the driver's name, capabilities and bounds.
	//
	// The core calls it several times in every acquire and renewal, so it does no I/O, does not block, and is cheap.
	// It may be called before the service was ever reached and after Close. A probe may change the result (a server
	// that is not durable): the core checks it again with every grant, and refuses a grant for which the promise
	// could not be kept.
	Describe() Description

	// Acquire takes the lock that r describes.
	//
	// The core has validated r against Describe and made its RequestID. It bounds the call with ctx only, and calls
	// Acquire once for each RequestID; after an error it calls Release with r.Grant if anything may have been left.
	//
	// With r.Wait unset the driver makes one attempt. If another request holds the lock, the error wraps ErrHeld: a
	// *HeldError with the holder if the service returns it. With r.Wait set the driver waits until it holds the lock
	// or ctx ends; the error then wraps ctx.Err(), and the driver removes the waiter from the service.
	//
	// Acquire is idempotent by r.RequestID: if that request holds the lock already, the answer is that same hold with
	// the same token and a fresh validity, never a second hold and never ErrHeld. The core does not repeat a call; a
	// gateway with replicas that share requests does, and so does the driver itself after a lost reply. The later grant
	// may replace the earlier one; a Release with the replaced grant may answer ErrNotHeld.
	//
	// If the service cannot be reached and the request was not sent, the error wraps ErrUnavailable. If the service
	// may have acted, and that could not be undone or resolved within ctx, it wraps ErrUnknown. A driver that returns
	// ErrUnavailable after it sent the request closes the name for a TTL, because the core does not clean up.
	//
	// When the answer is lost the driver reads back, or repeats the request with the same RequestID, for as long as
	// ctx lives: the service then returns the existing hold, or grants it now. ErrHeld after a broken connection is
	// wrong unless the driver has seen that the holder is another request.
	Acquire(ctx context.Context, r Request) (Grant, error)

	// Renew prolongs every grant to a full Grant.TTL and answers one Renewal per grant, in order.
	//
	// The core passes the grants that are due together, at most a thousand, with the current length as Grant.TTL,
	// which Extend may have changed since the grant. ctx ends after a third of the remaining time to their nearest
	// deadline, and after at most five seconds, so that a call that hangs leaves time for another. If the driver
	// returns fewer renewals than grants, the missing ones count as faults.
	//
	// The number of round trips does not grow with the number of grants. Renew never creates a missing entry. A
	// missing entry is a loss (Renewal.Err wraps ErrNotHeld, a *NotHeldError with the reason), even if the name is
	// free and could be acquired again: another holder may have come and gone, and its token was greater. A transport
	// fault is reported as ErrUnavailable or ErrUnknown and is no loss.
	//
	// A lost answer does no harm: renewals never shorten, and the core keeps the last confirmed deadline and retries.
	//
	// A driver with sessions keeps its session alive while a holder or a waiter depends on it; its Renew returns the
	// send time of the last confirmed keepalive, and forces a new keepalive when that is older than a third of the
	// TTL.
	//
	// A service with a step for many entries needs one round trip:
	//
	//	func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	//		out := make([]backend.Renewal, len(grants))
	//		sent := d.clock.Now()
	//		alive, err := d.service.ProlongAll(ctx, keysOf(grants))
	//		for i, g := range grants {
	//			switch {
	//			case err != nil: // a fault, and no loss
	//				out[i].Err = kit.CallError("myservice", "renew", g.Name, err, classOf)
	//			case !alive[i]: // the service has said so
	//				lost := &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonEvicted}
	//				out[i].Err = kit.CallError("myservice", "renew", g.Name, lost, classOf)
	//			default:
	//				out[i] = backend.Renewal{SentAt: sent, TTL: g.TTL}
	//			}
	//		}
	//		return out
	//	}
	Renew(ctx context.Context, grants []Grant) []Renewal

	// Release ends the hold.
	//
	// It compares the request id and the incarnation (token, create revision, …), never the name alone: the name may
	// belong to a successor. If the hold has already ended, the error wraps ErrNotHeld, and the service stays
	// unchanged. ErrUnavailable and ErrUnknown both make the core repeat the call, so the difference matters to people
	// only.
	//
	// A Grant made by Request.Grant, without token and incarnation, names the possible leftover of one
	// request: its hold or its place in the queue. Release then removes either. The core sends it after an ambiguous
	// acquire, possibly before the acquire itself has arrived; it repeats it until one TTL has passed, since
	// ErrNotHeld does not rule out a late arrival.
	//
	// When the answer is lost the core repeats the call with the same grant. The repetition then returns ErrNotHeld, which
	// counts as success; it must not release a successor.
	//
	// Release abandons the hold, with any result: the driver no longer keeps it alive. If the service refuses the
	// release, the hold ends with its TTL although the client lives and other holds are renewed. A driver with
	// several holds on one session moves the others away, or lets the session end with them; see
	// kit.Sessions.Abandon. A call that ends with its own context may leave that to the repetition.
	//
	// Release and Renew do not depend on a health probe: a hold in a service that has become unfit is best kept and
	// released. They fail only with ErrHistoryLost.
	//
	// With Grant.MinHoldUntil in the future, the name stays closed until that instant although it is not held.
	Release(ctx context.Context, g Grant) error

	// Close releases the driver's own resources and ends its waiters with ErrClosed. It does not close a client that
	// the caller handed in, and does not release holds: the core has done so before.
	//
	// The core calls it once, when the last client that shares the driver closes, and waits for it until ctx ends. ctx
	// may have ended already: then Close does the steps that need no waiting and returns its error. Calls after Close
	// answer ErrClosed. Close is idempotent.
	Close(ctx context.Context) error
}

// FencingDriver is a Driver that issues fencing tokens: every exclusive Grant carries a Token greater than that of
// every earlier grant of the same name, across release, expiry, crash, restart, failover, and deletion of all data of
// the driver.
//
// The promise is this type: fencelock.ForCorrectness accepts only FencingDriver, so that a driver that cannot fence
// does not compile there. Description.Capabilities must have CapFencing too. A configuration that cannot keep the
// promise (a server without durable storage) leaves CapFencing out and issues zero tokens, and the correctness tier
// refuses it at startup. The type is checked at compile time; the capability depends on the server.
//
//	func (d *Driver) IssuesFencingTokens() backend.Driver { return d }
type FencingDriver interface {
	Driver

	// IssuesFencingTokens is the promise, and the conformance suite tests it. It returns its own receiver: the driver
	// that promises. Go promotes the method of an embedded driver, so a wrapper would otherwise make a promise that its
	// author never considered; the correctness tier refuses a driver for which IssuesFencingTokens returns another one.
	IssuesFencingTokens() Driver
}

// Request is one request for a lock, resolved and validated by the core: the name includes the namespace, the
// defaults are filled in, and undeclared capabilities were refused already. A driver called without the core
// validates with kit.Validate.
type Request struct {
	// Name of the lock: see ValidateName. With the client's namespace, so it is a key as it is.
	Name string

	// Owner names the holder for people, such as host/pid/random. At most MaxOwnerBytes of valid UTF-8 without
	// control characters. The driver stores it and returns it as Holder.Owner. It is for display only: two requests
	// with the same owner exclude each other.
	Owner string

	// RequestID is the secret key of this attempt: 16 to 128 characters of A–Z a–z 0–9 - _ with at least 128 random bits,
	// see NewRequestID. A driver may use it unescaped. It never appears in a log, in an error, or in the results of Look
	// and Watch.
	RequestID string

	// HoldID names the hold to people, logs and other clients: 1 to 64 characters of A–Z a–z 0–9 - _. It is stored
	// beside the hold and returned as Holder.HoldID and HeldError.HoldID. It is for display only, and two holds may
	// have the same HoldID: it is derived from the caller's request id if there is one, so that a restarted process
	// recognizes the hold of its predecessor.
	HoldID string

	// Fresh is set if RequestID was made for this call and never sent before, so that the driver may skip the search for
	// an earlier hold of it. The zero value is always right. It does not cover repetitions inside the driver: after a
	// lost reply there may be a hold.
	Fresh bool

	// TTL is the lifetime of the hold in the service without renewal; within Description's range and granularity. The
	// driver passes it on as a duration and never shortens it.
	TTL time.Duration

	// Wait: wait until granted, or until the context ends. Unset: one attempt.
	Wait bool

	// Kind of hold. The zero value is Exclusive. The others need CapShared or CapPermits.
	Kind Kind

	// Renews: the caller renews the hold immediately if its validity is shorter than a TTL, and ends it by
	// Description.Validity alone. The driver may then grant a waiter a hold that lives for a second, with the
	// corresponding SentAt. Unset: the hold has its TTL when Acquire returns.
	Renews bool

	// Permits and Limit belong to KindPermits: take Permits of Limit, 1 ≤ Permits ≤ Limit < 2^31. Zero otherwise. The
	// requests that use a name at one time agree in Limit; another one is ErrLimitMismatch.
	Permits, Limit int

	// Hierarchical: the name is a path of steps that end with "/", and the hold covers everything below it. Among
	// hierarchical requests it excludes the kinds that its own kind excludes, on the name itself, on every ancestor
	// and on everything below: "a/b" exclusively keeps out "a" and "a/b/c" of either kind, while "a/c" is free. A
	// name is used with or without it, never both: ErrLimitMismatch. Not for KindPermits. Needs CapHierarchy.
	Hierarchical bool

	// Under are the RequestIDs of the live holds under which the request is made: the waiting caller keeps them until
	// it has been granted. A driver with CapDeadlock refuses a waiting request that would close a cycle: a hold or a
	// waiter that blocks it is one of Under, or itself waits through one of them.
	//
	// Two requests under one hold that want the same name wait for each other like strangers: one of them will finish.
	// That is why the ids of holds are listed, and not the name of a line of work: by that name such siblings would look
	// like a cycle. At most MaxUnder ids. Empty: the caller holds no lock meanwhile, or the driver does not declare
	// CapDeadlock.
	Under []string

	// MinHold keeps the name closed for at least that long after the grant, even if the holder releases earlier or dies.
	// The service has to keep it; a timer in the client would not survive the client. Zero: no minimum. Needs CapMinHold.
	MinHold time.Duration

	// Metadata is stored beside the hold and returned by inspections, byte for byte. The driver neither changes nor
	// keeps the map. Needs CapMetadata when not empty.
	Metadata map[string]string

	// Lost, if not nil, is called when the driver detects that the granted hold is gone: a session expired, a watched
	// entry was deleted. It may be called from any goroutine, more than once and before Acquire has returned, and
	// never blocks. The core remembers a loss that comes before the grant.
	//
	// It is a callback, and not a channel in Grant, because watching 10,000 channels takes 10,000 goroutines, and
	// because a closed channel carries no reason (see docs/decisions, loss-is-pushed-by-callback). The core sets it
	// for drivers that declare CapPushLoss: they call it within one second of the loss. It is optional for other
	// drivers.
	Lost func(Loss)
}

// Grant returns the grant that names the possible leftover of r in the service: the argument for Driver.Release after
// an ambiguous outcome. It has no token, no incarnation and no SentAt. A driver that was granted r usually begins with
// it and fills in the rest.
func (r Request) Grant() Grant {
	return Grant{
		Name: r.Name, Owner: r.Owner, RequestID: r.RequestID, HoldID: r.HoldID,
		Kind: r.Kind, Permits: r.Permits, Limit: r.Limit, Hierarchical: r.Hierarchical, TTL: r.TTL,
	}
}

// Grant is one hold, as the driver granted it. It is a value: the core keeps it and passes it to Renew and Release,
// possibly from another goroutine, and changes only TTL (Extend), SentAt (a renewal) and MinHoldUntil (a hold that
// its caller never got needs no minimum; then token and incarnation are cleared too, and the grant names its request
// alone).
type Grant struct {
	// Name and Owner are from the request.
	Name  string
	Owner string
	// RequestID is the secret key of the hold. Never log a Grant whole.
	RequestID string
	// HoldID may be logged.
	HoldID string

	// Kind, Permits, Limit and Hierarchical are from the request.
	Kind           Kind
	Permits, Limit int
	Hierarchical   bool

	// Token fences writes. Zero if the driver does not fence. For a Kind other than Exclusive it is marked as not
	// exclusive (fencing.Token.Exclusive): such holds do not keep other writers out. It stays the same for the life of
	// the hold, however often it is renewed or the request is repeated.
	Token fencing.Token

	// Nonce is 128 random bits that the driver draws for each new hold (fencing.NewNonce) and stores with it. A repeat of
	// the request returns the nonce of the hold that it finds; a new hold never has the nonce of an earlier one. It is
	// public and grants no right: guards use it to distinguish two holds with the same token, ForceRelease to name the
	// hold that it ends.
	Nonce fencing.Nonce

	// Generation of the service that issued Token: see fencing.Generation. Zero for a service that records no restores.
	Generation fencing.Generation

	// TTL granted, counted from SentAt. It may be longer than requested if the service rounds up, never shorter. In a
	// grant passed to Renew it is the requested new length.
	TTL time.Duration

	// SentAt is the instant, on the driver's clock, just before the first byte of the request or renewal that proves
	// this validity was sent. For a wait it is the last request that proved the entry, not the request that joined
	// the queue. Zero is a bug of the driver: the grant is over on arrival, and the core refuses it by name after
	// three in a row.
	SentAt Instant

	// Queued is set if the request found the name taken and waited for it. It feeds observers only; a driver that does
	// not know leaves it unset.
	Queued bool

	// MinHoldUntil is the instant until which the name stays closed, on the driver's clock; zero without a minimum.
	MinHoldUntil Instant

	// Incarnation is the driver's own mark of this hold (a create revision, a czxid, a nonce). Opaque to the core. With
	// it a Release of an earlier hold of the same request does not end a later one. Empty in the grant of
	// Request.Grant.
	Incarnation string
}

// Renewal is the outcome of renewing one grant. The zero value prolongs no hold, since its SentAt is the instant
// zero.
type Renewal struct {
	// SentAt is the instant just before the request that proved the hold was sent. It may be older than the call: a
	// session's keepalive proves all holds of the session. Valid only if Err is nil.
	SentAt Instant
	// TTL granted from SentAt, no shorter than Grant.TTL of the argument unless Last is set. Valid only if Err is nil.
	TTL time.Duration
	// Last is set if the service does not extend the hold beyond SentAt + TTL: a policy bounds how long it may last. The
	// core no longer renews it, except by Extend, and declares it lost with ReasonMaxHold at its deadline, which lies
	// before that instant by the margin of every hold. Valid only if Err is nil.
	Last bool
	// Err is nil if renewed. It wraps ErrNotHeld on a loss, with the reason in a *NotHeldError; ErrHistoryLost if the
	// service has lost its history. Any other error is a fault: the hold may still exist.
	Err error
}

// Kind is the kind of a hold, which determines the kinds that it excludes.
//
// Two holds of one name may coexist as follows:
//
//	            exclusive   shared     permits
//	exclusive   no          no         mismatch
//	shared      no          yes        mismatch
//	permits     mismatch    mismatch   while their sum fits the common limit
//
// A mismatch is ErrLimitMismatch for the later of the two.
type Kind uint8

const (
	// KindExclusive excludes every other hold of the name. It is the only kind that fencing tokens protect: a resource
	// that admits the greatest token only cannot serve two concurrent writers.
	KindExclusive Kind = iota
	// KindShared excludes exclusive holds only. A waiting exclusive request stops new shared holds, so that
	// successive readers cannot starve a writer. Needs CapShared.
	KindShared
	// KindPermits takes some of a limited number of permits, and excludes requests for more than is left. Needs
	// CapPermits.
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
