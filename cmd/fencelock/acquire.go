package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
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
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/principal"
)

// This file is "fencelock acquire", "renew" and "release": locks that outlive the command that acquires them. They
// speak to a gateway, which may be in this process and end with the command.

const acquireHelp = `Usage: fencelock acquire NAME [options]

Acquires the lock NAME, prints its lock token and exits. The lock is held for the TTL, unless "fencelock release" ends
or "fencelock renew" extends it. The token is a secret: anyone who has it can renew or release the lock.

  fencelock acquire deploy --ttl 10m --token-file token || exit
  ./deploy; code=$?
  fencelock release deploy --token-file token; exit $code

"fencelock run" is safer for one command: it renews the lock, and stops the command if the lock is lost.

Options (durations like 500ms, 30s, 5m):

{options}

Exit codes:

    0  the lock is held
   64  the command line is invalid, or the backend does not support the request
   69  the lock service cannot be reached, or is not configured for locks; the lock may be held for one TTL
   73  the token file cannot be written; the lock is held for the TTL
   75  another client holds the lock
   77  the gateway denies the request, or the credential is invalid
`

const renewHelp = `Usage: fencelock renew NAME (--token TEXT | --token-file FILE) [options]

Renews a lock from "fencelock acquire". With etcd, ZooKeeper or PostgreSQL, a lock can be renewed only by the
gateway that acquired it.

Options:

{options}

` + releaseCodes

const releaseHelp = `Usage: fencelock release NAME (--token TEXT | --token-file FILE) [options]

Releases a lock from "fencelock acquire".

Options:

{options}

` + releaseCodes

const releaseCodes = `Exit codes:

    0  done
   64  the command line is invalid, or the token belongs to another lock
   69  the lock service cannot be reached, or did not answer
   76  the lock is no longer held
   77  the gateway denies the request, or the credential is invalid
`

// commandKey makes the lock tokens of commands that speak to a backend directly. It is no secret: the token is.
var commandKey = []byte("fencelock: the command line")

// scripted is one of these subcommands.
type scripted struct {
	*lookSettings
	ttl        time.Duration
	tokenFile  string                 // that acquire writes
	givenToken func() (string, error) // nil for acquire
}

// scripted adds the options.
func (o *options) scripted(word string) *scripted {
	s := &scripted{lookSettings: &lookSettings{word: word}}
	s.from = o.backend("the lock service or of a gateway, http://host:7481 or https://, " + localServer +
		" if none is given")
	o.BoolVar(&s.json, "json", false, "print one JSON object, with the fields of docs/HTTP.md")
	return s
}

func defineAcquire(o *options) func([]string) error {
	ttl := o.Duration("ttl", fencelock.DefaultTTL, "how long the lock is held unless it is renewed")
	wait := o.Duration("wait", 0, "the maximum time to wait for the lock; unlimited if it is not given")
	try := o.Bool("try", false, "do not wait")
	shared := o.Bool("shared", false, "share the lock with other processes that give --shared")
	permits := o.String("permits", "", "acquire `N/LIMIT` permits, N of at most LIMIT")
	owner := o.String("owner", "", "a `TEXT` that identifies the holder to people. The default is the name of this "+
		"host")
	id := o.String("request-id", "", "an `ID` that makes the acquire idempotent: repeated with the same owner and "+
		"ID, it gets the same hold")
	tokenFile := o.String("token-file", "", "write the lock token to `FILE`, which only its owner can read, instead "+
		"of "+
		"standard output")
	s := o.scripted("acquire")
	return func(args []string) error {
		s.ttl, s.tokenFile = *ttl, *tokenFile
		err := s.parse(args, "NAME")
		body := map[string]any{
			"requestId": *id, "ownerId": *owner, "ttlMillis": s.ttl.Milliseconds(), "wait": !*try,
		}
		switch {
		case err != nil:
		case s.ttl <= 0 || s.ttl%time.Millisecond != 0:
			err = fmt.Errorf("--ttl %v: want a positive number of whole milliseconds", s.ttl)
		case *wait < 0 || *wait > 0 && *try:
			err = errors.New("--wait must not be negative, and excludes --try")
		case *shared && *permits != "":
			err = errors.New("--shared and --permits exclude each other")
		case *shared:
			body["kind"] = "shared"
		case *permits != "":
			var n, limit int
			n, limit, err = parsePermits(*permits)
			body["kind"], body["permits"], body["limit"] = "permits", n, limit
		}
		if *id == "" {
			body["requestId"] = backend.NewRequestID()
		}
		if *owner == "" {
			host, _ := os.Hostname() // on an error, ownerId is the command
			body["ownerId"] = cmp.Or(host, "fencelock acquire")
		}
		return s.runScript(err, func(ctx context.Context) error { return s.acquire(ctx, body, *wait) })
	}
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

func defineRenew(o *options) func([]string) error {
	ttl := o.Duration("ttl", 0, "how long the lock is held from now on; the default is its present TTL. A renewal "+
		"never shortens the hold")
	s := o.withToken("renew")
	return func(args []string) error {
		s.ttl = *ttl
		return s.giveToken(args)
	}
}

func defineRelease(o *options) func([]string) error { return o.withToken("release").giveToken }

// withToken adds the options of the subcommands that need only a lock token.
func (o *options) withToken(word string) *scripted {
	tokenFile := o.String("token-file", "", "the `FILE` that acquire wrote")
	token := o.String("token", "", "the lock token. Every user of the machine can read it on the command line")
	s := o.scripted(word)
	s.givenToken = func() (string, error) {
		switch {
		case (*token == "") == (*tokenFile == ""):
			return "", errors.New("want --token or --token-file")
		case *token != "":
			return *token, nil
		}
		content, err := os.ReadFile(*tokenFile)
		return strings.TrimSpace(string(content)), err
	}
	return s
}

// giveToken sends a lock token.
func (s *scripted) giveToken(args []string) error {
	err := s.parse(args, "NAME")
	token := ""
	if err == nil {
		token, err = s.givenToken()
	}
	body := map[string]any{"lockToken": token}
	if s.ttl > 0 {
		body["ttlMillis"] = s.ttl.Milliseconds()
	}
	return s.runScript(err, func(ctx context.Context) error {
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
func (s *scripted) runScript(parsed error, do func(context.Context) error) error {
	lost := false
	err := s.run(parsed, func(ctx context.Context) error {
		ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
		defer stop()
		err := do(ctx)
		lost = errors.Is(err, fencelock.ErrNotHeld)
		return err
	})
	if lost {
		return exit(exitLost)
	}
	return err
}

// asker makes one call about the lock. queued means that it keeps waiting.
type asker func(ctx context.Context, call string, body any) (answer []byte, queued bool, err error)

// door connects to the gateway, or makes one.
func (s *scripted) door(ctx context.Context) (asker, func(), error) {
	at := "/v1/locks/-/"
	query := "?name=" + url.QueryEscape(s.args[0])
	if strings.HasPrefix(s.backend, "http://") || strings.HasPrefix(s.backend, "https://") {
		base, by, end, err := gatewayAt(s.backend)
		if err != nil {
			return nil, nil, err
		}
		return func(ctx context.Context, call string, body any) ([]byte, bool, error) {
			return exchange(ctx, by, base+at+call+query, body)
		}, end, nil
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
		if g.Close(bounded) == 0 { // else the acquired lock would end with the driver
			closeQuietly(d.Close)
		}
	}
	return func(ctx context.Context, call string, body any) ([]byte, bool, error) {
		return exchange(ctx, inProcess{g}, "http://localhost"+at+call+query, body)
	}, end, nil
}

// credentialOption of a URL names a file with the token that the gateway asks for.
const credentialOption = "credential"

// gatewayAt reads the URL of a gateway, which has the options of all URLs, and one for a credential.
func gatewayAt(rawURL string) (base string, by http.RoundTripper, end func(), _ error) {
	syntax := kit.Syntax{
		Driver: "gateway", Schemes: []string{"http"}, Secure: []string{"https"}, Port: "80", Path: true,
		Timeout: attemptTime, Options: []string{credentialOption},
	}
	if strings.HasPrefix(rawURL, "https:") {
		syntax.Port = "443"
	}
	u, err := syntax.ParseURL(rawURL)
	switch {
	case err != nil:
		return "", nil, nil, err
	case len(u.Addresses) > 1:
		return "", nil, nil, u.Invalid(errors.New("want one address: put several gateways behind one host name"))
	}
	base = "http://" + u.Addresses[0]
	if u.TLS != nil {
		base = "https://" + u.Addresses[0]
	}
	if u.Path != "" {
		base += "/" + u.Path
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: u.TLS, ForceAttemptHTTP2: true,
		DialContext: (&net.Dialer{Timeout: u.Timeout}).DialContext, TLSHandshakeTimeout: u.Timeout,
	}
	by, end = transport, transport.CloseIdleConnections
	if !u.Options.Has(credentialOption) {
		return base, by, end, nil
	}
	with := &bearer{by, u.Options.Get(credentialOption)}
	if _, err := with.token(); err != nil {
		return "", nil, nil, u.Invalid(err)
	}
	host, _, _ := net.SplitHostPort(u.Addresses[0]) // ParseURL has
	if ip := net.ParseIP(host); u.TLS == nil && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return "", nil, nil, u.Invalid(errors.New("a credential needs https, except to this machine"))
	}
	return base, with, end, nil
}

// bearer adds the token of a file to each request. It reads the file for each request, so that the token can be
// replaced.
type bearer struct {
	http.RoundTripper
	file string
}

func (b *bearer) token() (string, error) {
	text, err := os.ReadFile(b.file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", credentialOption, err)
	}
	token := strings.TrimSpace(string(text))
	if err := principal.CheckToken(token); err != nil {
		return "", fmt.Errorf("%s %s: %w", credentialOption, b.file, err)
	}
	return token, nil
}

// RoundTrip implements http.RoundTripper.
func (b *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := b.token()
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+token)
	return b.RoundTripper.RoundTrip(r)
}

// inProcess connects to a gateway in this process.
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

// errorOf returns the error of a problem.
func errorOf(p *gateway.Problem) error {
	switch {
	case p.Code == "DENIED", p.Code == "UNAUTHENTICATED":
		return fencelock.ErrDenied
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
