// Package redisscript is the part of a lock that runs inside Redis: one Lua script, and how its keys, arguments and
// values are written. Package redis runs it on one server or cluster, package redlock on several servers at once.
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

// SHA is the name under which EVALSHA knows Source.
var SHA = func() string {
	sum := sha1.Sum([]byte(Source))
	return hex.EncodeToString(sum[:])
}()

// The steps of the script, with their arguments. Those of requests and holds exist twice: the ones that start with "g"
// are for shared holds and permits.
const (
	Wait        = "w" // value, px
	WaitAgain   = "W" // value, px, request
	Try         = "t" // value, px
	TryAgain    = "T" // value, px, request
	Release     = "r" // start of the value, ms that the name stays closed
	ReleaseFast = "R" // start of the value
	Remove      = "x" // request
	Cancel      = "c" // value
	Quit        = "q" // start of the value, ms that the name stays closed
	Decline     = "d" // client, nonce
	Renew       = "n" // start of the value, px
	Accept      = "a" // start of the value, px
	Settle      = "s"
	Look        = "l" // client, nonces…
	Inform      = "i"
	Mark        = "k" // its third key is Keys.Marks
	Marked      = "K" // start of the value; its third key is Keys.Marks
	Force       = "f"

	GroupWait      = "gw" // value, px
	GroupWaitAgain = "gW" // value, px, request
	GroupTry       = "gt" // value, px
	GroupTryAgain  = "gT" // value, px, request
	GroupRelease   = "gr" // start of the value, ms that the share stays closed
	GroupRenew     = "gn" // start of the value, px
	GroupAccept    = "ga" // start of the value, px

	// TryAll takes the keys of several names: "1" if the requests may have been here before, value and request of each.
	TryAll = "m"
)

// Mismatch is the answer to a request for a name that is in use with another kind or limit.
const Mismatch = -1

// Offered is the answer to a release that offered the lock to the next in line, and OfferTime how long an offer stands
// that is not accepted.
const (
	Offered   = 3
	OfferTime = 2 * time.Second
)

// MaxLook bounds the nonces in one Look: Lua passes arguments on a stack of limited size.
const MaxLook = 1000

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
	return KeysOfLock(prefix + "{" + escape(name) + "}")
}

// KeysOfLock returns the keys that belong to a lock key.
func KeysOfLock(lock string) Keys {
	queue := lock + queueSuffix
	return Keys{Lock: queue[:len(lock)], Queue: queue, Seen: lock + seenSuffix}
}

// Marks returns the keys for Mark and Marked: the marks of holds that were taken away take the place of Seen.
func (k Keys) Marks() Keys {
	k.Seen = k.Lock + marksSuffix
	return k
}

// Pattern is a pattern for SCAN that matches the lock keys of all names that start with namePrefix, and maybe other
// keys.
func Pattern(prefix, namePrefix string) string {
	return glob.Replace(prefix+"{"+escape(namePrefix)) + "*}"
}

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

var unescaper = strings.NewReplacer("%25", "%", "%7B", "{", "%7D", "}")

// escape is injective: the three characters that it writes as %XX do not stay as they are anywhere.
func escape(name string) string {
	if !strings.ContainsAny(name, "%{}") {
		return name
	}
	return escaper.Replace(name)
}

var escaper = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D")

// Millis writes d in milliseconds, rounded up: a hold may last longer than asked for, never shorter.
func Millis(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}

// PushKind says what a message on a client's channel means.
type PushKind uint8

const (
	// PushGranted: the lock was handed over to the attempt Push.Nonce.
	PushGranted PushKind = iota
	// PushOffered: likewise, for OfferTime, until it accepts.
	PushOffered
	// PushClosed: the lock stays closed for Push.For, although nobody holds it.
	PushClosed
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
	if first != "c" {
		return Push{Kind: PushGranted, Nonce: first, Lock: rest}, true
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
