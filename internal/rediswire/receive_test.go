package rediswire

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// hear returns what a wire reads of text, after which its server goes away.
func hear(t testing.TB, text string) (any, error) {
	t.Helper()
	ours, theirs := net.Pipe()
	go func() {
		_, _ = io.WriteString(theirs, text) // an error: the reader has seen enough
		theirs.Close()
	}()
	defer ours.Close()
	return receive(bufio.NewReader(ours), maxDepth)
}

func TestWireReceives(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]any{
		":-2\r\n":           int64(-2),
		"$5\r\na\r\nbc\r\n": "a\r\nbc",
		"$0\r\n\r\n":        "",
		"$-1\r\n":           nil,
		"+OK\r\n":           "OK",
		"-ERR no\r\n":       redisconn.ServerError("ERR no"),
		"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n:5\r\n$3\r\nERR\r\n": []any{int64(1), []any{"x", int64(5)}, "ERR"},
		"*0\r\n": []any{},
	} {
		if got, err := hear(t, text); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q was read as %#v, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"HTTP/1.1 400 Bad Request\r\n", ":x\r\n", "$-2\r\n", "$99999999999\r\n", "*-3\r\n", "*9999999\r\n",
		":1\n", "\r\n", "*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n", strings.Repeat("x", 10000),
	} {
		if got, err := hear(t, text); err == nil {
			t.Errorf("%.40q was read as %#v, want an error", text, got)
		}
	}
	for _, text := range []string{"", ":1", "$5\r\nabc", "*2\r\n:1\r\n"} {
		if got, err := hear(t, text); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q was read as %#v, %v, want the end of the connection", text, got, err)
		}
	}
}

func FuzzWireReceives(f *testing.F) {
	f.Add("*2\r\n:1\r\n$1\r\nx\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		_, _ = hear(t, text) // it must end
	})
}

// A request is what the server expects of EVALSHA: as many arguments as it says, and as many keys.
func TestEncodes(t *testing.T) {
	t.Parallel()
	keys := redisscript.KeysOf("p:", "n")
	take := &Step{Code: redisscript.Take, Keys: keys, Args: []string{"value", "100"}}
	free := &Step{Code: redisscript.Free, Keys: keys, Args: []string{"start"}}
	quit := &Step{Code: redisscript.Quit, Keys: keys, Args: []string{"start", "0"}}
	three := []any{keys.Lock, keys.Queue, keys.Seen}
	for name, c := range map[string]struct {
		steps   []*Step
		sharded bool
		calls   []int // steps in each
		want    [][]any
	}{
		"one of each": {
			[]*Step{quit, free, take}, false, []int{1, 1, 1}, [][]any{
				{"set", keys.Lock, "value", "nx", "px", "100"}, {"exists", keys.Queue},
				slices.Concat([]any{"evalsha", redisscript.SHA, "3"}, three,
					[]any{"p:push:", "0", redisscript.Quit, "2", "start", "0"}),
				slices.Concat([]any{"evalsha", redisscript.FreeSHA, "3"}, three, []any{"start"}),
			},
		},
		"together": {
			[]*Step{free, free}, false, []int{2}, [][]any{
				slices.Concat([]any{"evalsha", redisscript.FreeSHA, "6"}, three, three, []any{"start", "start"}),
			},
		},
		"on a cluster": {
			[]*Step{free, free}, true, []int{1, 1}, [][]any{
				slices.Concat([]any{"evalsha", redisscript.FreeSHA, "3"}, three, []any{"start"}),
				slices.Concat([]any{"evalsha", redisscript.FreeSHA, "3"}, three, []any{"start"}),
			},
		},
		"a renewal on a cluster": {
			[]*Step{{Code: redisscript.Renew, Keys: keys, Args: []string{"start", "5"}, Asking: true}}, true,
			[]int{1}, [][]any{
				{"asking"},
				{"evalsha", redisscript.SHA, "1", keys.Lock, "p:push:", "1", redisscript.Renew, "2", "start", "5"},
			},
		},
		"as many as fit": {slices.Repeat([]*Step{quit}, maxSteps+1), false, []int{maxSteps, 1}, nil},
	} {
		var e encoder
		var calls []int
		e.encode(c.steps, "p:push:", c.sharded, func(_ kind, steps []*Step) { calls = append(calls, len(steps)) })
		if !slices.Equal(calls, c.calls) {
			t.Errorf("%s: calls of %v steps, want %v", name, calls, c.calls)
		}
		in := bufio.NewReader(bytes.NewReader(e.out))
		var got [][]any
		for {
			request, err := receive(in, maxDepth)
			if err != nil {
				break
			}
			got = append(got, request.([]any))
		}
		if c.want != nil && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: sent %v, want %v", name, got, c.want)
		}
		if len(got) < len(calls) {
			t.Errorf("%s: %d requests for %d calls", name, len(got), len(calls))
		}
	}
}
