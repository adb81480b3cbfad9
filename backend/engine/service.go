// Package engine implements the driver contract of package backend once, over bindings. A binding implements single
// exchanges with its service:
//
//	core ─► engine.Driver: attempts, waiting, ambiguity, cleanup, renewal, errors ─► Service: one exchange ─► service
//
// A binding has no retries, timers, goroutines or memory of requests. The engine has them:
//
//   - Each exchange returns to its caller within the caller's context, and continues in the background for up to
//     exchangeTimeout, or longer (Patient), so that an abandoned request has a known end. It runs on the caller's
//     goroutine if the binding can return early (Prompt), and on a goroutine of the engine otherwise.
//   - An attempt repeats Enter until it has an answer. After an error that means "not done" it pauses and repeats;
//     after an error that means "unknown" too, and the answer to the repetition resolves it.
//   - A waiter repeats Enter when the service reports that its turn may have come, and about once a second.
//   - An attempt that ends without a hold removes its known entries from the service, in the background. If there may
//     be unknown entries, the error is backend.ErrUnknown, and the core releases them.
//   - A Leave never overtakes an Enter of the same request.
//   - With sessions, there is one for each TTL, or for similar ones. It is proved once for all callers that need a
//     proof. If a session cannot be proved any more, or has an entry that could not be removed, its holds move to
//     another session.
package engine

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Service is implemented by every binding. Each method is one exchange with the service, or two if the service has no
// step that reads and writes. A method may run after its caller has returned, and the service may carry it out late.
//
// Errors that wrap an answer of package backend keep their meaning; Classify judges the others.
type Service interface {
	// Describe is Driver.Describe.
	Describe() backend.Description
	// Classify returns the class of a step's error. It is not called for answers of package backend.
	Classify(err error) Class
	// Ping checks that the service answers and is fit.
	Ping(ctx context.Context) error
	// Enter acquires the name of r or, with r.Wait, joins its queue. It is idempotent by r.RequestID: for a request
	// that holds or waits already, it returns its position, and is the waiter's sign of life. A hold or wait on
	// another session moves to r.Session. The first message of an Enter that is not Again takes a free name: if a question
	// went before it, its lost answer would leave the request unmade. With an error that ends the attempt (a Refusal, or
	// an answer of package backend), the engine removes the entry that Placed and Place describe. With any other error it
	// ignores the Position.
	Enter(ctx context.Context, r Entering) (Position, error)
	// Leave ends a hold or a place in the queue, and opens the name to the next waiters. A grant without an
	// incarnation names the hold or the place of its request. Leave may be the first call of a driver: no Probe comes
	// before it.
	Leave(ctx context.Context, l Leaving) (Left, error)
	// Extend prolongs holds and returns one outcome for each, in order. With sessions it only moves holds from other
	// sessions to s, unless it is Abandoned. The number of round trips does not grow with the number of holds.
	Extend(ctx context.Context, s Session, holds []Holding) ([]Outcome, error)
	// Close releases the resources that the binding opened.
	Close(ctx context.Context) error
}

// Class is the meaning of a failed step for the service.
type Class uint8

const (
	// Unknown: the step may have taken effect, or may yet.
	Unknown Class = iota
	// NotDone: the step had no effect and never will. A repetition may succeed.
	NotDone
	// Never: the step had no effect, and no repetition will succeed until an operator acts.
	Never
	// NoSession: the step had no effect, because the session has ended.
	NoSession
)

// Entering is a request in one attempt.
type Entering struct {
	backend.Request
	// Session is the session for the request; nil without Sessions.
	Session Session
	// Attempt is the same in all Enters of one attempt, and different in every other attempt.
	Attempt string
	// Sent is an instant before the Enter, and not before an earlier Enter of the attempt was answered.
	Sent backend.Instant
	// Again: an earlier Enter of the attempt may have taken effect, or may yet.
	Again bool
	// Shared: another attempt of the request was alive in this driver at some time since the attempt began, and may yet
	// remove its place with a Leave. If the request is answered with a hold that another attempt may have made, such a
	// Leave must not end it.
	Shared bool
	// Place is Position.Place of the last Enter of the attempt that was answered.
	Place string
	// Handed is Push.Handed of the push for the attempt's turn.
	Handed string
}

// Leaving is a hold, or a request's hold or wait, that is to end.
type Leaving struct {
	backend.Grant
	// Session is the session on which the engine has put the request; nil if unknown.
	Session Session
	// Known: the request got that incarnation from this driver, which therefore knows the request id.
	Known bool
	// Place is Position.Place of an attempt that was abandoned: only its own entry is to end, since another client may
	// have asked with the same request id. "": whatever the request has.
	Place string
	// Late are the attempts of the request with an unanswered Enter, which may take effect later than this Leave. With
	// Sessions the service has to refuse these as long as the session lives. Without Sessions, late entries expire with
	// their TTL.
	Late []string
}

// Holding is a hold to renew.
type Holding struct {
	backend.Grant
	// Known: that incarnation stood on this session when the engine last heard of it.
	Known bool
}

// Position is where a request stands after Enter.
type Position struct {
	// Held: the request holds. Token, Nonce and Incarnation are from the hold, and MinHoldUntil is the end of its
	// minimum on the driver's clock.
	Held         bool
	Token        fencing.Token
	Nonce        fencing.Nonce
	Incarnation  string
	MinHoldUntil backend.Instant
	// Generation of the service that issued Token: see backend.Grant.
	Generation fencing.Generation
	// Last is the instant until which the hold lasts at most, however often it is renewed; 0 without a maximum.
	Last backend.Instant
	// Queued: the request waited before it was granted, as far as the service knows.
	Queued bool
	// Placed: the service has a hold or a place in the queue for the request.
	Placed bool
	// Holder is the blocker of a request that does not hold. Nil if the service does not report it.
	Holder *backend.HeldError
	// Place is data of the binding, passed to the next Enter of the request.
	Place string
	// Behind is the entry that a waiter watches: see Watches.
	Behind string
	// Poll: no push notifies the request of its turn, so it repeats Enter more often. Unless Placed is set, a place from
	// an earlier Enter of the attempt may still be there.
	Poll bool
}

// Left is the outcome of Leave.
type Left struct {
	// Was: there was a hold or a place to end.
	Was bool
	// Rest is set by a service of several servers when enough of them have executed the Leave: it waits for the others
	// within ctx, and reports whether all have carried it out. The engine calls it in the background, and again after a
	// pause if it is false: then it repeats the Leave at those servers. When the driver closes, ctx has ended in the last
	// call, which sends the Leave and awaits nothing. nil: there are no others.
	Rest func(ctx context.Context) (done bool)
	// Settle is when to settle the name: see Settles.
	Settle time.Duration
	// Loss is the reason for a missing entry, if the service reports it.
	Loss backend.Loss
}

// Outcome is the outcome of Extend for one hold.
type Outcome struct {
	// Gone: the service does not have the hold any more. Loss is the reason, if the service reports it.
	Gone bool
	Loss backend.Loss
	// Last is Position.Last.
	Last backend.Instant
	// Err is a failure for this hold alone; the hold may still exist.
	Err error
}

// Sets is for services that take several names in one step. CapMultiAcquire.
type Sets interface {
	// EnterSet is Enter for all of rs, atomically. Positions of holds are in the order of rs; a set that does not
	// hold has one position.
	//
	// A set that the service cannot take in one step is backend.ErrUnsupported.
	EnterSet(ctx context.Context, rs []Entering) ([]Position, error)
}

// Session is the binding's own type for a session, which has holds and waiters.
type Session interface {
	// TTL is the lifetime of the session without Prove. It does not change.
	TTL() time.Duration
}

// Sessions is for services that keep holds on sessions. The engine opens one for each TTL, or for similar ones, keeps
// it alive while it is used, and ends it.
type Sessions interface {
	// Open opens a session of at least ttl. A session beside an error may or may not have been opened, and is ended.
	Open(ctx context.Context, ttl time.Duration) (Session, error)
	// Prove prolongs s and returns when s is proved to live for its TTL from the instant before the call. Otherwise
	// the error is ErrNoSession, ErrOutgrown, or another error after which the state of the session is unknown.
	Prove(ctx context.Context, s Session) error
	// End ends s with all its holds and waiters. If it has ended before, that is no error.
	End(ctx context.Context, s Session) error
}

// Proofs is for services on which other exchanges prove a session, too.
type Proofs interface {
	// Proved returns the latest instant from which s is known to live for its TTL. An answered Extend has proved its
	// session since it was called.
	Proved(s Session) backend.Instant
}

// The answers of Prove about a session.
var (
	// ErrNoSession: it has ended, with all its holds and waiters.
	ErrNoSession = errors.New("the session is gone")
	// ErrOutgrown: it lives, and cannot be proved any more. Its holds and waiters move to another session.
	ErrOutgrown = errors.New("the session must be replaced")
)

// Watches is for services on which a waiter watches the entry before it.
type Watches interface {
	// Watch calls wake when the watch stands, and whenever the entry changes that what, a Position.Behind or
	// Position.Place, names. It returns when ctx ends or the watch fails.
	Watch(ctx context.Context, what string, wake func()) error
}

// Prober is for services that have to be known before they are used. Service.Ping is that probe too.
type Prober interface {
	// Probe checks the identity and state of the service. The engine calls it before the first Enter or Extend, once for
	// all callers, and whenever a session has ended, to find out whether the service has lost its history.
	Probe(ctx context.Context) error
}

// Checked is for services with options that may be invalid.
type Checked interface {
	// Unfit returns an error for invalid options, which every call then returns, or nil.
	Unfit() error
}

// Follower is for services that notify their clients of a session's losses.
type Follower interface {
	// Follow notifies of losses on s until ctx ends. The engine calls it when s is open, and whenever it has
	// returned: nil when s may have ended, and an error when notifications may be lost.
	Follow(ctx context.Context, s Session, notify func(Push)) error
}

// Prompt is for services with steps that return when their context ends: the engine calls them on the caller's
// goroutine. A step waits for the service by Await, and returns an Unanswered if it has sent a request that was not
// answered. The error of a context alone means that no request was sent.
type Prompt interface {
	// Prompt is a marker.
	Prompt()
}

// PromptEnters is Prompt for Enter, EnterSet and Leave alone.
type PromptEnters interface {
	// PromptEnters is a marker.
	PromptEnters()
}

// Patient is for services with exchanges that are worth more than exchangeTimeout, since to end one is expensive.
type Patient interface {
	// Patience returns the maximum duration of an exchange.
	Patience() time.Duration
}

// Unanswered is the error of a step that was sent, and may take effect later.
type Unanswered struct {
	// Err is the cause. nil: the context of the step has ended.
	Err error
	// Landed waits until the step has been executed or never will be, or ctx ends; it is called once. nil: unknown.
	Landed func(ctx context.Context)
}

// Error reports that there was no answer.
func (u *Unanswered) Error() string {
	if u.Err == nil {
		return "no answer"
	}
	return u.Err.Error()
}

// Unwrap returns Err.
func (u *Unanswered) Unwrap() error { return u.Err }

// Refusal is the error of a step that is not repeated, not even by a waiter, although it might succeed later. The step
// had no effect, except for the entry that an Enter describes: see Service.
type Refusal struct {
	// Err is the reason, an error of the contract.
	Err error
}

// Error returns the message of Err.
func (r *Refusal) Error() string { return r.Err.Error() }

// Unwrap returns Err.
func (r *Refusal) Unwrap() error { return r.Err }

// Pushes is for services that notify their clients.
type Pushes interface {
	// Listen sets the function that receives notifications. The engine calls it once, before any other method. notify
	// may be called from any goroutine and does not block.
	Listen(notify func(Push))
}

// Keys is for services with notifications that do not contain the request id, which is a secret.
type Keys interface {
	// Key returns the name of the request in notifications: the same for each call with one id.
	Key(requestID string) string
}

// Handover is for services that give the next waiter a short hold in the step that ends the previous hold, and report
// it in a push.
type Handover interface {
	// Handed returns the hold that a push has granted to r, the instant before the Enter that was granted was sent,
	// and the minimum lifetime of the hold after that instant. It does no I/O. False: the push grants no hold.
	Handed(r Entering, handed string) (pos Position, sent backend.Instant, ttl time.Duration, ok bool)
}

// Checks is for services that report the state of many waiters in one exchange. A waiter with a place then repeats
// Enter only after a push or a check.
type Checks interface {
	// Check is the sign of life of this client's waiters, and returns one answer for each queue, in order. queues is
	// the number of all queues in which the client waits.
	Check(ctx context.Context, all []Waiters, queues int) ([]Found, error)
}

// Waiters are the waiters of this client in the queue of one name, as of their last Enter.
type Waiters struct {
	Name string
	// Quick: the check only has to detect changes since the last one.
	Quick bool
	All   []Entering
}

// Found is the answer of Check for one queue.
type Found struct {
	// Turns are the numbers of the waiters that have to Enter: they hold, or have lost their places.
	Turns []int
	// Again is when to repeat the check; 0 after a quick check: when it was due.
	Again time.Duration
	// Quick: until then, a quick check about once a second reports whether there is reason to check earlier.
	Quick bool
}

// Settles is for services that hand a name to a waiter for a short while, and do not notice the end of that.
type Settles interface {
	// Settle makes the service hand a name to the next waiter if the last one has not answered. It returns the time
	// until the next Settle, and 0 if no further Settle is needed.
	Settle(ctx context.Context, name string) (again time.Duration, err error)
}

// Expires is for services that can end a hold as its time would. Package function Expire calls it.
type Expires interface {
	// Expire is Leave for a hold, unless others were answered with it.
	Expire(ctx context.Context, l Leaving) (Left, error)
}

// OneEntry is for services on which all attempts of a request in one client share one entry. Only the last of them
// that ends without a hold removes it.
type OneEntry interface {
	// OneEntry is a marker.
	OneEntry()
}

// Push is a notification from the service.
type Push struct {
	What PushKind
	// RequestID is the request of the push, or its key from Keys: of a set, the first one.
	RequestID string
	// Name is the name of the push, for PushTurns.
	Name string
	// After is the time for which the turn will not come, for PushTurns.
	After time.Duration
	// Handed is the input of Handover, for PushTurn.
	Handed string
	// Loss is the reason for the loss of the hold, for PushLost. With an incarnation it is about that life of the
	// hold only.
	Loss        backend.Loss
	Incarnation string
}

// PushKind is the type of a Push.
type PushKind uint8

const (
	// PushTurn: a waiter's turn may have come.
	PushTurn PushKind = iota
	// PushTurns: the turn of any waiter of a name may have come, or the service asks whether its waiters live.
	PushTurns
	// PushLost: a hold is gone.
	PushLost
	// PushGap: notifications may have been lost, for all requests.
	PushGap
)

// Inspector is for services that show their locks. CapInspect, and CapList for Names.
type Inspector interface {
	Look(ctx context.Context, name string) (backend.State, error)
	// Names returns a page of the names that begin with prefix, and where the next page begins: "" after the last.
	Names(ctx context.Context, prefix, after string) (page []backend.State, next string, err error)
}

// Forcer is for services that end a hold against its holder's will. CapForceRelease.
type Forcer interface {
	// Force ends the holds that r names, comparing in the step that ends them, and returns their number.
	Force(ctx context.Context, r backend.ForceRequest) (int, error)
}

// Feeds is for services that keep a history of their names. CapWatch.
type Feeds interface {
	// Feed begins to follow name. wake is called when there may be changes to read; it does not block.
	Feed(name string, wake func()) Feed
}

// Feed is the history of one name, read from one end.
type Feed interface {
	// Read returns the changes after revision since, if there are any. The first Read with since 0 begins at now.
	Read(ctx context.Context, since uint64) ([]backend.Change, error)
	// Stop ends it.
	Stop()
}

// Polled is for feeds that nothing wakes.
type Polled interface {
	// Every returns the average time between two Reads.
	Every() time.Duration
}

// Changes is for services that send the history of a name as it happens. CapWatch.
type Changes interface {
	// Changes yields the changes of name after revision since, or from now on with 0, until ctx ends, the loop is left
	// or an error is yielded.
	Changes(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error]
}

const (
	// exchangeTimeout is the maximum duration of one exchange, whatever the caller's context allows, unless the service is
	// Patient.
	exchangeTimeout = 2 * time.Second
	// landTimeout is the maximum time after that for which an Unanswered step is awaited. A binding that closes its
	// connection waits up to 3 s until the service has read it.
	landTimeout = 2 * exchangeTimeout
	// abandonGrace is the maximum time that an attempt waits for the removal of its place in the queue before it
	// returns. The contract allows 50 ms.
	abandonGrace = 20 * time.Millisecond
	// minHanded is the validity that a hold from a push has to have left: its renewal is a round trip away.
	minHanded = 300 * time.Millisecond
	// firstPoll is the pause of a waiter without a place after its first Enter. It doubles up to lookInterval.
	firstPoll = 50 * time.Millisecond
	// lookInterval is the time between two Enters of a waiter, on average, in case a notification is lost.
	lookInterval = time.Second
	// watchedInterval is that time for a waiter that watches, from the second Enter on.
	watchedInterval = time.Minute
	// maxResting bounds the Leaves that wait for their rest. The entries of further ones expire with their TTL.
	maxResting = 1000
	// maxTries bounds the exchanges of an attempt without Wait that the service refuses.
	maxTries = 3
)
