package redlock

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// wire is one connection to a server on which the script is called, in the server's protocol (RESP2) and nothing
// beside.
//
// The client library was rejected for this: a call needs one write and one read on each of five servers, and the
// library's pool, checks and hooks around them cost more than both.
type wire struct {
	net.Conn
	in *bufio.Reader

	writing sync.Mutex // held from encode to the end of flush; protects the following fields
	out     []byte     // the request
	unsent  bool       // nothing of it has left
}

const keptMemory = 64 << 10 // of a large request

func newWire(c net.Conn) *wire { return &wire{Conn: c, in: bufio.NewReader(c)} }

// The beginnings of the two ways to call the script.
var (
	evalsha = bulk(bulk(nil, "evalsha"), redisscript.SHA)
	eval    = bulk(bulk(nil, "eval"), redisscript.Source) // the source travels along, and the server keeps it
)

const maxSteps = 128 // in one call of the script: bounds how long it keeps the server from others

// encode writes calls of the script for steps to memory. flush must follow.
func (w *wire) encode(verb []byte, channels string, steps []*step) {
	w.writing.Lock()
	out := w.out[:0]
	for len(steps) > 0 {
		call := steps[:min(maxSteps, len(steps))]
		steps = steps[len(call):]
		arguments := 5
		for _, s := range call {
			arguments += 5 + len(s.args)
		}
		out = header(out, '*', arguments)
		out = append(out, verb...)
		out = number(out, 3*len(call))
		for _, s := range call {
			out = bulk(bulk(bulk(out, s.keys.Lock), s.keys.Queue), s.keys.Seen)
		}
		out = bulk(bulk(out, channels), "0")
		for _, s := range call {
			out = number(bulk(out, s.code), len(s.args))
			for _, a := range s.args {
				out = bulk(out, a)
			}
		}
	}
	w.out = out
}

// flush sends what was encoded. If that fails the connection ends, which its reader notices.
func (w *wire) flush() {
	defer w.writing.Unlock()
	n, err := w.Write(w.out)
	if err != nil {
		w.unsent = n == 0
		_ = w.Close()
	}
	if cap(w.out) > keptMemory {
		w.out = nil
	}
}

// failure says what became of the last request, if that was not answered because of err.
func (w *wire) failure(err error) *redisconn.Failure {
	_ = w.SetWriteDeadline(time.Unix(1, 0)) // whoever writes ends
	w.writing.Lock()
	defer w.writing.Unlock()
	f := redisconn.FailureOf(err)
	f.Sent = f.Sent && !w.unsent
	return f
}

// drainTime bounds how long the end of a connection is awaited that was given up in the middle of an exchange.
const drainTime = time.Second

// end closes the wire. If an exchange was under way, it waits until the server has run all of it, which it says by
// closing the connection too: what is sent on the next connection must not come before that, since it may be what
// tidies up behind it.
func (w *wire) end(busy bool) {
	half, ok := w.Conn.(interface{ CloseWrite() error })
	if busy && ok && w.SetDeadline(time.Now().Add(drainTime)) == nil && half.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, w.Conn) // its end is all that matters
	}
	_ = w.Close()
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

// Bounds of an answer: far more than the script ever gives, and little enough to survive a server that is none.
const (
	maxText  = 64 << 20
	maxItems = 1 << 20
	maxDepth = 3
)

var errProtocol = errors.New("the server does not speak the Redis protocol")

// receive reads one answer: an int64, a string, nil, or a []any of these. An error that the server answers is an
// answer, of type redisconn.ServerError; err is the connection's.
func (w *wire) receive() (answer any, err error) { return w.item(maxDepth) }

func (w *wire) item(depth int) (any, error) {
	line, err := w.in.ReadSlice('\n')
	if err != nil {
		return nil, err
	}
	if len(line) < 3 || line[len(line)-2] != '\r' {
		return nil, fmt.Errorf("%w: %q", errProtocol, line)
	}
	kind, rest := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		return string(rest), nil
	case '-':
		return redisconn.ServerError(rest), nil
	}
	n, err := strconv.ParseInt(string(rest), 10, 64)
	switch {
	case err != nil:
	case kind == ':':
		return n, nil
	case (kind == '$' || kind == '*') && n == -1:
		return nil, nil
	case kind == '$' && n >= 0 && n <= maxText:
		text := make([]byte, n+2)
		_, err := io.ReadFull(w.in, text)
		return string(text[:n]), err
	case kind == '*' && n >= 0 && n <= maxItems && depth > 0:
		list := make([]any, 0, min(n, 128))
		for range n {
			item, err := w.item(depth - 1)
			if err != nil {
				return nil, err
			}
			list = append(list, item)
		}
		return list, nil
	}
	return nil, fmt.Errorf("%w: %q", errProtocol, line)
}
