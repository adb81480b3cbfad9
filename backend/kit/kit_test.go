package kit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
)

var some = Syntax{
	Driver: "some", Schemes: []string{"some"}, Secure: []string{"somes"}, Port: "77", User: true, Path: true,
	Options: []string{"prefix", "n", "yes"}, Timeout: 5 * time.Second,
}

func TestParseURL(t *testing.T) {
	u, err := some.ParseURL("some://ann:s%40c%2Fret@a,b:2,[::1]:3,[::2]/x/y/?prefix=q%3A&timeout=7s&n=4&yes=true")
	if err != nil {
		t.Fatal(err)
	}
	n, errN := u.Int("n", 1, 9)
	yes, errYes := u.Bool("yes")
	no, errNo := u.Bool("no")
	if err := errors.Join(errN, errYes, errNo); err != nil || n != 4 || !yes || no {
		t.Errorf("options: %d, %v, %v, %v", n, yes, no, err)
	}
	want := []string{"a:77", "b:2", "[::1]:3", "[::2]:77"}
	if !slices.Equal(u.Addresses, want) || u.User != "ann" || u.Password != "s@c/ret" || u.Path != "x/y" ||
		u.Timeout != 7*time.Second || u.TLS != nil || u.Options.Get("prefix") != "q:" || u.Scheme != "some" {
		t.Errorf("%+v", u)
	}
	for _, raw := range []string{"somes://a", "some://a?server-name=b"} {
		if u, err := some.ParseURL(raw); err != nil || u.TLS == nil || u.Timeout != 5*time.Second {
			t.Errorf("%s: %+v, %v", raw, u, err)
		}
	}
}

// TestPasswordFile: a URL takes its password from a file, and a new connection takes that of a replaced file.
func TestPasswordFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old secret\n")
	u, err := some.ParseURL("some://ann@a?password-file=" + file)
	if err != nil {
		t.Fatal(err)
	}
	if u.Password != "old secret" || u.CurrentPassword() != "old secret" {
		t.Errorf("passwords %q and %q", u.Password, u.CurrentPassword())
	}
	write("new") // has another size, whatever the clock of the file system
	for deadline := time.Now().Add(10 * time.Second); u.CurrentPassword() != "new"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the password is still %q", u.CurrentPassword())
		}
	}
	write("\n")
	for raw, why := range map[string]string{
		"some://ann@a?password-file=" + file:        "is empty",
		"some://ann@a?password-file=/nowhere":       "no such file",
		"some://ann:secret@a?password-file=" + file: "give one of them",
	} {
		if _, err := some.ParseURL(raw); !errors.Is(err, backend.ErrInvalidOption) || !strings.Contains(err.Error(), why) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want a reason with %q and no password", raw, err, why)
		}
	}
	plain := Syntax{Driver: "plain", Schemes: []string{"plain"}, Port: "1"}
	if _, err := plain.ParseURL("plain://a?password-file=" + file); err == nil {
		t.Error("a URL without users takes a password")
	}
}

func TestBadURLs(t *testing.T) {
	for raw, why := range map[string]string{
		"other://a": "not one of some, somes", "some:/a": "not one of",
		"some://": "no host: write some://localhost:77", "some://a,,b": "no host",
		"some://:1": "no host before the port", "some://a:0": "port", "some://a:65536": "port",
		"some://a:x": "port", "some://::1": "brackets",
		"some://a:1:2": "brackets", "some://a b": "host", "some://%zz": "host", "some://u:secret@": "no host",
		"some://u:secret%@a": "write %25", "some://u:sec/ret@a": "write %2F", "some://u:sec?ret@a": "%3F",
		"some://u:sec#ret@a": "write %23", "some://u:secret@a/%zz": "path",
		"some://a?what=1": `unknown option "what"; the options are prefix, n`, "some://a?n=1&n=2": "2 times",
		"some://a?timeout=0s": "timeout", "some://a?timeout=5": "such as 5s", "some://a?x=%zz": "option=value",
		"some://a?ca=/nowhere": "ca", "some://a?cert=/nowhere": "cert and key",
	} {
		_, err := some.ParseURL(raw)
		var invalid *backend.InvalidError
		var call *backend.CallError
		if !errors.As(err, &call) || call.Call != "open" || !errors.As(err, &invalid) ||
			!errors.Is(err, backend.ErrInvalidOption) || !strings.Contains(invalid.Why, why) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want a reason with %q and no password", raw, err, why)
		}
	}
	plain := Syntax{Driver: "plain", Schemes: []string{"plain"}, Port: "1"}
	for raw, why := range map[string]string{"plain://u:secret@a": "has a user", "plain://a/b": "has a path"} {
		if _, err := plain.ParseURL(raw); err == nil || !strings.Contains(err.Error(), why) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q", raw, err, why)
		}
	}
	u, _ := some.ParseURL("some://a?n=x&yes=si&prefix=long")
	_, errN := u.Int("n", 1, 9)
	_, errYes := u.Bool("yes")
	_, errTime := u.Duration("prefix")
	if errN == nil || errYes == nil || errTime == nil {
		t.Errorf("bad options: %v, %v, %v", errN, errYes, errTime)
	}
}

func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate()
		if err := g.Enter(); err != nil {
			t.Fatal(err)
		}
		bound, free := g.Bind(t.Context())
		defer free()
		if !g.Close() || g.Close() || !errors.Is(g.Enter(), backend.ErrClosed) {
			t.Error("closed once, and nobody comes in")
		}
		synctest.Wait()
		if !errors.Is(Ended(bound), backend.ErrClosed) || !errors.Is(Sleep(bound, time.Hour), backend.ErrClosed) ||
			g.Closing().Err() == nil {
			t.Errorf("a call goes on while the gate closes: %v", Ended(bound))
		}
		if !g.Go(func(ctx context.Context) { <-ctx.Done() }) {
			t.Error("work of a call that is inside is refused")
		}
		g.Leave()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := g.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("waited for work that does not end: %v", err)
		}
		if err := g.Wait(t.Context()); err != nil { // that has ended the work
			t.Errorf("second wait: %v", err)
		}
		if g.Go(func(context.Context) {}) {
			t.Error("work is accepted after the end")
		}
	})
}

func TestEnded(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.EOF)
	if err := Sleep(ctx, time.Hour); !errors.Is(err, context.Canceled) || errors.Is(err, io.EOF) {
		t.Errorf("the caller's own cause is not the contract's: %v", err)
	}
	if err := Sleep(t.Context(), time.Millisecond); err != nil {
		t.Error(err)
	}
}

func TestCallError(t *testing.T) {
	closed := errors.New("connection closed")
	classOf := func(err error) error {
		if errors.Is(err, closed) {
			return backend.ErrUnavailable
		}
		return nil
	}
	all := []error{backend.ErrUnknown, backend.ErrUnavailable, backend.ErrHeld, context.Canceled}
	for _, test := range []struct {
		call    string
		err     error
		want    error
		wantToo error
	}{
		{"acquire", closed, backend.ErrUnavailable, nil},
		{"acquire", io.EOF, backend.ErrUnknown, nil},
		{"acquire", context.Canceled, context.Canceled, nil},
		{"release", context.Canceled, context.Canceled, backend.ErrUnknown},
		{"acquire", &backend.HeldError{}, backend.ErrHeld, nil},
		{
			"renew", fmt.Errorf("%w: %w", backend.ErrUnavailable, context.Canceled),
			backend.ErrUnavailable, context.Canceled,
		},
	} {
		err := CallError("some", test.call, "n", test.err, classOf)
		for _, class := range all {
			if want := slices.Contains([]error{test.want, test.wantToo}, class); errors.Is(err, class) != want {
				t.Errorf("%s: %v becomes %v: %v is %v", test.call, test.err, err, class, !want)
			}
		}
		var call *backend.CallError
		if !errors.Is(err, test.err) || !errors.As(err, &call) || call.Call != test.call || call.Name != "n" {
			t.Errorf("%s: %v becomes %v", test.call, test.err, err)
		}
	}
	if CallError("some", "acquire", "n", nil, classOf) != nil {
		t.Error("no error is one")
	}
}

func TestValidate(t *testing.T) {
	everything := backend.Capabilities(0)
	for c := backend.CapFencing; c <= backend.CapDeadlock; c <<= 1 {
		everything |= c
	}
	rich := backend.Description{Name: "rich", Capabilities: everything, MinTTL: time.Second}
	poor := backend.Description{Name: "poor", MinTTL: time.Second}
	r := func(change func(*backend.Request)) backend.Request {
		r := backend.Request{Name: "n", RequestID: backend.NewRequestID(), HoldID: "4f2a", TTL: time.Minute}
		change(&r)
		return r
	}
	permits := func(n, limit int) backend.Request {
		return r(func(r *backend.Request) { r.Kind, r.Permits, r.Limit = backend.KindPermits, n, limit })
	}
	for what, request := range map[string]backend.Request{
		"exclusive": r(func(*backend.Request) {}), "one permit": permits(1, 1), "all permits": permits(8, 8),
		"shared": r(func(r *backend.Request) { r.Kind = backend.KindShared }),
		"tree":   r(func(r *backend.Request) { r.Hierarchical = true }),
		"text":   r(func(r *backend.Request) { r.Metadata = map[string]string{"a": "b"} }),
	} {
		if err := Validate(rich, request); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if err := Validate(poor, request); errors.Is(err, backend.ErrUnsupported) != (what != "exclusive") {
			t.Errorf("%s on a driver without capabilities: %v", what, err)
		}
	}
	for what, test := range map[string]struct {
		r    backend.Request
		want error
	}{
		"no permits":          {permits(0, 1), backend.ErrInvalidOption},
		"fewer":               {permits(-1, 1), backend.ErrInvalidOption},
		"more than there are": {permits(2, 1), backend.ErrInvalidOption},
		"too many":            {permits(1, 1<<31), backend.ErrInvalidOption},
		"permits of a tree": {r(func(r *backend.Request) {
			r.Kind, r.Permits, r.Limit, r.Hierarchical = backend.KindPermits, 1, 1, true
		}), backend.ErrUnsupported},
		"shared permits": {
			r(func(r *backend.Request) { r.Kind, r.Permits, r.Limit = backend.KindShared, 1, 1 }),
			backend.ErrInvalidOption,
		},
		"exclusive of 2": {r(func(r *backend.Request) { r.Limit = 2 }), backend.ErrInvalidOption},
		"unknown kind":   {r(func(r *backend.Request) { r.Kind = 77 }), backend.ErrUnsupported},
		"name":           {r(func(r *backend.Request) { r.Name = "" }), backend.ErrInvalidName},
		"request id":     {r(func(r *backend.Request) { r.RequestID = "short" }), backend.ErrInvalidOption},
		"hold id":        {r(func(r *backend.Request) { r.HoldID = "a b" }), backend.ErrInvalidOption},
		"long hold id": {
			r(func(r *backend.Request) { r.HoldID = strings.Repeat("a", 65) }), backend.ErrInvalidOption,
		},
		"owner": {r(func(r *backend.Request) { r.Owner = "a\n" }), backend.ErrInvalidOption},
		"metadata": {
			r(func(r *backend.Request) { r.Metadata = map[string]string{"a": "\xff"} }), backend.ErrInvalidOption,
		},
		"metadata with NUL": {
			r(func(r *backend.Request) { r.Metadata = map[string]string{"a\x00": ""} }), backend.ErrInvalidOption,
		},
		"long metadata": {
			r(func(r *backend.Request) {
				r.Metadata = map[string]string{"a": strings.Repeat("b", backend.MaxMetadataBytes)}
			}), backend.ErrInvalidOption,
		},
		"under": {r(func(r *backend.Request) { r.Under = []string{"x"} }), backend.ErrInvalidOption},
		"under many": {
			r(func(r *backend.Request) { r.Under = make([]string, backend.MaxUnder+1) }), backend.ErrInvalidOption,
		},
		"TTL": {r(func(r *backend.Request) { r.TTL = time.Millisecond }), backend.ErrInvalidTTL},
	} {
		if err := Validate(rich, test.r); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", what, err, test.want)
		}
	}
	a, b := r(func(*backend.Request) {}), r(func(r *backend.Request) { r.Name = "m" })
	longer := b
	longer.TTL *= 2
	for what, set := range map[string][]backend.Request{"of none": nil, "twice": {a, a}, "unlike": {a, longer}} {
		if err := ValidateSet(rich, set); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("a set %s: %v", what, err)
		}
	}
	if err := ValidateSet(rich, []backend.Request{a, b}); err != nil {
		t.Error(err)
	}
}
