package redlock

import (
	"errors"
	"io"
	"net"
	"reflect"
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
	return newWire(ours).receive()
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
		"HTTP/1.1 400 Bad Request\r\n", ":x\r\n", "$-2\r\n", "$99999999999\r\n", "*-3\r\n", "*9999999\r\n", ":1\n", "\r\n",
		"*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n", strings.Repeat("x", 10000),
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
func TestWireSends(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	defer theirs.Close()
	w := newWire(ours)
	keys := redisscript.KeysOf("p:", "n")
	steps := make([]*step, maxSteps+1)
	for i := range steps {
		steps[i] = &step{code: redisscript.Quit, keys: keys, args: []string{"start", "0"}}
	}
	w.encode(evalsha, "p:push:", steps)
	go func() {
		w.flush()
		ours.Close()
	}()
	server := newWire(theirs)
	for _, n := range []int{maxSteps, 1} {
		call, err := server.receive()
		list, _ := call.([]any)
		if err != nil || len(list) != 5+7*n {
			t.Fatalf("a call of %d steps has %d arguments, %v", n, len(list), err)
		}
		want := []any{"evalsha", redisscript.SHA, map[int]string{maxSteps: "384", 1: "3"}[n], keys.Lock, keys.Queue, keys.Seen}
		if !reflect.DeepEqual(list[:6], want) {
			t.Errorf("a call begins with %v", list[:6])
		}
		if got, want := list[len(list)-4:], []any{redisscript.Quit, "2", "start", "0"}; !reflect.DeepEqual(got, want) {
			t.Errorf("a call ends with %v, want %v", got, want)
		}
	}
	if extra, err := server.receive(); err == nil {
		t.Errorf("and then comes %v", extra)
	}
}
