// Package redisconn is the common part of the Redis drivers beside the script: how calls begin, what a failed exchange
// means, whether a server is fit for locks, the subscription on which pushes arrive, and the words of requests and
// answers. Package redis uses it on one server or cluster, package redlock on several servers together.
package redisconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// ErrAnswer is the cause of a Failure by a server that answers, but not as the script would.
var ErrAnswer = errors.New("the server's reply is not one of this script")

// Failure is a step that got no answer it could use. Its fields are for the caller's conclusions: Sent decides between
// ErrUnavailable and ErrUnknown, Fatal whether to try again.
type Failure struct {
	Cause error
	// The server may have run it.
	Sent bool
	// It may still be in progress: its caller did not wait for the end, and must not touch the step.
	Left bool
	// Trying again cannot help; Cause has the class of the error.
	Fatal bool

	// The step had no effect: the keys are on their way to another node of a cluster.
	Moving bool
}

// Error is the cause's text: the class is added once, by CallError.
func (f *Failure) Error() string { return f.Cause.Error() }

// Unwrap lets callers find the cause.
func (f *Failure) Unwrap() error { return f.Cause }

// ServerError is an error that the server answered.
type ServerError string

// Error is the answer's text, its code first.
func (e ServerError) Error() string { return string(e) }

// Code is the answer's code, such as NOSCRIPT; empty without one.
func (e ServerError) Code() string { return codeOf(string(e)) }

// RedisError marks it as an answer of the server, for go-redis' own tests of errors.
func (ServerError) RedisError() {}

// refusals are answers of a server that is not able to serve now, and made no change. The call can be made again, here
// or on another server.
var refusals = map[string]bool{
	"LOADING": true, "MASTERDOWN": true, "READONLY": true, "CLUSTERDOWN": true, "TRYAGAIN": true, "OOM": true,
	"MISCONF": true, "NOREPLICAS": true, "BUSY": true, "MOVED": true, "ASK": true,
}

// settings are answers that only the administrator, or the one who configures the client, can change. Some have no code
// and are known by their text.
var settings = []struct{ code, text, setting, value, want, why string }{
	{"WRONGTYPE", "", "key", "of another type", "left to fencelock", "a foreign key stands where a lock's key belongs"},
	{"NOPERM", "", "ACL", "restricted",
		"INFO, EVALSHA, EVAL, the script's commands, and keys and channels under the prefix",
		"the user may not run what locks need"},
	{"NOAUTH", "", "credentials", "missing", "those of a user of the server", "the server asks for authentication"},
	{"WRONGPASS", "", "credentials", "refused", "those of a user of the server", "the server does not know them"},
	{"CROSSSLOT", "", "key prefix", "with a hash tag", "free of braces", "the keys of one name are in different slots"},
	{"", "unknown command 'sentinel'", "client", "one of Sentinel", "one of a single server, such as redis://",
		"the server is no Sentinel"},
	{"", "DB index is out of range", "database", "too great a number", "one that the server has",
		"see its setting databases"},
	{"", "SELECT is not allowed in cluster mode", "database", "not 0", "0", "the server is a node of a cluster"},
	{"", "cluster support disabled", "client", "one of a cluster", "one of a single server, such as redis://",
		"the server is not a node of a cluster (cluster-enabled no)"},
}

// Classify returns the class of a step's error, for the engine.
func Classify(err error) engine.Class {
	switch f := FailureOf(err); {
	case f.Fatal:
		return engine.Never
	case f.Sent:
		return engine.Unknown
	default:
		return engine.NotDone
	}
}

// FailureOf classifies an error of the client library. An error that says of which class it is, such as one of a
// check that was made while connecting, is believed. An error without an answer may come from a connection that broke
// after the command had left, so it counts as Sent unless it says that there was no connection to send on. An answer
// that is not known is Fatal: the server has looked at the command and will not like it any better the next time.
func FailureOf(err error) *Failure {
	var known *Failure
	switch {
	// It was classified where it arose, with more information.
	case errors.As(err, &known):
		return known
	case errors.Is(err, backend.ErrMisconfigured):
		return &Failure{Cause: err, Fatal: true}
	case errors.Is(err, backend.ErrUnavailable):
		return &Failure{Cause: err}
	}
	var answer goredis.Error
	if !errors.As(err, &answer) {
		return &Failure{Cause: err, Sent: !notSent(err)}
	}
	code := codeOf(answer.Error())
	if refusals[code] || strings.Contains(answer.Error(), "max number of clients") {
		return &Failure{Cause: err, Moving: code == "TRYAGAIN"}
	}
	// The first that fits: codes are exact, and texts stand in no other answer.
	for _, s := range settings {
		if s.code != "" && s.code == code || s.text != "" && strings.Contains(answer.Error(), s.text) {
			// The error says what stands where, what should, and why, and keeps the server's own words beside it.
			config := &backend.ConfigError{Setting: s.setting, Value: s.value, Want: s.want, Why: s.why}
			return &Failure{Cause: fmt.Errorf("%w: %w", config, err), Fatal: true}
		}
	}
	if code == "LAYOUT" { // the script's, see locks.lua
		_, layout, _ := strings.Cut(answer.Error(), "LAYOUT ")
		return &Failure{Cause: &backend.ConfigError{
			Setting: "layout of the lock's key", Value: layout, Want: strconv.Itoa(redisscript.Layout),
			Why: "a later version of this package wrote it",
		}, Fatal: true}
	}
	return &Failure{Cause: err, Fatal: true}
}

// Unsent is FailureOf for a question: it makes no change, so that it does not matter whether the server has run it.
func Unsent(err error) *Failure {
	f := *FailureOf(err)
	f.Sent = false
	return &f
}

// codeOf finds the code in an error text: the first word in capitals. Servers before Redis 7 put the place in the
// script before it, as in "ERR Error running script (call to f_…): @user_script:12: -NOREPLICAS Not enough good
// replicas".
func codeOf(text string) string {
	for _, word := range strings.Fields(text) {
		word = strings.TrimLeft(word, "-")
		if len(word) >= 3 && word != "ERR" && strings.Trim(word, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == "" {
			return word
		}
	}
	return ""
}

// notSent reports whether err is the lack of a connection to send on.
func notSent(err error) bool {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return true
	}
	var dns *net.DNSError
	return errors.As(err, &dns) || errors.Is(err, goredis.ErrPoolTimeout) || errors.Is(err, goredis.ErrPoolExhausted) ||
		errors.Is(err, goredis.ErrClosed)
}

// Ended is ctx.Err() of a context that knows the time: on a busy machine a connection may learn that the deadline has
// passed before the context does, and the context is the reason to report.
func Ended(ctx context.Context) error {
	if at, ok := ctx.Deadline(); ok && ctx.Err() == nil && !time.Now().Before(at) {
		PauseFor(ctx, time.Second) // bounded, for a context that never ends although its deadline has passed
	}
	return ctx.Err()
}
