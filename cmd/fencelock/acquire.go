package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

// This file is "fencelock acquire", "renew" and "release": locks that outlive the command that takes them. They speak
// to a gateway, which may be one in this process that lives no longer than the command.

const tokenOptions = `  --backend URL        the lock service, or a gateway: http://host:7481 or https://. Default:
                       $FENCELOCK_BACKEND, else ` + localServer + `
  --json               one JSON object, as docs/HTTP.md has it
`

const acquireHelp = `Usage: fencelock acquire NAME [options]

Takes the lock NAME, prints its lock token and ends. The lock is held for the TTL, until "fencelock release", or longer
with "fencelock renew". Who knows the lock token has the lock.

  token=$(fencelock acquire deploy --ttl 10m) && ./deploy; fencelock release deploy --token "$token"

"fencelock run" is safer for what is one command: it renews, and stops the command if the lock is lost.

Options (durations like 500ms, 30s, 5m):

  --ttl D              how long the lock is held unless it is renewed. Default: 30s
  --wait D             wait for at most D. Default: forever
  --try                do not wait
  --shared             beside other shared holds
  --permits N/M        take N of M permits
  --owner TEXT         who holds the lock, for people. Default: this host
  --request-id ID      an acquire that is repeated with the same owner and ID gets the same hold
  --token-file FILE    write the lock token to FILE, which only its owner can read, not to standard output
` + tokenOptions + `
Exit codes:

    0  the lock is held
   64  the command line makes no sense, or the backend cannot do what it asks for
   69  the lock service cannot be reached, or is not fit for locks; the lock may be held for one TTL
   75  somebody else holds the lock
`

const renewHelp = `Usage: fencelock renew NAME (--token TEXT | --token-file FILE) [options]

Prolongs what "fencelock acquire" took. Before etcd, ZooKeeper and PostgreSQL only the gateway that took a lock renews
it.

Options:

  --ttl D              how long the lock is held from now on; less than what is left changes nothing. Default: as before
` + tokenOptions + releaseCodes

const releaseHelp = `Usage: fencelock release NAME (--token TEXT | --token-file FILE) [options]

Gives back what "fencelock acquire" took.

Options:

` + tokenOptions + releaseCodes

const releaseCodes = `
Exit codes:

    0  done
   64  the command line makes no sense, or the token is of another lock
   69  the lock service cannot be reached, or did not answer
   76  the lock is not held any more
`

// commandKey makes the lock tokens of commands that speak to a backend themselves. It keeps nothing secret: the token
// is.
var commandKey = []byte("fencelock: the command line")

// scripted is one of these subcommands.
type scripted struct {
	*lookSettings
	ttl       time.Duration
	token     string
	tokenFile string
}

func newScripted(word string) (*scripted, *flag.FlagSet) {
	look, f := newLook(word)
	s := &scripted{lookSettings: look}
	f.DurationVar(&s.ttl, "ttl", 0, "")
	f.StringVar(&s.tokenFile, "token-file", "", "")
	return s, f
}

func acquireMain(args []string) int {
	s, f := newScripted("acquire")
	var wait time.Duration
	var try, shared bool
	var permits, owner, id string
	f.DurationVar(&wait, "wait", 0, "")
	f.BoolVar(&try, "try", false, "")
	f.BoolVar(&shared, "shared", false, "")
	f.StringVar(&permits, "permits", "", "")
	f.StringVar(&owner, "owner", "", "")
	f.StringVar(&id, "request-id", "", "")
	err := s.parse(f, args, "NAME")
	body := map[string]any{"requestId": id}
	switch {
	case err != nil:
	case s.ttl < 0 || s.ttl%time.Millisecond != 0:
		err = fmt.Errorf("--ttl %v: want whole milliseconds", s.ttl)
	case wait < 0 || wait > 0 && try:
		err = errors.New("--wait is not negative, and excludes --try")
	case shared && permits != "":
		err = errors.New("--shared and --permits exclude each other")
	case shared:
		body["kind"] = "shared"
	case permits != "":
		var n, limit int
		n, limit, err = parsePermits(permits)
		body["kind"], body["permits"], body["limit"] = "permits", n, limit
	}
	if id == "" {
		body["requestId"] = backend.NewRequestID()
	}
	if owner == "" {
		owner, _ = os.Hostname() // without a name it says what it is
	}
	if owner == "" {
		owner = "fencelock acquire"
	}
	if s.ttl == 0 {
		s.ttl = fencelock.DefaultTTL
	}
	body["ownerId"], body["ttlMillis"], body["wait"] = owner, s.ttl.Milliseconds(), !try
	return s.runScript(err, acquireHelp, func(ctx context.Context) error { return s.acquire(ctx, body, wait) })
}

func (s *scripted) acquire(ctx context.Context, body map[string]any, wait time.Duration) error {
	ask, end, err := s.door(ctx)
	if err != nil {
		return err
	}
	defer end()
	began := time.Now()
	for {
		if wait > 0 {
			left := wait - time.Since(began)
			if left <= 0 {
				return fmt.Errorf("waited for %v: %w", wait, fencelock.ErrHeld)
			}
			body["waitMillis"] = max(1, left.Milliseconds())
		}
		text, queued, err := ask(ctx, "acquire", body)
		switch {
		case err != nil:
			return err
		case queued:
			continue
		}
		var lock gateway.Lock
		if err := json.Unmarshal(text, &lock); err != nil {
			return err
		}
		if s.tokenFile != "" {
			if err := os.WriteFile(s.tokenFile, []byte(lock.LockToken+"\n"), 0o600); err != nil {
				return fileError{err}
			}
		}
		switch {
		case s.json:
			_, err = os.Stdout.Write(text)
		case s.tokenFile == "":
			_, err = fmt.Println(lock.LockToken)
		}
		return err
	}
}

func renewMain(args []string) int {
	s, f := newScripted("renew")
	return s.giveToken(f, args, renewHelp)
}

func releaseMain(args []string) int {
	s, f := newScripted("release")
	return s.giveToken(f, args, releaseHelp)
}

// giveToken is what a lock token is enough for.
func (s *scripted) giveToken(f *flag.FlagSet, args []string, help string) int {
	f.StringVar(&s.token, "token", "", "")
	err := s.parse(f, args, "NAME")
	switch {
	case err != nil:
	case (s.token == "") == (s.tokenFile == ""):
		err = errors.New("want --token or --token-file")
	case s.tokenFile != "":
		var text []byte
		text, err = os.ReadFile(s.tokenFile)
		s.token = strings.TrimSpace(string(text))
	}
	body := map[string]any{"lockToken": s.token}
	if s.ttl > 0 && s.word == "renew" {
		body["ttlMillis"] = s.ttl.Milliseconds()
	}
	return s.runScript(err, help, func(ctx context.Context) error {
		ask, end, err := s.door(ctx)
		if err != nil {
			return err
		}
		defer end()
		text, _, err := ask(ctx, s.word, body)
		if err == nil && s.json {
			_, err = os.Stdout.Write(text)
		}
		return err
	})
}

// runScript is run with the exit codes of these subcommands; an interrupt ends the wait.
func (s *scripted) runScript(parsed error, help string, do func(context.Context) error) int {
	lost := false
	code := s.run(parsed, help, func(ctx context.Context) error {
		ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
		defer stop()
		err := do(ctx)
		lost = errors.Is(err, fencelock.ErrNotHeld)
		return err
	})
	if lost {
		return exitLost
	}
	return code
}

// asker makes one call about the lock. queued says that it waits on.
type asker func(ctx context.Context, call string, body any) (answer []byte, queued bool, err error)

// door connects to the gateway, or makes one.
func (s *scripted) door(ctx context.Context) (asker, func(), error) {
	at := "/v1/locks/-/"
	query := "?name=" + url.QueryEscape(s.args[0])
	if strings.HasPrefix(s.backend, "http://") || strings.HasPrefix(s.backend, "https://") {
		at = strings.TrimSuffix(s.backend, "/") + at
		return func(ctx context.Context, call string, body any) ([]byte, bool, error) {
			return exchange(ctx, http.DefaultTransport, at+call+query, body)
		}, func() {}, nil
	}
	opening, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	d, err := backend.Open(opening, s.backend)
	if err != nil {
		return nil, nil, err
	}
	g, err := gateway.New(gateway.Options{Driver: d, Key: commandKey})
	if err != nil {
		closeQuietly(d.Close)
		return nil, nil, err
	}
	end := func() {
		bounded, cancel := context.WithTimeout(context.Background(), releaseTime)
		defer cancel()
		if g.Close(bounded) == 0 { // else what was acquired would end with the driver
			closeQuietly(d.Close)
		}
	}
	return func(ctx context.Context, call string, body any) ([]byte, bool, error) {
		return exchange(ctx, inProcess{g}, "http://localhost"+at+call+query, body)
	}, end, nil
}

// inProcess is the way to a gateway in this process.
type inProcess struct{ g *gateway.Gateway }

func (p inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	p.g.Handler().ServeHTTP(w, r)
	return w.Result(), r.Context().Err()
}

// exchange sends one request and reads the answer.
func exchange(ctx context.Context, by http.RoundTripper, url string, body any) ([]byte, bool, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, false, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(text))
	if err != nil {
		return nil, false, err
	}
	resp, err := by.RoundTrip(r)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", fencelock.ErrUnavailable, err)
	}
	defer resp.Body.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(resp.Body); err != nil {
		return nil, false, fmt.Errorf("%w: %w", fencelock.ErrUnknown, err)
	}
	switch resp.StatusCode {
	case http.StatusOK, http.StatusAccepted:
		return out.Bytes(), resp.StatusCode == http.StatusAccepted, nil
	}
	var p gateway.Problem
	if err := json.Unmarshal(out.Bytes(), &p); err != nil {
		return nil, false, fmt.Errorf("%w: status %d, and no problem document", fencelock.ErrUnavailable,
			resp.StatusCode)
	}
	return nil, false, fmt.Errorf("%w: %s", errorOf(&p), p.Error())
}

// errorOf is the error for which a problem stands.
func errorOf(p *gateway.Problem) error {
	switch {
	case p.Code == "LOCK_ALREADY_HELD":
		return fencelock.ErrHeld
	case p.Code == "LOCK_EXPIRED":
		return fencelock.ErrNotHeld
	case p.Status == http.StatusNotImplemented:
		return fencelock.ErrUnsupported
	case p.Status == http.StatusGatewayTimeout:
		return fencelock.ErrUnknown
	case p.Status < http.StatusInternalServerError && p.Status != http.StatusTooManyRequests:
		return fencelock.ErrInvalidOption
	}
	return fencelock.ErrUnavailable
}
