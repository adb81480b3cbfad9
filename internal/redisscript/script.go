// Package redisscript is the part of a lock that runs inside Redis: one Lua script, and how its keys, arguments and
// values are written. Package redis runs it on one server or cluster, package redlock on several servers together.
package redisscript

import (
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"strconv"
	"strings"
	"time"
)

// Source is the script. It runs on Redis 6.0 and later, and on Valkey.
var Source = locks + shares + steps

// The parts of the script, in the order in which they are read.
var (
	//go:embed locks.lua
	locks string
	//go:embed shares.lua
	shares string
	//go:embed steps.lua
	steps string
)

// FreeSource is the short script that does what most releases need: see Free.
//
//go:embed free.lua
var FreeSource string

// SHA and FreeSHA are the names under which EVALSHA knows Source and FreeSource.
var SHA, FreeSHA = shaOf(Source), shaOf(FreeSource)

// shaOf is the name that the server gives a script.
func shaOf(source string) string {
	sum := sha1.Sum([]byte(source))
	return hex.EncodeToString(sum[:])
}

// Layout is the version of the layout of the keys. A later layout is refused: see locks.lua.
const Layout = 1

// Set, Take and Free work without the script for uncontended names. They are for exclusive holds.
const (
	// Set is SET NX, with or without waiters. The answer is TakeRefused or TakeGranted. Not for requests that were here
	// before.
	Set = "set" // value, px

	// Take is SET NX and EXISTS of the queue. The answer is TakeRefused if the name is not free, TakeGranted, or
	// TakeAhead: granted, although there are waiters (a hold has expired, and no waiter has the lock yet), so that
	// GiveWay must follow. Not for requests that were here before.
	Take = "take" // value, px

	// Free ends a hold. The answer is 1, or nil if the script is to be asked: there are waiters, or the hold has ended.
	Free = "free" // start of the value
)

// Answers to Set and Take.
const (
	TakeRefused int64 = iota
	TakeGranted
	TakeAhead
)

// The steps of the script, with their arguments. Those of requests and holds exist twice: the ones that start with "g"
// are for shared holds and permits.
const (
	// Wait asks for a hold, or a place in the queue: value, px. The answer is 1 for the hold, 0 for the place.
	Wait = "w"
	// WaitAgain is Wait for a request that may have been here before, and keeps its place: value, px, request, Keeps or
	// not.
	WaitAgain = "W"
	// Try asks for a hold and takes no place: value, px. The answer is 1, or who is in the way, see ParseState.
	Try = "t"
	// TryAgain is Try for a request that may have been here before: value, px, request, Keeps or not.
	TryAgain = "T"
	// GiveWay puts the grant of Take behind the waiters: value, px, "1" to wait. The answer is as for Wait or Try.
	GiveWay = "y"
	// Release ends a hold: start of the value, ms that the name stays closed. The answer is 1, Offered, or 0 for no
	// hold.
	Release = "r"
	// Remove takes away whatever a request has, hold or place: request.
	Remove = "x"
	// Cancel takes away whatever one try has, hold or place, unless others were answered with it: value.
	Cancel = "c"
	// Expire is Release for a hold of any kind, unless others were answered with it: start of the value, ms that the
	// name stays closed.
	Expire = "e"
	// Quit ends one try's hold, or removes its place, on a server that has exclusive holds only: start of the value, ms
	// that the name stays closed. Redlock's.
	Quit = "q"
	// Undo is Quit for an attempt that has ended, unless others were answered with its hold: start of the value.
	Undo = "u"
	// Decline gives back what was handed to a try that has ended: client, nonce. A push says no more than these.
	Decline = "d"
	// Renew prolongs a hold and never shortens it: start of the value, px. The answer is 1, or 0 for no hold.
	Renew = "n"
	// Accept makes an offer a hold of its whole time: start of the value, px. The answer is as for Renew.
	Accept = "a"
	// Settle hands over if the present hold has run out. The answer is the remaining time of the hold in ms, or -2
	// without one.
	Settle = "s"
	// Look returns the state of a client's places, and shows that the client lives: client, nonces. See ParseLooked.
	Look = "l"
	// Peek takes the keys of several names and returns the names that need a Look: their number, client. See ParsePeeked.
	Peek = "p"
	// Inform returns the holders and the number of waiters. See ParseState.
	Inform = "i"
	// Marked asks whether Force ended a hold, and removes the mark: start of the value. Its third key is Keys.Marks. The
	// answer is read by ParseMarked.
	Marked = "K"
	// Force takes the keys of a name and its Keys.Marks. It ends the hold whose value starts so, or all holds if that is
	// empty, and leaves a mark for each: start of the value, MarkOf the reason. The answer is as for Release.
	Force = "f"

	// These are the same for shared holds and permits; what stays closed for a minimum hold is the share.
	GroupWait      = "gw"
	GroupWaitAgain = "gW"
	GroupTry       = "gt"
	GroupTryAgain  = "gT"
	GroupRelease   = "gr"
	GroupRenew     = "gn"
	GroupAccept    = "ga"

	// TryAll takes the keys of several names: "1" if the requests may have been here before, value and request of each.
	TryAll = "m"
)

// Keeps means that a hold which the request has through another client is kept: both clients are answered with it, and
// from then on only a release ends it. The answer is read by ParseKept. TryAll has it in any case.
const Keeps = "1"

// With these in the place of Keeps, a hold that the request has stays also if it is this client's. With KeepsShared it is
// also spared by what removes an attempt; with KeepsSpared it stays only where it is spared already; with Finds the step
// names it and changes nothing.
const (
	KeepsAny    = "2"
	KeepsShared = "3"
	KeepsSpared = "4"
	Finds       = "5"
)

// Mismatch is the answer to a request for a name that is in use with another kind or limit.
const Mismatch = -1

// Offered is the answer to a release that offered the lock to the next in line, and OfferTime how long an offer stands
// that is not accepted.
const (
	Offered   = 3
	OfferTime = time.Second
)

// MaxLook bounds the nonces in one Look, and MaxPeek the names in one Peek: Lua passes arguments on a stack of limited
// size, and no other client is served meanwhile.
const (
	MaxLook = 1000
	MaxPeek = 500
)

// Keys of one lock name. They share one hash tag, hence one slot of a cluster.
type Keys struct{ Lock, Queue, Seen string }

const (
	queueSuffix = ":q"
	seenSuffix  = ":s"
	marksSuffix = ":f"
)

// KeysOf returns the keys of name. The name is escaped so that it holds neither brace: a hash tag ends at the first
// closing brace, and a name that brought its own would put its keys in different slots. The prefix has no braces
// either.
func KeysOf(prefix, name string) Keys {
	name = escape(name)
	both := prefix + "{" + name + "}" + queueSuffix + prefix + "{" + name + "}" + seenSuffix // one piece of memory
	lock := len(prefix) + len(name) + len("{}")
	queue := lock + len(queueSuffix)
	return Keys{Lock: both[:lock], Queue: both[:queue], Seen: both[queue:]}
}

// KeysOfLock returns the keys that belong to a lock key.
func KeysOfLock(lock string) Keys {
	queue := lock + queueSuffix
	return Keys{Lock: queue[:len(lock)], Queue: queue, Seen: lock + seenSuffix}
}

// mark is the first byte of every mark. Earlier versions wrote it alone.
const mark = "1"

// MarkOf returns the mark of an ended hold, with the reason and its author. A NUL precedes each of the latter.
func MarkOf(reason, by, principal string) string {
	text := mark + reason
	for _, s := range []string{by, principal} {
		text += "\x00" + strings.ReplaceAll(s, "\x00", "")
	}
	return text
}

// ParseMarked reads the answer to Marked. It is false if the hold has no mark. Marks of earlier versions have the reason
// alone.
func ParseMarked(answer any) (reason, by, principal string, marked bool) {
	list, _ := answer.([]any)
	if len(list) != 1 {
		return "", "", "", false
	}
	text, _ := list[0].(string)
	reason, marked = strings.CutPrefix(text, mark)
	if end := strings.LastIndexByte(reason, 0); end >= 0 {
		reason, principal = reason[:end], reason[end+1:]
	}
	if end := strings.LastIndexByte(reason, 0); end >= 0 {
		reason, by = reason[:end], reason[end+1:]
	}
	return reason, by, principal, marked
}

// Marks returns the keys for Force and Marked: the marks of holds that were taken away take the place of Seen.
func (k Keys) Marks() Keys {
	k.Seen = k.Lock + marksSuffix
	return k
}

// Pattern is a pattern for SCAN that matches the lock keys of all names that start with namePrefix, and maybe other
// keys.
func Pattern(prefix, namePrefix string) string {
	return glob.Replace(prefix+"{"+escape(namePrefix)) + "*}"
}

// glob escapes what SCAN's patterns read as more than a character.
var glob = strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`, "]", `\]`)

// NameOf is the inverse of KeysOf for a lock key. It is false for any other key.
func NameOf(prefix, key string) (name string, ok bool) {
	text, ok := strings.CutPrefix(key, prefix+"{")
	if !ok {
		return "", false
	}
	text, ok = strings.CutSuffix(text, "}")
	if !ok || strings.ContainsAny(text, "{}") {
		return "", false
	}
	name = unescaper.Replace(text)
	return name, escape(name) == text
}

// unescaper is the inverse of escaper.
var unescaper = strings.NewReplacer("%25", "%", "%7B", "{", "%7D", "}")

// escape is injective: the three characters that it writes as %XX do not stay as they are anywhere.
func escape(name string) string {
	if !strings.ContainsAny(name, "%{}") {
		return name
	}
	return escaper.Replace(name)
}

// escaper writes what a hash tag must not hold, and the percent sign itself.
var escaper = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D")

// Millis writes d in milliseconds, rounded up: a hold may last longer than asked for, never shorter.
func Millis(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}

// PushKind is the meaning of a message on a client's channel.
type PushKind uint8

const (
	// PushOffered: the lock was handed over to the try Push.Nonce, for OfferTime, until it accepts.
	PushOffered PushKind = iota
	// PushClosed: the lock stays closed for Push.For, although it has no holder.
	PushClosed
	// PushAsked: waiters of the client stand behind one that did not accept. A Look shows that it lives.
	PushAsked
)

// Push is a message on a client's channel.
type Push struct {
	Kind  PushKind
	Nonce string
	Lock  string // key
	For   time.Duration
}

// ParsePush reads a message. It is false for foreign ones.
func ParsePush(text string) (Push, bool) {
	first, rest, ok := strings.Cut(text, "|")
	if !ok || first == "" {
		return Push{}, false
	}
	if nonce, offered := strings.CutPrefix(first, "!"); offered {
		return Push{Kind: PushOffered, Nonce: nonce, Lock: rest}, true
	}
	if first == "?" {
		return Push{Kind: PushAsked, Lock: rest}, true
	}
	if first != "c" {
		return Push{}, false
	}
	at := strings.LastIndexByte(rest, '|')
	if at < 0 {
		return Push{}, false
	}
	ms, err := strconv.ParseInt(rest[at+1:], 10, 64)
	if err != nil {
		return Push{}, false
	}
	return Push{Kind: PushClosed, Lock: rest[:at], For: time.Duration(ms) * time.Millisecond}, true
}

// Channel returns the channel of a client, and of all clients with the same prefix when client is empty: the script
// appends the name.
func Channel(prefix, client string) string { return prefix + "push:" + client }
