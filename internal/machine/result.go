package machine

import (
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Code is the answer to a command. The numbers are part of the snapshot format.
type Code uint8

const (
	// CodeOK: done.
	CodeOK Code = 1
	// CodeGranted: held now. Result.Grants.
	CodeGranted Code = 2
	// CodeQueued: waits now. Result.Ticket. A NoticeGranted follows, unless the wait ends otherwise.
	CodeQueued Code = 3
	// CodeHeld: somebody else holds the name or waits for it. Result.Holder.
	CodeHeld Code = 4
	// CodeNotHeld: there is no such hold or wait, or no longer.
	CodeNotHeld Code = 5
	// CodeCancelled: the acquire was abandoned before it was carried out: see Command.Target.
	CodeCancelled Code = 6
	// CodeDeadlock: waiting would close a cycle. Result.Cycle.
	CodeDeadlock Code = 7
	// CodeMismatch: the name is in use with another kind, another limit of permits, or the other sort of hierarchy.
	CodeMismatch Code = 8
	// CodeConflict: an id is in use for something else.
	CodeConflict Code = 9
	// CodeInvalid: a value is out of its bounds. Result.Field.
	CodeInvalid Code = 10
	// CodeLimit: one of Limits is reached. Result.Field.
	CodeLimit Code = 11
	// CodeNoSession: the session is not open. Not remembered.
	CodeNoSession Code = 12
	// CodeStale: the client said by Command.Acked that it has the answer. Not remembered.
	CodeStale Code = 13
	// CodeUnknown: this build does not know the operation or the level. Not remembered. The replica must stop before it
	// drifts apart from others, unless Command.Ignorable is set.
	CodeUnknown Code = 14
	// CodeDenied: the session, or the session of the hold or the wait, is another principal's; or the rules do not
	// allow it, with Field Name.
	CodeDenied Code = 15
)

// Result is the answer to one command.
type Result struct {
	Code Code
	// Grants, one per request of the acquire, in their order. Only with CodeGranted.
	Grants []Grant
	// Ticket of the wait. Only with CodeQueued.
	Ticket uint64
	// Holder is the blocker: a holder, or a waiter if there is no such holder. Only with CodeHeld.
	Holder *Blocker
	// Cycle of blockers, the newcomer first, with the name that it would wait for; each of the others has the name
	// that its predecessor waits for, and the last one is a hold of the newcomer's Under. Only with CodeDeadlock.
	Cycle []Blocker
	// Field is the refused field, by its name in Command, Request or Limits; Detail says why, for people. Only
	// with CodeInvalid, CodeLimit, CodeMismatch, CodeConflict and CodeUnknown.
	Field, Detail string
}

// Grant is one granted hold.
type Grant struct {
	Name      string
	RequestID string
	Sealed    string // see Request.Sealed
	Token     fencing.Token
	Nonce     fencing.Nonce
	MinHold   time.Duration
	// MaxHold is how long the hold may last, by the policy of its name; zero: without a bound. The leader measures it, and
	// ends the hold with OpFree.
	MaxHold time.Duration
}

// Blocker is a holder or waiter that blocks another request.
type Blocker struct {
	Name    string // wanted and in use, possibly by a hierarchical hold or wait below it
	Session SessionID
	Owner   string
	HoldID  string
	Waits   bool // it waits for the name and does not hold it
}

// Cause says why a hold or a session ended against its owner's will.
type Cause uint8

const (
	// CauseExpired: the session's time was over.
	CauseExpired Cause = 1
	// CauseClosed: the session was closed.
	CauseClosed Cause = 2
	// CauseForced: an administrator force-released the hold.
	CauseForced Cause = 3
	// CauseGivenBack: somebody outside the session released the hold or cancelled the wait, by the request id.
	CauseGivenBack Cause = 4
	// CauseMoved: another session took it over, by OpMove.
	CauseMoved Cause = 5
	// CauseMaxHold: the maximum hold time was over.
	CauseMaxHold Cause = 6
	// CauseDenied: new rules do not allow the wait.
	CauseDenied Cause = 7
)

// NoticeType is the type of a Notice.
type NoticeType uint8

const (
	// NoticeGranted: the wait with Ticket of Session is over, and all of Grants are held, in the order of its requests.
	NoticeGranted NoticeType = 1
	// NoticeLost: the hold with Name, RequestID and Token of Session was ended, or the wait with Name, RequestID and
	// Ticket. Cause, Detail.
	NoticeLost NoticeType = 2
	// NoticeSessionEnded: Session ended, and with it all its holds and waits. Cause. One notice, however many
	// holds there were.
	NoticeSessionEnded NoticeType = 3
	// NoticeLingering: the hold with Name, RequestID and Token lingers from now on; the leader frees it when its
	// MinHold is over. It has no Session any more.
	NoticeLingering NoticeType = 4
	// NoticeUntimed: the hold with Token, which had a maximum, has ended. It is for the leader, and nobody's: it has no
	// Session.
	NoticeUntimed NoticeType = 5
)

// Notice is an effect of a command on another session than its sender's.
type Notice struct {
	Type      NoticeType
	Session   SessionID
	Ticket    uint64
	Grants    []Grant
	Name      string
	RequestID string
	Sealed    string // see Request.Sealed; for Session
	Token     fencing.Token
	MinHold   time.Duration
	Cause     Cause
	Detail    string

	By, Principal string // of CauseForced: see Command
}
