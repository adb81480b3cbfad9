package machine

import (
	"encoding/hex"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// SessionID is made by the client: 128 random bits, never used for a second session. Zero is no session.
type SessionID [16]byte

// String returns the id in hexadecimal.
func (id SessionID) String() string { return hex.EncodeToString(id[:]) }

// Op says what a Command does. The numbers are part of the log format.
type Op uint16

// The operations. Each lists the fields of Command that it uses besides Session, Seq and Acked; others must be zero, or
// they get lost in the log.
const (
	// OpOpenSession makes Session. TTL, Client. Opening a session that is open, with the same TTL, is CodeOK; with
	// another TTL, CodeConflict. The machine does not remember sessions that ended: one that is opened again starts
	// empty. Seq must be 0.
	OpOpenSession Op = 1
	// OpCloseSession ends Session at the client's wish, with all that hangs on it. Linger. Seq must be 0.
	OpCloseSession Op = 2
	// OpExpire ends Session because its time was over. Linger. Seq must be 0.
	OpExpire Op = 3
	// OpAcquire takes all of Requests or none. Requests, Under, Wait. CodeGranted with one Grant per request, in their
	// order; CodeQueued with the Ticket if it has to wait and Wait is set, CodeHeld with the Holder if not;
	// CodeConflict if a request id is in use for the name by another session, or if some but not all of the requests
	// are held already, or wait in another company; CodeDeadlock, CodeMismatch, CodeInvalid, CodeLimit, CodeNoSession.
	OpAcquire Op = 4
	// OpCancelWait ends the wait of RequestID for Name, in all of its queues, and leaves holds alone. Name, RequestID,
	// Target. CodeOK; CodeGranted with the Grant of Name if it was granted meanwhile, or long ago; CodeNotHeld if there
	// is neither. It needs no Session, and ends waits of any session: anybody who knows the request id may cancel.
	OpCancelWait Op = 5
	// OpRelease ends the hold of RequestID with Token. Name, RequestID, Token, Linger, Target, Own. Without a Token it
	// ends whatever the request left: its hold, or its wait in all of its queues. CodeOK, CodeNotHeld. It needs no
	// Session, and ends holds of any session: anybody who knows the request id may release; with Own, those of Session
	// alone. Lingering is not released.
	OpRelease Op = 6
	// OpForceRelease ends every hold of Name, lingering ones too; holds of ancestors and descendants stay. Name,
	// Reason, By. CodeOK; CodeNotHeld if there was none. It needs no Session.
	OpForceRelease Op = 7
	// OpFree ends a lingering hold, whose minimum is over. Name, Token. CodeOK; CodeNotHeld if it does not linger. It
	// needs no Session.
	OpFree Op = 8
	// OpSetLimits replaces the limits. Limits. They are part of the state, because replicas that limit differently
	// drift apart. What is over a new limit already stays. CodeInvalid if one is not positive or beyond its bound.
	OpSetLimits Op = 9
	// OpRaiseLevel raises the feature level to Level. The leader sends it once all members know that level, and uses
	// later operations only then. A level that was reached before is CodeOK; one that this build does not know, above
	// MaxLevel, is CodeUnknown.
	OpRaiseLevel Op = 10
	// OpMove makes Session the one on which the hold or the wait of RequestID for Name hangs. Name, RequestID, Token:
	// with a Token only that hold. CodeGranted with the Grant of Name, or CodeQueued with the Ticket, both as before;
	// also if it hangs there already. CodeNotHeld, CodeNoSession. Anybody who knows the request id may take it over
	// from any session.
	OpMove Op = 11
	// OpCheckpoint keeps what the leader knows of time for the next one: Clock, and Deadlines of sessions. CodeOK; what
	// it says of sessions that are not open counts for nothing. From LevelDeadlines. It needs no Session.
	OpCheckpoint Op = 12
	// OpRenew takes the deadline of Session away, as every command of a session does that is not its end. CodeOK,
	// CodeNoSession. Seq must be 0. From LevelDeadlines.
	OpRenew Op = 13
)

// The feature levels. Each adds operations, or fields of snapshots, that members of a lower one do not know.
const (
	firstLevel = 1
	// LevelDeadlines is from where sessions have deadlines: OpCheckpoint, OpRenew.
	LevelDeadlines = 2

	// MaxLevel is the highest feature level that this build knows.
	MaxLevel = LevelDeadlines
)

// Deadline is until when a session lives unless it is renewed through the log.
type Deadline struct {
	Session SessionID
	At      time.Duration // by the cluster's clock; positive
}

// Kind says what a hold excludes. The numbers are those of backend.Kind.
type Kind uint8

const (
	Exclusive Kind = iota // excludes every other hold of the name
	Shared                // excludes exclusive holds
	Permits               // takes some of a limited number of permits
)

// Request is one name that OpAcquire asks for.
type Request struct {
	// Name of the lock: 1 to Limits.NameBytes bytes of valid UTF-8 without control characters.
	Name string
	// ID of the request: 16 to 128 characters of A–Z a–z 0–9 - _. It identifies the request for Name; requests for
	// different names in one command may have the same. It is a secret: anybody who knows it may release and move the
	// hold.
	ID string
	// HoldID names the hold to people and other clients: up to 64 characters of A–Z a–z 0–9 - _. It decides nothing.
	HoldID string
	// Owner is shown to people: up to 256 bytes of valid UTF-8 without control characters.
	Owner string
	Kind  Kind
	// Permits of Limit, 1 ≤ Permits ≤ Limit, for the kind Permits; zero otherwise.
	Permits, Limit uint32
	// Hierarchical: see the package comment.
	Hierarchical bool
	// MinHold is not negative. The machine keeps it and measures nothing: see Command.Linger.
	MinHold time.Duration
	// Metadata is shown to those who look: up to Limits.MetadataBytes bytes of valid UTF-8, keys and values together.
	Metadata map[string]string
}

// Command is one step of the log. Which fields count depends on Op; strings, slices and maps are kept, and must not be
// changed after Apply.
type Command struct {
	Op Op
	// Ignorable: a replica that does not know Op passes over the command. Otherwise CodeUnknown must stop the replica.
	Ignorable bool

	// Session that asks. Zero where none is needed.
	Session SessionID
	// Seq numbers the commands of the session, so that each is carried out once; in any order, but never one number for
	// two commands. 0: carried out as often as it arrives.
	Seq uint64
	// Acked says that the client knows the results up to this number; they are forgotten. Only with Seq, and below it.
	Acked uint64

	TTL time.Duration // of a session; positive. The machine keeps it and measures nothing.
	// Client says whose session it is: up to 256 bytes of valid UTF-8 without control characters. What the sessions of
	// one client have counts together: see Limits.ClientShare. Empty: nobody's, and unbounded. From LevelDeadlines.
	Client   string
	Requests []Request
	// Under are the ids of the requests whose holds are kept until Requests are granted: see Deadlocks in the package
	// comment. At most MaxUnder.
	Under []string
	Wait  bool

	Name      string
	RequestID string
	Token     fencing.Token
	// Target is the Seq of the acquire that a release or a cancellation gives up: if that acquire was not carried out
	// yet, it never will be. 0 for none. Only with Session.
	Target uint64

	// Own has OpRelease end only what hangs on Session, and leave alone what another session has taken over. Only with
	// Session.
	Own bool

	// Linger turns holds with a MinHold that this command ends into lingering ones: nobody holds them any more and they
	// go on excluding others until OpFree. The leader sets it if the minimum of one of them is not over, and frees
	// those whose minimum is. Without it they just end.
	Linger bool

	Reason string // of a force-release, for its victims; up to 1024 bytes of valid UTF-8
	By     string // who force-releases, for the audit; up to 256 bytes of valid UTF-8

	Limits *Limits
	Level  uint32

	Clock     time.Duration // of the cluster: see Machine.Clock; not negative
	Deadlines []Deadline

	// Payload of an Op that DecodeBatch does not know.
	Payload []byte
}
