package rediswire

import (
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const maxSteps = 128 // in one call of a script: bounds how long it keeps the server from others

// A call is one request with the answers that belong to it.
type call struct {
	kind  kind
	steps int
	sent  time.Time
}

type kind uint8

// Kinds of calls, in the order in which those that leave together are sent: what ends a hold comes behind what may have
// asked for it. The other way round nothing goes wrong, since what ends a hold names it.
const (
	sets    kind = iota // SET NX: see redisscript.Set
	takes               // SET NX and EXISTS: see redisscript.Take
	scripts             // the script
	frees               // the short script: see redisscript.Free
	kinds
)

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

// The beginnings of the calls of a script.
var verbs = [kinds][2][]byte{
	frees:   {verb("evalsha", redisscript.FreeSHA), verb("eval", redisscript.FreeSource)},
	scripts: {verb("evalsha", redisscript.SHA), verb("eval", redisscript.Source)},
}

func verb(name, script string) []byte { return bulk(bulk(nil, name), script) }

var (
	asking = bulk(header(nil, '*', 1), "asking")
	set    = bulk(header(nil, '*', 6), "set")
	exists = bulk(header(nil, '*', 2), "exists")
)

// encoder writes requests.
type encoder struct {
	out    []byte
	groups [kinds][]*Step
}

// encode writes the requests for steps, and passes on each call with its steps in the order in which they are answered.
// With sharded, each step is a call of its own, since keys may be on different nodes.
func (e *encoder) encode(steps []*Step, channels string, sharded bool, each func(kind, []*Step)) {
	e.out = e.out[:0]
	for _, s := range steps {
		k := kindOf(s)
		e.groups[k] = append(e.groups[k], s)
	}
	for k := range kinds {
		for rest := e.groups[k]; len(rest) > 0; {
			n := 1
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

func (e *encoder) call(k kind, steps []*Step, channels string, sharded bool) {
	s := steps[0]
	if s.Asking {
		e.out = append(e.out, asking...)
	}
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
	names, arguments := 0, 5
	for _, s := range steps {
		names += 1 + len(s.Others)
		arguments += 2 + len(s.Args)
	}
	where := "0"
	if sharded {
		where = "1"
	}
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

func (e *encoder) keys(steps []*Step) {
	for _, s := range steps {
		e.out = bulk(bulk(bulk(e.out, s.Keys.Lock), s.Keys.Queue), s.Keys.Seen)
		for _, k := range s.Others {
			e.out = bulk(bulk(bulk(e.out, k.Lock), k.Queue), k.Seen)
		}
	}
}

func header(out []byte, kind byte, n int) []byte {
	out = append(out, kind)
	out = strconv.AppendInt(out, int64(n), 10)
	return append(out, "\r\n"...)
}

func bulk(out []byte, text string) []byte {
	out = header(out, '$', len(text))
	out = append(out, text...)
	return append(out, "\r\n"...)
}

func number(out []byte, n int) []byte { return bulk(out, strconv.Itoa(n)) }

// mark notes when steps leave.
func mark(steps []*Step, at backend.Instant) {
	for _, s := range steps {
		s.SentAt = at
	}
}
