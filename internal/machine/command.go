package machine

import (
	"encoding/hex"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// SessionID is made by the client: 128 random bits, never used for a second session. Zero is no session. From
// LevelHiddenIDs the machine has only its hash: see Hidden.
type SessionID [16]byte

// String returns the id in hexadecimal.
func (id SessionID) String() string { return hex.EncodeToString(id[:]) }

// Op is the operation of a Command. The numbers are part of the log format.
type Op uint16

// The operations. Each lists the fields of Command that it uses besides Session, Seq and Acked; others must be zero:
// the log does not carry them.
const (
	// OpOpenSession makes Session. TTL, Client; from LevelHiddenIDs Principal. Opening an open session, with the same
	// TTL, is CodeOK; with another TTL, CodeConflict; by another principal, CodeDenied. The machine does not
	// remember sessions that ended: a session that is opened a second time starts empty. Seq must be 0.
	OpOpenSession Op = 1
	// OpCloseSession ends Session at the client's request, with all its holds and waits. Linger. Seq must be 0.
	OpCloseSession Op = 2
	// OpExpire ends Session because it expired. Linger. Seq must be 0.
	OpExpire Op = 3
	// OpAcquire acquires all of Requests or no request. Requests, Under, Wait. CodeGranted with one Grant per request,
	// in their order; CodeQueued with the Ticket if it has to wait and Wait is set, CodeHeld with the Holder if not;
	// CodeConflict if a request id is in use for the name by another session, or if some but not all of the requests
	// are held already, or wait as part of another set; CodeDeadlock, CodeMismatch, CodeInvalid, CodeLimit,
	// CodeNoSession.
	OpAcquire Op = 4
	// OpCancelWait ends the wait of RequestID for Name, in all of its queues, and leaves holds alone. Name, RequestID,
	// Target; from LevelHiddenIDs Principal. CodeOK; CodeGranted with the Grant of Name if it was granted meanwhile, or
	// long ago; CodeNotHeld if there is neither. It needs no Session, and ends the wait in any session of Principal;
	// CodeDenied for other principals.
	OpCancelWait Op = 5
	// OpRelease ends the hold of RequestID with Token. Name, RequestID, Token, Linger, Target, Own; from LevelHiddenIDs
	// Principal. Without a Token it ends the hold of the request, or its wait in all of its queues. CodeOK, CodeNotHeld.
	// It needs no Session, and ends the hold in any session of Principal, or with Own only in Session; CodeDenied for
	// other principals. Lingering holds are not released.
	OpRelease Op = 6
	// OpForceRelease ends every hold of Name, lingering ones too; holds of ancestors and descendants stay. Name,
	// Reason, By; from LevelNonces Principal, and Nonce and Token, which are conditions: holds with another nonce or
	// token stay. CodeOK; CodeNotHeld if no hold ended. It needs no Session.
	OpForceRelease Op = 7
	// OpFree ends a hold that the leader times: a lingering hold after its minimum, or a hold after its maximum. Name,
	// Token, Linger. CodeOK; CodeNotHeld if it neither lingers nor has a maximum. It needs no Session.
	OpFree Op = 8
	// OpSetLimits replaces the limits. Limits. They are part of the state, because replicas that limit differently
	// drift apart. State over a new limit stays. CodeInvalid if a limit is not positive or beyond its bound.
	OpSetLimits Op = 9
	// OpRaiseLevel raises the feature level to Level. The leader sends it once all members know that level, and uses
	// later operations only then. A lower or equal level is CodeOK; a level above MaxLevel, which this build does not
	// know, is CodeUnknown.
	OpRaiseLevel Op = 10
	// OpMove moves the hold or the wait of RequestID for Name to Session. Name, RequestID, Token:
	// with a Token only that hold; from LevelHiddenIDs Sealed. CodeGranted with the Grant of Name, or CodeQueued with
	// the Ticket, both as before; even if it is there already. CodeNotHeld, CodeNoSession. A session of the same
	// principal that knows the request id may take it over; CodeDenied for others.
	OpMove Op = 11
	// OpCheckpoint records the leader's clock and deadlines of sessions for the next leader. Clock, Deadlines. CodeOK;
	// deadlines of sessions that are not open are ignored. From LevelDeadlines. It needs no Session.
	OpCheckpoint Op = 12
	// OpRenew removes the deadline of Session, as every other command of a session does, except OpExpire. CodeOK,
	// CodeNoSession. Seq must be 0. From LevelDeadlines.
	OpRenew Op = 13
	// OpSetRules replaces the rules. Rules; empty to remove them. Existing holds stay; waits that the rules deny end.
	// CodeOK; CodeInvalid if the rules are malformed. From LevelRules. It needs no Session.
	OpSetRules Op = 14
	// OpSetPolicies replaces the policies. Rules, which are a file of policies; empty to remove them. Holds keep the
	// maximum with which they were granted, and queues their waiters. Permits in use get the new limit: holds stay, and
	// waiters that want more permits than the limit lose their place. CodeOK; CodeInvalid if the file is malformed. From
	// LevelRules. It needs no Session.
	OpSetPolicies Op = 15
)

// The feature levels. Each adds operations, or fields of snapshots, that members of a lower level do not know.
const (
	firstLevel = 1
	// LevelDeadlines adds deadlines of sessions: OpCheckpoint, OpRenew.
	LevelDeadlines = 2
	// LevelNonces adds nonces of holds, and conditions and a principal of forced releases.
	LevelNonces = 3
	// LevelHiddenIDs adds hashes of the ids of sessions and requests in the state, and principals of sessions.
	// Raising the level converts the state; commands after that have hashes.
	LevelHiddenIDs = 4
	// LevelRules adds rules and policies to the state: OpSetRules, OpSetPolicies.
	LevelRules = 5

	// MaxLevel is the highest feature level that this build knows.
	MaxLevel = LevelRules
)

// Deadline is the instant until which a session lives unless it is renewed through the log.
type Deadline struct {
	Session SessionID
	At      time.Duration // by the cluster's clock; positive
}

// Kind determines which holds a hold excludes. The numbers are those of backend.Kind.
type Kind uint8

const (
	Exclusive Kind = iota // excludes every other hold of the name
	Shared                // excludes exclusive holds
	Permits               // takes some of a limited number of permits
)

// Request is one name of an OpAcquire.
type Request struct {
	// Name of the lock: 1 to Limits.NameBytes bytes of valid UTF-8 without control characters.
	Name string
	// ID of the request: 16 to 128 characters of A–Z a–z 0–9 - _. It identifies the request for Name; requests for
	// different names in one command may share an id. It is a secret: a client that knows it may release and move the
	// hold. From LevelHiddenIDs it is the hash: see HiddenRequest.
	ID string
	// Sealed is the id of the request, which the client of the session can open: see Seal. From LevelHiddenIDs.
	Sealed string
	// HoldID names the hold to people and other clients: up to 64 characters of A–Z a–z 0–9 - _. It does not affect
	// any decision.
	HoldID string
	// Nonce names the hold among all past and future ones. A repeated request that finds its hold leaves the nonce as
	// it was. Zero: no nonce. From LevelNonces.
	Nonce fencing.Nonce
	// Owner is shown to people: up to 256 bytes of valid UTF-8 without control characters.
	Owner string
	Kind  Kind
	// Permits of Limit, 1 ≤ Permits ≤ Limit, for the kind Permits; zero otherwise.
	Permits, Limit uint32
	// Hierarchical: see the package comment.
	Hierarchical bool
	// MinHold is not negative. The machine keeps it but does not measure time: see Command.Linger.
	MinHold time.Duration
	// HeedsMaxHold: the client ends the hold by Grant.MaxHold. A request without it is refused where a policy has a
	// maximum, since its client would use the hold beyond the maximum. From LevelRules.
	HeedsMaxHold bool
	// For is the principal on whose behalf the session's principal asks, as a gateway does for its clients: the rules
	// must allow both. Empty: the session's principal asks for itself. From LevelRules.
	For principal.Principal
	// Metadata is shown to callers of Look: up to Limits.MetadataBytes bytes of valid UTF-8, keys and values together.
	Metadata map[string]string
}

// Command is one step of the log. The fields in use depend on Op; strings, slices and maps are kept, and must not be
// changed after Apply.
type Command struct {
	Op Op
	// Ignorable: a replica that does not know Op skips the command. Otherwise CodeUnknown must stop the replica.
	Ignorable bool

	// Session of the command. Zero where no session is needed.
	Session SessionID
	// Seq numbers the commands of the session, so that each is carried out once; in any order, but never one number for
	// two commands. 0: carried out as often as it arrives.
	Seq uint64
	// Acked: the client has the results up to this number, and the machine drops them. Only with Seq, and below it.
	Acked uint64

	TTL time.Duration // of a session; positive. The machine keeps it but does not measure time.
	// Client is the client of the session: up to 256 bytes of valid UTF-8 without control characters.
	// Limits.ClientShare bounds all sessions of one client together. Empty: no client, and no bound. From
	// LevelDeadlines.
	Client   string
	Requests []Request
	// Under are the ids of the requests whose holds are kept until Requests are granted: see Deadlocks in the package
	// comment. At most MaxUnder.
	Under []string
	// UnderHidden are hashes of further such ids, by which clients know the holds of other clients: HideRequests adds
	// them to Under, and the log does not carry them.
	UnderHidden []string
	Wait        bool

	Name      string
	RequestID string
	Sealed    string // as in Request, for the session to which OpMove moves
	Token     fencing.Token
	// Target is the Seq of the acquire that a release or a cancellation abandons: if that acquire was not carried out
	// yet, it never will be. 0: no acquire. Only with Session.
	Target uint64

	// Own restricts OpRelease to the hold or wait of Session: it stays if another session has taken it over. Only with
	// Session.
	Own bool

	// Linger turns holds with a MinHold that this command ends into lingering ones: they have no holder any more, and
	// exclude others until OpFree. The leader sets it if the minimum of one of them is not over, and frees the holds
	// whose minimum is over. Without it these holds end immediately.
	Linger bool

	Reason string // of a force-release, for its victims; up to 1024 bytes of valid UTF-8
	By     string // the name that the sender of a force-release claims; up to 256 bytes of valid UTF-8
	// Principal is the sender of the command, as authenticated by the leader; up to 256 bytes of valid UTF-8.
	Principal principal.Principal
	// Nonce restricts OpForceRelease to the hold with this nonce. Zero: all holds.
	Nonce fencing.Nonce

	Limits *Limits
	Level  uint32
	Rules  string // a file of package rules, with rules or with policies: see MaxRulesBytes

	Clock     time.Duration // of the cluster: see Machine.Clock; not negative
	Deadlines []Deadline

	// Payload of an Op that DecodeBatch does not know.
	Payload []byte
}
