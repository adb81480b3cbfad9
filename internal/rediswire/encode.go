package rediswire

// This file writes requests. Steps that leave together are grouped by kind, and steps of a script share one EVALSHA
// where they may, with their keys and arguments one after the other: on a connection with 64 callers that halves what a
// step costs the server, 18.6 µs for acquire and release against 39.5 µs with a call for each step (Redis 7.0).

import (
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// maxSteps bounds the steps in one call of a script, and with them how long it keeps the server from others.
const maxSteps = 128

// call is one request with the answers that belong to it: one answer for a script's call, whatever its number of steps;
// two for takes; and one more where ASKING goes before it.
type call struct {
	kind  kind
	steps int
	sent  time.Time
}

// kind is which commands a step takes.
type kind uint8

// Kinds of calls, in the order in which those that leave together are sent: what ends a hold comes behind what may have
// asked for it. The other way round nothing goes wrong, since what ends a hold names it.
const (
	// sets are SET NX: see redisscript.Set.
	sets kind = iota
	// takes are SET NX and EXISTS: see redisscript.Take.
	takes
	// scripts are calls of the script.
	scripts
	// frees are calls of the short script: see redisscript.Free.
	frees
	kinds
)

// kindOf is the kind of a step, by its code.
func kindOf(s *Step) kind {
	switch s.Code {
	case redisscript.Set:
		return sets
	case redisscript.Take:
		return takes
	case redisscript.Free:
		return frees
	}
	return scripts
}

// native reports whether calls are not of a script: each carries one step.
func (k kind) native() bool { return k <= takes }

// verbs are the beginnings of the calls of a script: by its hash, which the server knows once it has seen the source,
// and by the source itself, which travels along after a NOSCRIPT and is kept by the server.
var verbs = [kinds][2][]byte{
	frees:   {verb("evalsha", redisscript.FreeSHA), verb("eval", redisscript.FreeSource)},
	scripts: {verb("evalsha", redisscript.SHA), verb("eval", redisscript.Source)},
}

// verb writes the command and its first argument once, for all calls.
func verb(name, script string) []byte { return bulk(bulk(nil, name), script) }

var (
	// The beginnings of commands that are no script's.
	asking = bulk(header(nil, '*', 1), "asking")
	set    = bulk(header(nil, '*', 6), "set")
	exists = bulk(header(nil, '*', 2), "exists")
)

// encoder writes requests. It belongs to the goroutine that has set wire.writing, and keeps its memory from one write
// to the next.
type encoder struct {
	out    []byte
	groups [kinds][]*Step
}

// encode writes the requests for steps, and passes on each call with its steps in the order in which they are answered.
// With sharded, each step is a separate call, since keys may be on different nodes. The slices that it passes on are
// used again by the next write.
func (e *encoder) encode(steps []*Step, channels string, sharded bool, each func(kind, []*Step)) {
	e.out = e.out[:0]
	for _, s := range steps {
		k := kindOf(s)
		e.groups[k] = append(e.groups[k], s)
	}
	for k := range kinds {
		for rest := e.groups[k]; len(rest) > 0; {
			n := 1
			// As many as one call may carry; those that bring the script's source are not mixed with those that do not.
			for !sharded && !k.native() && n < min(maxSteps, len(rest)) && rest[n].inline == rest[0].inline {
				n++
			}
			e.call(k, rest[:n], channels, sharded)
			each(k, rest[:n])
			rest = rest[n:]
		}
		clear(e.groups[k])
		e.groups[k] = e.groups[k][:0]
	}
}

// call writes one call.
func (e *encoder) call(k kind, steps []*Step, channels string, sharded bool) {
	s := steps[0]
	if s.Asking {
		e.out = append(e.out, asking...)
	}
	// SET key value NX PX ms, and for a take EXISTS queue behind it.
	if k.native() {
		e.out = bulk(bulk(append(e.out, set...), s.Keys.Lock), s.Args[0])
		e.out = bulk(bulk(bulk(e.out, "nx"), "px"), s.Args[1])
		if k == sets {
			return
		}
		if s.Asking {
			e.out = append(e.out, asking...)
		}
		e.out = bulk(append(e.out, exists...), s.Keys.Queue)
		return
	}
	verb := verbs[k][0]
	if s.inline {
		verb = verbs[k][1]
	}
	if k == frees {
		e.out = number(append(header(e.out, '*', 3+4*len(steps)), verb...), 3*len(steps))
		e.keys(steps)
		for _, s := range steps {
			e.out = bulk(e.out, s.Args[0])
		}
		return
	}
	// EVALSHA, the hash, the number of keys, the channel prefix, and whether names are on different servers.
	names, arguments := 0, 5
	for _, s := range steps {
		names += 1 + len(s.Others)
		arguments += 2 + len(s.Args)
	}
	where := "0"
	if sharded {
		where = "1"
	}
	// One key is found wherever it is while its slot moves, which may take longer than a TTL: a call with several keys
	// is TRYAGAIN for as long as some of them have moved and some have not.
	if sharded && names == 1 && s.Code == redisscript.Renew {
		// One key is found wherever it is while its slot moves, which may take longer than a TTL.
		e.out = bulk(number(append(header(e.out, '*', arguments+1), verb...), 1), s.Keys.Lock)
	} else {
		e.out = number(append(header(e.out, '*', arguments+3*names), verb...), 3*names)
		e.keys(steps)
	}
	e.out = bulk(bulk(e.out, channels), where)
	for _, s := range steps {
		e.out = number(bulk(e.out, s.Code), len(s.Args))
		for _, a := range s.Args {
			e.out = bulk(e.out, a)
		}
	}
}

// keys writes the keys of steps, three for each name.
func (e *encoder) keys(steps []*Step) {
	for _, s := range steps {
		e.out = bulk(bulk(bulk(e.out, s.Keys.Lock), s.Keys.Queue), s.Keys.Seen)
		for _, k := range s.Others {
			e.out = bulk(bulk(bulk(e.out, k.Lock), k.Queue), k.Seen)
		}
	}
}

// header writes the beginning of an array or a text of n.
func header(out []byte, kind byte, n int) []byte {
	out = append(out, kind)
	out = strconv.AppendInt(out, int64(n), 10)
	return append(out, "\r\n"...)
}

// bulk writes a text.
func bulk(out []byte, text string) []byte {
	out = header(out, '$', len(text))
	out = append(out, text...)
	return append(out, "\r\n"...)
}

// number writes a number as a text, which is how commands carry numbers.
func number(out []byte, n int) []byte { return bulk(out, strconv.Itoa(n)) }

// mark notes when steps leave.
func mark(steps []*Step, at backend.Instant) {
	for _, s := range steps {
		s.SentAt = at
	}
}
