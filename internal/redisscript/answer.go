package redisscript

// This file reads the script's answers. Each parser is false for anything that the script does not answer: another
// script under the same name, or a proxy, must not pass for a lock service.

import (
	"strings"
	"time"
)

// State is the answer of a refused Try and of Inform about a name.
type State struct {
	Value     string        // of the lock key; empty without one
	Hold      Hold          // valid if Held
	Held      bool          // false also for the mark of a closed name, and in Inform for a name that is held in shares
	ExpiresIn time.Duration // of the value; zero if not known
	Waiters   int           // from Inform only
	Shares    []State       // from Inform only: the holds of a name that is held in shares
}

// ParseState reads {value, time to live} and {value, time to live, waiters, and both of every share}. It is false for
// anything else.
func ParseState(answer any) (State, bool) {
	list, _ := answer.([]any)
	if len(list) < 2 || len(list) > 3 && len(list)%2 == 0 {
		return State{}, false
	}
	s := stateOf(list[0], list[1])
	if len(list) == 2 {
		return s, true
	}
	waiters, _ := list[2].(int64)
	s.Waiters = int(waiters)
	for i := 3; i < len(list); i += 2 {
		s.Shares = append(s.Shares, stateOf(list[i], list[i+1]))
	}
	return s, true
}

// stateOf reads a value and its time to live in milliseconds, which is negative for a key that has none.
func stateOf(value, left any) State {
	var s State
	s.Value, _ = value.(string)
	s.Hold, s.Held = ParseHold(s.Value)
	ms, _ := left.(int64)
	s.ExpiresIn = max(0, time.Duration(ms)*time.Millisecond)
	return s
}

// Refused is why a TryAll granted nothing.
type Refused struct {
	Index    int // of the name that is in the way
	Mismatch bool
	State    State // of that name, unless it is a mismatch
}

// ParseRefused reads {number, value, time to live} and {number} of one among so many names. It is false for anything
// else.
func ParseRefused(answer any, names int) (Refused, bool) {
	list, _ := answer.([]any)
	if len(list) != 1 && len(list) != 3 {
		return Refused{}, false
	}
	n, _ := list[0].(int64)
	if n < 1 || n > int64(names) {
		return Refused{}, false
	}
	if len(list) == 1 {
		return Refused{Index: int(n) - 1, Mismatch: true}, true
	}
	return Refused{Index: int(n) - 1, State: stateOf(list[1], list[2])}, true
}

// ParseKept reads {start}: the incarnation of the hold that a request has already, and that stays as it is. It is false
// for anything else.
func ParseKept(answer any, request string) (incarnation string, ok bool) {
	list, _ := answer.([]any)
	if len(list) != 1 {
		return "", false
	}
	return incarnationOf(list[0], request)
}

// ParseAllKept reads {0, start…}: for each request the incarnation as of ParseKept, or nothing if it was granted
// again. It is false for anything else.
func ParseAllKept(answer any, requests []string) (incarnations []string, ok bool) {
	list, _ := answer.([]any)
	if len(list) != 1+len(requests) || list[0] != int64(0) {
		return nil, false
	}
	for i, r := range requests {
		var incarnation string
		if list[i+1] != "" {
			if incarnation, ok = incarnationOf(list[i+1], r); !ok {
				return nil, false
			}
		}
		incarnations = append(incarnations, incarnation)
	}
	return incarnations, true
}

// incarnationOf takes the request off the start of a value. It is false if the start is another request's.
func incarnationOf(start any, request string) (string, bool) {
	text, _ := start.(string)
	return strings.CutSuffix(text, StartOf("", request))
}

// Place is a look's answer about one waiter.
type Place int64

const (
	// PlaceGone: neither the place nor a hold that came of it is there.
	PlaceGone Place = iota
	// PlaceQueued: it stands in the queue.
	PlaceQueued
	// PlaceHolds: it holds, and its time to live has restarted.
	PlaceHolds
)

// Looked is the answer to a Look.
type Looked struct {
	ExpiresIn time.Duration // of the present hold; negative without one
	Length    int           // of the queue
	Shared    bool          // the present hold is one of several, or may be
	Places    []Place       // of the waiters asked for
}

// ParseLooked reads the answer to a Look for so many waiters. It is false for anything else.
func ParseLooked(answer any, waiters int) (Looked, bool) {
	list, _ := answer.([]any)
	if len(list) != waiters+3 {
		return Looked{}, false
	}
	ms, _ := list[0].(int64)
	length, _ := list[1].(int64)
	shared, _ := list[2].(int64)
	l := Looked{
		ExpiresIn: time.Duration(ms) * time.Millisecond, Length: int(length), Shared: shared == 1,
		Places: make([]Place, waiters),
	}
	for i := range l.Places {
		place, _ := list[i+3].(int64)
		l.Places[i] = Place(place)
	}
	return l, true
}

// ParsePeeked reads the answer to a Peek at so many names: the indexes of those that are worth a Look. It is false for
// anything else.
func ParsePeeked(answer any, names int) (worth []int, ok bool) {
	list, ok := answer.([]any)
	for _, each := range list {
		n, _ := each.(int64)
		if n < 1 || n > int64(names) {
			return nil, false
		}
		worth = append(worth, int(n)-1)
	}
	return worth, ok
}
