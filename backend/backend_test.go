package backend_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// plain is a driver of which only the type matters here.
type plain struct{ backend.Driver }

func (p plain) IssuesFencingTokens() backend.Driver { return p }
func (plain) Ping(context.Context) error            { return nil }

type wrapper struct{ backend.Driver }

func (w wrapper) Unwrap() backend.Driver { return w.Driver }

func TestAsFollowsUnwrap(t *testing.T) {
	inner := plain{}
	if _, ok := backend.As[backend.Pinger](wrapper{wrapper{inner}}); !ok {
		t.Error("a Pinger two wrappers deep was not found")
	}
	if _, ok := backend.As[backend.Lister](wrapper{inner}); ok {
		t.Error("a Lister was found where there is none")
	}
	if _, ok := backend.As[backend.Pinger](nil); ok {
		t.Error("something was found in no driver")
	}
	if _, ok := backend.Driver(wrapper{inner}).(backend.FencingDriver); ok {
		t.Error("a wrapper inherited the fencing promise")
	}
}

func TestValidateName(t *testing.T) {
	for _, name := range []string{"a", "orders/7", "名前", "with space", "{tag}", "..", strings.Repeat("n", 512)} {
		if err := backend.ValidateName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{
		"", strings.Repeat("n", 513), "\x00", "a\nb", "tab\t", "\x7f", "\u0085", "\xff", "half\xc3",
	} {
		err := backend.ValidateName(name)
		invalid := (*backend.InvalidError)(nil)
		if !errors.Is(err, backend.ErrInvalidName) || !errors.As(err, &invalid) || invalid.Why == "" {
			t.Errorf("%q: %v, want an InvalidError of ErrInvalidName", name, err)
		}
		if len(err.Error()) > 400 {
			t.Errorf("the message has %d bytes", len(err.Error()))
		}
	}
}

func TestValidateTTL(t *testing.T) {
	d := backend.Description{
		Name: "d", MinTTL: 100 * time.Millisecond, MaxTTL: time.Hour, TTLGranularity: time.Millisecond,
	}
	for _, ttl := range []time.Duration{100 * time.Millisecond, time.Second, time.Hour} {
		if err := d.ValidateTTL(ttl); err != nil {
			t.Errorf("%v: %v", ttl, err)
		}
	}
	for _, ttl := range []time.Duration{
		0, -time.Second, time.Millisecond, time.Hour + 1, time.Second + time.Microsecond,
	} {
		if err := d.ValidateTTL(ttl); !errors.Is(err, backend.ErrInvalidTTL) {
			t.Errorf("%v: %v, want ErrInvalidTTL", ttl, err)
		}
	}
	d.Margin = 200 * time.Millisecond
	if err := d.ValidateTTL(250 * time.Millisecond); !errors.Is(err, backend.ErrInvalidTTL) {
		t.Errorf("a TTL that the margin eats up: %v", err)
	}
}

func TestRequestIDs(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := backend.NewRequestID()
		if err := backend.ValidateRequestID(id); err != nil || seen[id] {
			t.Fatalf("%q: %v, repeated: %v", id, err, seen[id])
		}
		seen[id] = true
	}
	for _, id := range []string{"", "worker-1", strings.Repeat("a", 129), "0123456789abcde|", "0123456789 bcdef"} {
		if err := backend.ValidateRequestID(id); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%q: %v, want ErrInvalidOption", id, err)
		}
	}
}

func TestCapabilities(t *testing.T) {
	c := backend.CapFair | backend.CapFencing
	if got := c.String(); got != "fencing,fair" {
		t.Errorf("String() = %q", got)
	}
	if got := c.Missing(backend.CapFair | backend.CapWatch); got != backend.CapWatch {
		t.Errorf("Missing = %v", got)
	}
	if got := backend.Capabilities(0).String(); got != "none" {
		t.Errorf("String() of nothing = %q", got)
	}
	for _, one := range (^backend.Capabilities(0)).All() {
		if name := one.String(); name == "none" || strings.Contains(name, ",") {
			t.Errorf("capability %b has the name %q", one, name)
		}
	}
}

func TestRedactURL(t *testing.T) {
	for raw, want := range map[string]string{
		"redis://h:1":                          `"redis://h:1"`,
		"redis://u:secret@h:1/0?x=y":           `"redis://u:redacted@h:1/0?x=y"`,
		"etcd://u:se/c@ret@a:1,b:2":            `"etcd://u:redacted@a:1,b:2"`,
		"redis://h:1/0?password=secret&db=1":   `"redis://h:1/0?db=1&password=redacted"`,
		"redis://:secret@h":                    `"redis://:redacted@h"`,
		"redis://secret-token@h:1":             `"redis://redacted@h:1"`,
		"redis://@h:1":                         `"redis://@h:1"`,
		"redis://u:secret":                     `"redis://u:redacted"`,
		"redis://u:se:cret":                    `"redis://u:redacted"`,
		"redis://a:1,u:se/cret":                `"redis://a:1,u:redacted"`,
		"redis://a:1,b:2/0":                    `"redis://a:1,b:2/0"`,
		"redis://[::1]:6379":                   `"redis://[::1]:6379"`,
		"redis://[fe80::a]":                    `"redis://[fe80::a]"`,
		"no scheme":                            `"no scheme"`,
		"u:secret@h":                           `"u:redacted@h"`,
		"redis://h?password=se%zzcret":         `"redis://h?redacted"`,
		"redis://h?sentinel-password=secret":   `"redis://h?sentinel-password=redacted"`,
		"redis://:sec?ret@h":                   `"redis://redacted"`,
		"redis+sentinel://u:p@a:1,b:2/primary": `"redis+sentinel://u:redacted@a:1,b:2/primary"`,
	} {
		if got := backend.RedactURL(raw); got != want {
			t.Errorf("RedactURL(%q) = %s, want %s", raw, got, want)
		}
	}
}

// A password is everything that is hidden but a user's bare name.
func TestURLHasPassword(t *testing.T) {
	for text, want := range map[string]bool{
		"":                                      false,
		"etcd://127.0.0.1:2379":                 false,
		"postgres://alice@db/locks?sslmode=off": false,
		"postgres://alice:secret@db/locks":      true,
		"redis://:secret@cache:6379":            true,
		"redis://a@b:secret@cache:6379":         true,
		"redis+sentinel://a,b/m?sentinel-password=secret": true,
	} {
		if got := backend.URLHasPassword(text); got != want {
			t.Errorf("URLHasPassword(%q) = %v", text, got)
		}
	}
}

func TestOpenUnknownScheme(t *testing.T) {
	_, err := backend.Open(t.Context(), "nosuch://user:secret@host")
	if !errors.Is(err, backend.ErrInvalidOption) || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
}

func TestErrorsMatchTheirSentinels(t *testing.T) {
	for err, want := range map[error]error{
		&backend.HeldError{}:                               backend.ErrHeld,
		&backend.NotHeldError{}:                            backend.ErrNotHeld,
		&backend.ConfigError{}:                             backend.ErrMisconfigured,
		&backend.InvalidError{Kind: backend.ErrInvalidTTL}: backend.ErrInvalidTTL,
	} {
		if wrapped := fmt.Errorf("around: %w", &backend.CallError{Err: err}); !errors.Is(wrapped, want) {
			t.Errorf("%T does not match %v", err, want)
		}
	}
}

func TestSystemClockAdvances(t *testing.T) {
	clock := backend.SystemClock()
	began, start := clock.Now(), time.Now()
	for time.Since(start) < 20*time.Millisecond {
		if now := clock.Now(); now < began || now.IsZero() {
			t.Fatalf("the clock went from %d to %d", began, now)
		}
	}
	if step := clock.Now().Sub(began); step < 20*time.Millisecond || step > time.Minute {
		t.Errorf("20 ms took %v on the clock", step)
	}
}

func TestGoClockIsSimulated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := backend.GoClock()
		began := clock.Now()
		if began <= 0 {
			t.Errorf("instant %d is not positive", began)
		}
		time.Sleep(time.Hour)
		if step := clock.Now().Sub(began); step != time.Hour {
			t.Errorf("an hour of simulated time took %v", step)
		}
	})
}
