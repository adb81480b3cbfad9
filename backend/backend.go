// Package backend is the contract between the fencelock core and its drivers. It can be read alone: the author of a
// driver needs this package, package fencing and the conformance suite, and nothing else of the project. Package
// backend/kit has the parts that every driver would otherwise write again.
//
//	locks.Acquire ─► core ─ Request ─► Driver.Acquire ─► lock service
//	lease.Context ◄─ core ◄─ Grant{Token, SentAt, TTL} ◄────┘
//
// A driver translates requests into the atomic steps of one lock service. It keeps no time and makes no decision about
// loss: the core alone schedules renewals, and the core alone declares a hold lost, from the instants that the driver
// reports. Drivers that watched their own deadlines would each need timers, retries and a margin, and would get them
// wrong one by one. What the driver owes is written at each method below. The conformance suite (package conformance)
// numbers these obligations and prints the one that a driver breaks.
//
// # The life of a hold
//
//  1. The core makes a Request with a new random RequestID and calls Acquire. The driver answers with a Grant, or with
//     an error that says whether anything may have been left in the service.
//  2. The core checks the grant (whether its validity is over already; in the correctness tier also its token, and what
//     was granted before) and believes in it until SentAt + Validity(TTL). A grant that it does not accept goes back
//     with Release.
//  3. At about a third of that time the core calls Renew, for up to a thousand grants at once, and again until it is
//     confirmed. Each confirmation moves the end of belief, never backwards.
//  4. The hold ends by Release, by an authoritative "not held" from the service, or because the belief ran out. In the
//     last case, too, the core calls Release: the service may still have the entry.
//  5. An acquire or a release whose outcome is unknown is followed by Release in the background, until the service has
//     answered or can no longer have the entry.
//  6. At the end the core gives everything back and calls Close.
//
// # What the core does with an answer
//
// Errors are matched with errors.Is, so a driver may wrap them as it likes. Of Acquire:
//
//   - ErrHeld, ErrDeadlock, ErrLimitMismatch, ErrUnsupported, ErrMisconfigured, ErrUnavailable, ErrClosed, the
//     ErrInvalid sentinels, and the bare error of a context mean that nothing was left in the service. They go to the
//     caller, and nothing is cleaned up.
//   - ErrUnknown means that something may have been left. So does an error that wraps none of the sentinels: the safe
//     reading of an answer that nobody classified. The core calls Release with Request.Grant in the background.
//   - ErrHistoryLost ends every hold of the client with ReasonHistoryLost and refuses all acquires from then on.
//
// Of Renew, for each grant: ErrNotHeld and ErrHistoryLost end the hold at once. Everything else is a fault; the core
// asks again until the belief runs out.
//
// Of Release: nil is the end of the matter, and so is ErrNotHeld, except after an ambiguous acquire, which may still
// arrive: then the core asks until a TTL has passed. An error that would be the same next time (ErrUnsupported,
// ErrMisconfigured, ErrClosed, …) is given up and reported to the observer. Everything else is tried again, ever more
// seldom, until a minute after the TTL.
//
// # Clauses that hold for every method
//
// Concurrency. All methods of a Driver are safe for concurrent use. The core calls Renew for different grants at the
// same time, and Release for a grant while a Renew that contains it is in flight; it never has two Renew calls in
// flight for one grant.
//
// Context. Every method returns within its context, also while the network is silent: within 50 ms of the end of the
// context, whatever the client library below does with deadlines. Most libraries honour deadlines and ignore
// cancellation, so the driver has to leave the request behind and let it end by itself. A method never needs its
// context after it has returned.
//
// Deadline. A grant is valid until SentAt + TTL − margin, where margin is 1 % of the TTL + 50 ms + Description.Margin
// (see Validity). SentAt is read from the driver's Clock before the first byte of the request on which the validity
// rests leaves the process. An instant read later, at the receipt of the answer for example, would promise time that
// the service never granted: the service counts from the receipt of the request, and the answer may take any time.
//
// Loss. Only an authoritative "not yours" is a loss (NotHeldError); a transport fault is not. After a driver has
// reported a grant as not held, that grant is dead for ever.
//
// Identity. Request.RequestID is the key of one attempt to hold one lock: at least 128 random bits, made anew for every
// attempt, known to the client that made it and to the service, and to nobody else. Presenting it is enough to move the
// hold. So it is compared whole, never by prefix and never through a hash shorter than itself, and nothing that looks
// at locks (State, Change, HeldError, logs) ever shows it. What they show is Request.HoldID, which moves nothing. Owner
// is text for people and decides nothing.
//
// One attempt, one key. The core never acquires again with a RequestID for which a Release has been sent, so that a
// Release that is delivered late can only meet the attempt that it was sent for.
//
// Ambiguity. A timeout, a reset or a lost reply after the request left the process is resolved by reading back or by
// trying again with the same RequestID. What cannot be resolved within the context is answered with an error that wraps
// ErrUnknown; the core then calls Release for that RequestID in the background until it knows. A request that is
// delivered late, after its caller gave up, must not close the name for longer than one TTL. Silent retries of the
// client library are switched off, or made idempotent. (The loop stands in the core, and not in each driver, because
// Close has to wait for all of it in one place: see docs/decisions, the-core-cleans-up.)
//
// Waiting is push: the driver watches its predecessor or receives a notification and never polls tightly. Every push
// has a jittered poll as fallback, because notifications get lost. A configuration through which nothing can be pushed
// says so in Description.Polling, and its waiters poll. One release wakes at most one waiter of a queue. A waiter
// watches its own entry too, and proves before it reports a grant that its entry and its session live. A cancelled
// waiter is out of the queue within 500 ms. Where CapFair is declared, grants are FIFO by arrival: no waiter and no
// attempt without Wait overtakes another.
//
// Tokens are allocated in the same atomic step that grants, not in a step before or after it. With two steps, two
// grants can be carried out in one order and numbered in the other.
//
// Renewals never shorten. A renewal sets the end of the hold in the service to the later of what it is and now + TTL.
// Hence a renewal that is delivered late, or whose answer is lost, changes nothing for the worse, and the core may take
// the latest proof for the truth.
//
// History. A service that has forgotten what it acknowledged (wiped, restored from a backup, another cluster behind the
// same address) is noticed by every driver that lived through it, wherever the service gives a sign: a cluster id, a
// term, a revision, a zxid that fell or changed. From then on every hold of the driver is lost with ReasonHistoryLost,
// and every acquire is refused with ErrHistoryLost, until the program creates a new driver.
//
// Time. No driver trusts the client's wall clock for anything that the service enforces; TTLs travel as durations. The
// driver owns the clock (Description.Clock), and the core measures with the same one, so that there is no way to build
// a client whose two halves disagree about the time.
//
// Names. Every name that passes ValidateName is accepted; the driver escapes injectively, so that no two names share
// one key. Foreign entries beside ours never break a driver.
//
// Capabilities are declared per configuration in Description.Capabilities, and proved both ways: a declared one works,
// an undeclared one answers ErrUnsupported and changes nothing.
//
// Errors keep their cause in the chain (%w), say which call on which name failed (CallError) and map to the sentinels
// of this package. Contended, deadline, lost, unavailable, unknown and unsupported are six different answers. The
// context's own error always stays in the chain.
//
// Kinds do not mix. Exclusive and shared holds belong together. Using a name for permits while it is in use otherwise,
// or the other way round, or with another Limit than its current holders and waiters, is ErrLimitMismatch, not
// undefined.
//
// Leftovers. After Close nothing remains: no goroutine, no key, no session, no connection that the driver opened.
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
// locks. examples/newdriver is one that fences, in a few hundred lines, to copy.
//
// What an attempt without Wait looks like, on a service with one atomic step that takes a free name:
//
//	func (d *Driver) attempt(ctx context.Context, r backend.Request) (backend.Grant, error) {
//		sent := d.clock.Now() // before the first byte leaves, not when the answer comes
//		token, holder, err := d.service.Take(ctx, r.Name, r.RequestID, r.TTL)
//		switch {
//		case errors.Is(err, service.ErrNoConnection): // nothing was sent
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
	// The core calls it several times in every acquire and renewal, so it does no I/O, waits for nothing, and is cheap.
	// It may be called before the service was ever reached and after Close. What only a probe can tell (a server that
	// is not durable) may change the answer after the probe: the core looks again at every grant, and refuses one that
	// came when the promise could no longer be kept.
	Describe() Description

	// Acquire takes the lock that r describes.
	//
	// The core has validated r against Describe and made its RequestID. It bounds the call with ctx only, and calls
	// Acquire once for each RequestID; after an error it calls Release with r.Grant if anything may have been left.
	//
	// With r.Wait unset the driver makes one attempt. A lock that is held by another request is an error that wraps
	// ErrHeld, a *HeldError with the holder where the service tells. With r.Wait set the driver waits until it holds
	// the lock or ctx ends; the error then wraps ctx.Err(), and the wait leaves nothing behind.
	//
	// Acquire is idempotent by r.RequestID: if that request holds the lock already, the answer is that same hold with
	// the same token and a fresh validity, never a second hold and never ErrHeld. The core does not repeat a call; a
	// gateway whose replicas share requests does, and so does the driver itself after a lost reply. The later grant may
	// replace the earlier one; a Release with the replaced grant may answer ErrNotHeld.
	//
	// If the service cannot be reached and nothing was sent, the error wraps ErrUnavailable. If something may have been
	// done that could not be undone or resolved within ctx, it wraps ErrUnknown. A driver that answers ErrUnavailable
	// after the request has left strands the name for a TTL, because nobody cleans up.
	//
	// When the answer is lost the driver reads back, or asks again with the same RequestID, for as long as ctx lives:
	// the service then answers with the hold that was made, or makes it now. ErrHeld after a broken connection is wrong
	// unless the holder was seen to be another request.
	Acquire(ctx context.Context, r Request) (Grant, error)

	// Renew prolongs every grant to a full Grant.TTL and answers one Renewal per grant, in order.
	//
	// The core passes the grants that are due together, at most a thousand, with Grant.TTL as the holder wants it now,
	// which Extend may have changed since the grant. ctx ends after a third of the time that is left to the nearest
	// deadline among them, five seconds at most, so that a call that hangs leaves time for another. An answer with
	// fewer renewals than grants is taken as a fault for those that are missing.
	//
	// The call costs a number of round trips that does not grow with the number of grants. It never creates what it
	// does not find. An entry that is gone is a loss (Renewal.Err wraps ErrNotHeld, a *NotHeldError with the reason),
	// even if the name is free and could be taken again: another holder may have come and gone, and its token was
	// greater. A transport fault is reported as ErrUnavailable or ErrUnknown and is no loss.
	//
	// When the answer is lost nothing is lost with it: renewals never shorten, the core keeps the deadline that was
	// proved last, and asks again.
	//
	// A driver whose service has sessions keeps its session alive by itself while a holder or a waiter depends on it;
	// its Renew reports the send time of the last keepalive that was confirmed, and forces a new one when that is older
	// than a third of the TTL.
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

	// Release gives the hold back.
	//
	// It compares the request id and the incarnation (token, create revision, …), never the name alone: the name may
	// belong to a successor. Releasing what is no longer held is an error that wraps ErrNotHeld, and changes nothing.
	// ErrUnavailable and ErrUnknown both mean that the core will call again, so the difference matters to people only.
	//
	// A Grant that is made by Request.Grant, without token and incarnation, names what one request may have left: its
	// hold or its place in the queue. Release then removes whichever exists. The core sends it after an ambiguous
	// acquire, possibly before the acquire itself has arrived; it repeats it until one TTL has passed, since ErrNotHeld
	// does not rule out a late arrival.
	//
	// When the answer is lost the core calls again with the same grant. The repetition finds nothing and answers
	// ErrNotHeld, which is success then; it must leave a successor alone.
	//
	// With Grant.MinHoldUntil in the future, the name stays closed until that instant although nobody holds it.
	Release(ctx context.Context, g Grant) error

	// Close releases the driver's own resources and ends its waiters with ErrClosed. It does not close a client that
	// the caller handed in, and does not release holds: the core has done so before.
	//
	// The core calls it once, when the last client that shares the driver closes, and waits for it until ctx ends. ctx
	// may have ended already: then Close does what needs no waiting and returns its error. Calls after Close answer
	// ErrClosed. Close is idempotent.
	Close(ctx context.Context) error
}

// FencingDriver is a Driver whose every exclusive Grant carries a Token greater than that of every earlier grant of the
// same name: across release, expiry, crash, restart, failover, and deletion of everything that the driver keeps.
//
// The promise is this type: fencelock.ForCorrectness accepts nothing else, so that a driver that cannot fence does not
// compile there. Description.Capabilities must carry CapFencing too. A configuration that cannot keep the promise (a
// server without durable storage) leaves CapFencing out and issues zero tokens, and the correctness tier refuses it at
// startup. The type alone would not do, since one driver serves fit and unfit servers; the capability alone would not
// either, since nothing would show at compile time.
//
//	func (d *Driver) IssuesFencingTokens() backend.Driver { return d }
type FencingDriver interface {
	Driver

	// IssuesFencingTokens is the promise, and the conformance suite tests it. It returns its own receiver: the driver
	// that promises. Go promotes the method of an embedded driver, so a wrapper would otherwise promise what its author
	// never considered; the correctness tier refuses a driver for which IssuesFencingTokens returns another one.
	IssuesFencingTokens() Driver
}

// Request is one wish for a lock, resolved and validated by the core: the namespace stands before the name, the
// defaults are filled in, and what the driver does not declare was refused already. A driver that is called without the
// core above it validates with kit.Validate.
type Request struct {
	// Name of the lock: see ValidateName. With the client's namespace, so it is a key as it is.
	Name string

	// Owner tells people who holds the lock, such as host/pid/random. At most MaxOwnerBytes of valid UTF-8 without
	// control characters. The driver stores it and shows it as Holder.Owner; it decides nothing, and two requests with
	// the same owner exclude each other.
	Owner string

	// RequestID is the secret key of this attempt: 16 to 128 characters of A–Z a–z 0–9 - _ with at least 128 random
	// bits, see NewRequestID. A driver may use it unescaped. It is never shown to anybody: not in a log, not in an
	// error, not in what Look and Watch tell.
	RequestID string

	// HoldID names the hold to people, logs and other clients: 1 to 64 characters of A–Z a–z 0–9 - _. It is stored
	// beside the hold and shown as Holder.HoldID and HeldError.HoldID. It decides nothing, and two holds may have the
	// same one: it is derived from the caller's request id where there is one, so that a restarted process recognizes
	// its former life.
	HoldID string

	// Fresh says that RequestID was made for this call and never sent before, so that the driver may skip the search
	// for an earlier hold of it. The zero value is always right. It says nothing about repetitions inside the driver:
	// after a lost reply there may be a hold.
	Fresh bool

	// TTL is how long the hold lives in the service without renewal; within Description's range and granularity. The
	// driver passes it on as a duration and never shortens it.
	TTL time.Duration

	// Wait: wait until granted, or until the context ends. Unset: one attempt.
	Wait bool

	// Kind of hold. The zero value is Exclusive. The others need CapShared or CapPermits.
	Kind Kind

	// Permits and Limit belong to KindPermits: take Permits of Limit, 1 ≤ Permits ≤ Limit < 2^31. Zero otherwise. The
	// requests that use a name at one time agree in Limit; another one is ErrLimitMismatch.
	Permits, Limit int

	// Hierarchical: the name is a path whose steps end with "/", and the hold counts for all that lies below it. It
	// excludes what its kind excludes on the name itself, on every ancestor and on everything below, among hierarchical
	// requests: "a/b" exclusively keeps out "a" and "a/b/c" of either kind, while "a/c" is free. A name is used with or
	// without it, never both: ErrLimitMismatch. Not for KindPermits. Needs CapHierarchy.
	Hierarchical bool

	// Under are the RequestIDs of the live holds under which the request is made: the work that waits keeps them until
	// it has been granted. A driver with CapDeadlock refuses a waiting request that would close a cycle: a hold or a
	// waiter that blocks it is one of Under, or itself waits through one of them.
	//
	// Two requests under one hold that want the same name wait for each other like strangers: one of them will finish.
	// That is why the ids of holds are listed, and not the name of a line of work, by which such siblings would look
	// like a cycle. At most MaxUnder ids. Empty: nothing is held meanwhile, or the driver does not declare CapDeadlock.
	Under []string

	// MinHold keeps the name closed for at least that long after the grant, also when the holder releases earlier or
	// dies. The service has to keep it; a timer in the client would not survive the client. Zero: no minimum. Needs
	// CapMinHold.
	MinHold time.Duration

	// Metadata is stored beside the hold and shown to those who look, byte for byte. The driver does not change the
	// map. Needs CapMetadata when not empty.
	Metadata map[string]string

	// Lost, if not nil, is called when the driver learns by itself that the granted hold is gone: a session expired, a
	// watched entry was deleted. It may be called from any goroutine, more than once and before Acquire has returned,
	// and never blocks. The core remembers a loss that comes before the grant.
	//
	// It is a callback, and not a channel in Grant, because watching 10,000 channels takes 10,000 goroutines, and
	// because a closed channel carries no reason (see docs/decisions, loss-is-pushed-by-callback). The core sets it for
	// drivers that declare CapPushLoss: they call it within one second of the loss. Others need not.
	Lost func(Reason)
}

// Grant returns the grant that names whatever r may have left in the service: the argument for Driver.Release after an
// ambiguous outcome. It has no token, no incarnation and no SentAt. A driver that was granted r usually begins with it
// and fills in the rest.
func (r Request) Grant() Grant {
	return Grant{
		Name: r.Name, Owner: r.Owner, RequestID: r.RequestID, HoldID: r.HoldID,
		Kind: r.Kind, Permits: r.Permits, Limit: r.Limit, Hierarchical: r.Hierarchical, TTL: r.TTL,
	}
}

// Grant is one hold, as the driver granted it. It is a value: the core keeps it and hands it back to Renew and Release,
// possibly from another goroutine, and changes nothing in it but TTL (Extend), SentAt (a renewal) and MinHoldUntil (a
// hold that nobody ran under needs no minimum; then token and incarnation are cleared too, and the grant names its
// request alone).
type Grant struct {
	// Name and Owner are those of the request.
	Name  string
	Owner string
	// RequestID is the secret key of the hold. Never log a Grant whole.
	RequestID string
	// HoldID is what may be logged.
	HoldID string

	// Kind, Permits, Limit and Hierarchical say what is held, as the request asked for it.
	Kind           Kind
	Permits, Limit int
	Hierarchical   bool

	// Token fences writes. Zero if the driver does not fence. For a Kind other than Exclusive it is marked as not
	// exclusive (fencing.Token.Exclusive): such holds do not keep other writers out. It stays the same for the life of
	// the hold, however often it is renewed or acquired again with the same request.
	Token fencing.Token

	// TTL granted, counted from SentAt. It may be longer than what was asked for if the service rounds up, never
	// shorter. In a grant that is handed to Renew it is the length that the holder wants now.
	TTL time.Duration

	// SentAt is the instant, on the driver's clock, just before the first byte of the request or renewal on which this
	// validity rests was sent. For a wait that is the last request that proved the entry, not the one that joined the
	// queue. Zero is a bug of the driver: the grant is over on arrival, and the core refuses it by name after three in
	// a row.
	SentAt Instant

	// Queued says that the request found the name taken and waited for it. It feeds observers only; a driver that
	// cannot tell leaves it unset.
	Queued bool

	// MinHoldUntil is the instant until which the name stays closed, on the driver's clock; zero without a minimum.
	MinHoldUntil Instant

	// Incarnation is the driver's own mark of this hold (a create revision, a czxid, a nonce). Opaque to the core. With
	// it a Release of an earlier hold of the same request does not end a later one. Empty in what Request.Grant
	// returns.
	Incarnation string
}

// Renewal is the outcome of renewing one grant. The zero value is none: with a nil Err the core takes SentAt for what
// it says, and a proof of the instant zero prolongs nothing.
type Renewal struct {
	// SentAt is the instant just before the request that proved the hold was sent. It may be older than the call: a
	// session's keepalive proves all holds of the session. Valid only if Err is nil.
	SentAt Instant
	// TTL granted from SentAt, no shorter than Grant.TTL of the argument. Valid only if Err is nil.
	TTL time.Duration
	// Err is nil if renewed. It wraps ErrNotHeld on a loss, with the reason in a *NotHeldError; ErrHistoryLost if the
	// whole service has forgotten. Anything else is a fault that says nothing about the hold.
	Err error
}

// Kind says what a hold excludes.
//
// Which two holds of one name may live beside each other:
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
	// that admits the greatest token only cannot serve two writers that hold at once.
	KindExclusive Kind = iota
	// KindShared excludes exclusive holds only. A waiting exclusive request stops new shared holds, or readers that
	// follow each other would keep a writer out for ever. Needs CapShared.
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
