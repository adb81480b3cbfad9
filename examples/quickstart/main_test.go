package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/containers"
)

// output runs the story and returns what it printed, without the times.
func output(t *testing.T, url string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out strings.Builder
	err := run(ctx, &out, url)
	if err != nil {
		t.Fatalf("the story went otherwise: %v\n%s", err, &out)
	}
	return regexp.MustCompile(`(?m)^ *\d+\.\d+s  `).ReplaceAllString(out.String(), "")
}

// expectInOrder checks that text has a line with each of the parts, in order.
func expectInOrder(t *testing.T, text string, parts ...string) {
	t.Helper()
	rest := text
	for _, part := range parts {
		_, after, found := strings.Cut(rest, part)
		if !found {
			t.Fatalf("no %q in its place in:\n%s", part, text)
		}
		rest = after
	}
}

func TestStaleWriteIsRefused(t *testing.T) {
	for name, url := range map[string]string{"in-process": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) { expectRefusal(t, output(t, url)) })
	}
}

func expectRefusal(t *testing.T, text string) {
	t.Helper()
	paused := number(t, text, `bob takes the lock for 1s \(token (\d+)\)`)
	next := number(t, text, `ann takes the lock \(token (\d+)\)`)
	if next <= paused {
		t.Errorf("token %d after %d", next, paused)
	}
	expectInOrder(t, text,
		"correctness tier: every lease carries a fencing token",
		"balance 30: none was lost",
		fmt.Sprintf("bob takes the lock for 1s (token %d), reads 30 – and is paused", paused),
		fmt.Sprintf("ann takes the lock (token %d) and deposits 1000", next),
		fmt.Sprintf("writes 40 (token %d)", paused),
		fmt.Sprintf(`token %d for "accounts/7" is stale: %d was admitted before`, paused, next),
		"balance 1030: ann's 1000 are safe",
		fmt.Sprintf("(token %d) was lost: expired", paused),
	)
}

// number returns what the group of pattern matched in text.
func number(t *testing.T, text, pattern string) int {
	t.Helper()
	match := regexp.MustCompile(pattern).FindStringSubmatch(text)
	if match == nil {
		t.Fatalf("no %q in:\n%s", pattern, text)
	}
	n, err := strconv.Atoi(match[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestEtcdFences runs the story of the stale write with tokens that etcd issued.
func TestEtcdFences(t *testing.T) {
	server := containers.Etcd(t)
	text := output(t, "etcd://"+server.Addr())
	if paused, next := number(t, text, `bob takes the lock for 1s \(token (\d+)\)`),
		number(t, text, `ann takes the lock \(token (\d+)\)`); next <= paused {
		t.Errorf("token %d after %d", next, paused)
	}
	expectInOrder(t, text,
		"correctness tier: every lease carries a fencing token",
		"the store refuses the write: fencing: token",
		"balance 1030: ann's 1000 are safe",
	)
}

func TestRedisCannotFence(t *testing.T) {
	server := containers.Redis(t)
	expectInOrder(t, output(t, "redis://"+server.Addr()),
		"driver redis cannot serve the correctness tier: it issues no fencing tokens",
		"this run uses the efficiency tier",
		"takes no write of this tier: fencing: no token",
		"balance 30: none was lost",
		"bob takes the lock for 1s (token 0), reads 30 – and is paused",
		"ann takes the lock (token 0) and deposits 1000",
		"nothing stops this write",
		"balance 40: ann's 1000 are gone",
		"was lost: expired",
	)
}

func TestNoServer(t *testing.T) {
	var out strings.Builder
	// Port 1 is reserved and nobody listens there.
	if err := run(t.Context(), &out, "redis://127.0.0.1:1"); !errors.Is(err, fencelock.ErrUnavailable) {
		t.Errorf("run: %v; want %v", err, fencelock.ErrUnavailable)
	}
}
