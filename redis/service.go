package redis

// This file is the binding of backend/engine: the parts that all exchanges use. Where to read on:
//
//	engine ─► service.Enter, Leave, Extend, … ─► package lines: one step of the script ─► server
//	engine ◄─ push ◄─ push.go: one subscription ◄─ PUBLISH of a release
//
//	enter.go        Enter, EnterSet; leave.go: Leave, Expire, Settle, Extend; check.go: Check
//	internal/lines  a step on its way to the server and back, and which connection it takes
//	push.go         the subscription
//	probe.go        whether the server is fit; replicas.go: whether its replicas have a hold
//	inspect.go      Look, Names, Force; open.go: URLs; driver.go: options and construction
//
// The keys and the script are in internal/redisscript/*.lua, and the connections are in internal/rediswire; package
// redlock uses both on several servers.
//
// Each step is sent once, on a connection that all callers share, and the binding waits for it on the caller's
// goroutine.
//
// The nonce of an attempt is the instant at which it was sent, followed by the key by which the engine knows the
// waiter: of two nonces of one client the greater one is the later one, which the script relies on, and from a push
// the driver reads its waiter, and the age of that waiter's last request, without a table.

import (
	"context"
	"errors"
	"hash/maphash"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// service is the binding.
type service struct {
	o        Options // with defaults
	client   goredis.UniversalClient
	own      bool          // Close closes client
	unfit    error         // the fault of the client or the options, or nil
	patience time.Duration // for one look at the servers
	lines    *lines.Lines
	identity string // of this client, in values and as the name of its channel
	clock    backend.Clock
	seed     maphash.Seed
	last     atomic.Int64     // the instant in the last nonce
	wanted   redisconn.Wanted // names that the script is asked for immediately
	probe    probe
	push     push

	unreleased unreleased

	following sync.Once // starts the goroutine that follows the master, behind Sentinels
	gate      *kit.Gate // of the binding's goroutines
}

// Prompt is engine.Prompt's: package lines returns within the caller's context.
func (s *service) Prompt() {}

// Unfit is engine.Checked's.
func (s *service) Unfit() error { return s.unfit }

// Describe is engine.Service's.
func (s *service) Describe() backend.Description {
	capabilities := backend.CapShared | backend.CapPermits | backend.CapMinHold | backend.CapMetadata |
		backend.CapInspect | backend.CapList | backend.CapForceRelease
	if !s.lines.Sharded.Load() {
		capabilities |= backend.CapMultiAcquire
	}
	return backend.Description{
		Name: driverName, Clock: s.clock, Exclusion: s.probe.exclusion(), Capabilities: capabilities,
		MinTTL: 100 * time.Millisecond, MaxTTL: 30 * 24 * time.Hour, TTLGranularity: time.Millisecond,
		Shows: backend.Shows{
			Look:       backend.StateFields{ExpiresIn: true, Limit: true, Waiters: true, Queue: true},
			List:       backend.StateFields{ExpiresIn: true, Limit: true, Waiters: true},
			RetryAfter: true,
		},
		NoFencing: "Redis replicates asynchronously and may evict, flush or lose what it stored in a restart, so " +
			"that every counter in it can go back; and its TTLs follow the server's wall clock",
	}
}

// Classify is engine.Service's. The table is redisconn's.
func (s *service) Classify(err error) engine.Class { return redisconn.Classify(err) }

// Close is engine.Service's. An idle connection ends after a few seconds.
func (s *service) Close(ctx context.Context) error {
	s.gate.Close()
	err := s.gate.Wait(ctx)
	s.releaseAll(ctx)
	if ends := append(s.lines.Close(), s.push.subscription.Close()); err == nil {
		err = redisconn.Await(ctx, ends...)
	}
	if s.own {
		err = errors.Join(err, s.client.Close())
	}
	return err
}

// do carries out one step. An error after which the server may still run it reports when that is over.
func (s *service) do(ctx context.Context, code string, keys redisscript.Keys, args ...string) (any, error) {
	return s.send(ctx, lines.NewStep(code, keys, args...))
}

func (s *service) send(ctx context.Context, step *lines.Step) (any, error) {
	answer, _, err := s.lines.Do(ctx, step)
	if err == nil {
		return answer, nil
	}
	f := redisconn.FailureOf(err)
	if !f.Sent {
		return nil, err
	}
	return nil, &engine.Unanswered{Err: err, Landed: func(ctx context.Context) { landed(ctx, step, f.Left) }}
}

// landed waits until the server has executed a step, or never will.
func landed(ctx context.Context, step *lines.Step, left bool) {
	if left {
		select {
		case <-step.Done():
		case <-ctx.Done():
			return
		}
	}
	if step.Drained != nil {
		select {
		case <-step.Drained:
		case <-ctx.Done():
		}
	}
}

// doAll carries out steps together. Each answer has its own error.
func (s *service) doAll(ctx context.Context, all []*lines.Step) (answers []any, errs []error) {
	answers, errs = make([]any, len(all)), make([]error, len(all))
	s.lines.DoAll(ctx, all, func(i int, step *lines.Step, err error) {
		if errs[i] = err; err == nil {
			answers[i] = step.Answer
		}
	})
	return answers, errs
}

const instantDigits = 13 // base 32, for 64 bits

// Key is engine.Keys's: a hash, because pushes are public and request ids are not.
func (s *service) Key(requestID string) string {
	return string(redisconn.AppendKey(make([]byte, 0, redisconn.KeyDigits), s.seed, requestID))
}

// hold returns the hold that an attempt of r asks for at the instant now.
func (s *service) hold(r *backend.Request, now backend.Instant) redisscript.Hold {
	nonce := redisconn.AppendNumber(make([]byte, 0, instantDigits+redisconn.KeyDigits), uint64(s.tick(int64(now))), instantDigits)
	return redisconn.HoldOf(*r, s.identity, string(redisconn.AppendKey(nonce, s.seed, r.RequestID)))
}

// instantIn returns the instant in the nonce of an incarnation; 0 for foreign text.
func instantIn(incarnation string) int64 {
	nonce := incarnation[strings.LastIndexByte(incarnation, '|')+1:]
	at, _ := strconv.ParseInt(nonce[:min(len(nonce), instantDigits)], 32, 64) // 0 with an error
	return at
}

// tick returns now, or an instant that is greater than all before.
func (s *service) tick(now int64) int64 {
	for {
		last := s.last.Load()
		if now <= last {
			now = last + 1
		}
		if s.last.CompareAndSwap(last, now) {
			return now
		}
	}
}

func (s *service) keys(name string) redisscript.Keys { return redisscript.KeysOf(s.o.KeyPrefix, name) }

func (s *service) channel(client string) string { return redisscript.Channel(s.o.KeyPrefix, client) }

var errAnswer = &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
