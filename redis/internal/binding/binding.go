// Package binding is Redis as a binding of backend/engine, on the keys and the script of package redis: drivers of both
// kinds meet in one queue and exclude each other. Package redis does not use it yet.
//
//	engine ─► Service.Enter, Leave, Extend, … ─► package lines: one step of the script ─► server
//	engine ◄─ push ◄─ push.go: one subscription ◄─ PUBLISH of a release
//
// Each step is sent once, on a connection that all callers share, and the binding waits for it on the caller's
// goroutine.
//
// The nonce of an attempt is the instant at which it was sent, followed by the key by which the engine knows the waiter:
// of two nonces of one client the greater one is the later one, which the script relies on, and a push says without a
// table which waiter it is for, and how old that waiter's last sign of life is.
package binding

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"hash/maphash"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// Options configure a Service. They are those of package redis, which checks them.
type Options struct {
	Name      string // Description.Name
	KeyPrefix string
	// AllowVolatileEviction accepts the policies volatile-….
	AllowVolatileEviction bool
	// Assume is the server, which is then not asked; nil asks it.
	Assume *redisconn.Server
	// Replicas that have to confirm a grant within ReplicaTimeout, with ReplicaDisk on disk.
	Replicas       int
	ReplicaTimeout time.Duration
	ReplicaDisk    bool
	Clock          backend.Clock
	// Own: Close closes the client.
	Own bool
	// Hooks is a client with hooks that see the steps, or nil.
	Hooks goredis.UniversalClient
	// ProbeTimeout is the maximum duration of one look at the servers.
	ProbeTimeout time.Duration
	// Unfit is the fault of the client or the options, or nil.
	Unfit error
}

// Service is the binding.
type Service struct {
	o        Options
	client   goredis.UniversalClient
	lines    *lines.Lines
	identity string // of this client, in values and as the name of its channel
	clock    backend.Clock
	seed     maphash.Seed
	last     atomic.Int64     // the instant in the last nonce
	wanted   redisconn.Wanted // names that the script is asked for immediately
	probe    probe
	push     push

	following sync.Once // starts the goroutine that follows the master, behind Sentinels
	closing   context.Context
	close     context.CancelFunc
	followed  chan struct{} // closed when that has ended; nil without one
}

// New returns a service on client, which is fit for locks. It does no I/O.
func New(client goredis.UniversalClient, o *Options) *Service {
	s := &Service{o: *o, client: client, identity: rand.Text()[:13], clock: o.Clock, seed: maphash.MakeSeed()}
	s.o.KeyPrefix = cmp.Or(o.KeyPrefix, redisconn.DefaultPrefix)
	s.o.ReplicaTimeout = cmp.Or(o.ReplicaTimeout, replicaTimeout)
	s.o.ProbeTimeout = cmp.Or(o.ProbeTimeout, redisconn.ConnectTime)
	if s.clock == nil {
		s.clock = backend.SystemClock()
	}
	s.closing, s.close = context.WithCancel(context.Background())
	s.lines = lines.New(client, s.clock, s.channel(""), s.probe.suspect)
	if o.Hooks != nil {
		s.lines.ShowTo(o.Hooks)
	}
	return s
}

// Prompt is engine.Prompt's: package lines returns within the caller's context.
func (s *Service) Prompt() {}

// Unfit is engine.Checked's.
func (s *Service) Unfit() error { return s.o.Unfit }

// Describe is engine.Service's.
func (s *Service) Describe() backend.Description {
	capabilities := backend.CapShared | backend.CapPermits | backend.CapMinHold | backend.CapMetadata |
		backend.CapInspect | backend.CapList | backend.CapForceRelease
	if !s.lines.Sharded.Load() {
		capabilities |= backend.CapMultiAcquire
	}
	return backend.Description{
		Name: s.o.Name, Clock: s.clock, Exclusion: s.probe.exclusion(), Capabilities: capabilities,
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
func (s *Service) Classify(err error) engine.Class {
	switch f := redisconn.FailureOf(err); {
	case f.Fatal:
		return engine.Never
	case f.Sent:
		return engine.Unknown
	default:
		return engine.NotDone
	}
}

// Close is engine.Service's. An idle connection ends after a few seconds.
func (s *Service) Close(ctx context.Context) error {
	s.close()
	ends := append(s.lines.Close(), s.push.subscription.Close())
	if s.followed != nil {
		ends = append(ends, s.followed)
	}
	err := redisconn.Await(ctx, ends...)
	if s.o.Own {
		err = errors.Join(err, s.client.Close())
	}
	return err
}

// do carries out one step. An error beside which the server may have carried it out says when that is over.
func (s *Service) do(ctx context.Context, code string, keys redisscript.Keys, args ...string) (any, error) {
	return s.send(ctx, lines.NewStep(code, keys, args...))
}

func (s *Service) send(ctx context.Context, step *lines.Step) (any, error) {
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

// landed waits until the server has carried out a step, or never will.
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
func (s *Service) doAll(ctx context.Context, all []*lines.Step) (answers []any, errs []error) {
	answers, errs = make([]any, len(all)), make([]error, len(all))
	s.lines.DoAll(ctx, all, func(i int, step *lines.Step, err error) {
		if errs[i] = err; err == nil {
			answers[i] = step.Answer
		}
	})
	return answers, errs
}

const (
	instantDigits = 12 // base 36, for any instant
	keyDigits     = 13 // base 36, for 64 bits
	digits        = "0000000000000"
)

// Key is engine.Keys's: a hash, because pushes are public and request ids are not.
func (s *Service) Key(requestID string) string {
	return padded(maphash.String(s.seed, requestID), keyDigits)
}

// hold returns the hold that an attempt of r asks for.
func (s *Service) hold(r *backend.Request) redisscript.Hold {
	h := redisconn.HoldOf(*r, s.identity, 0)
	h.Nonce = padded(uint64(s.tick()), instantDigits) + s.Key(r.RequestID)
	return h
}

// tick returns the present instant, or one that is greater than all before.
func (s *Service) tick() int64 {
	for {
		last, now := s.last.Load(), int64(s.clock.Now())
		if now <= last {
			now = last + 1
		}
		if s.last.CompareAndSwap(last, now) {
			return now
		}
	}
}

func padded(n uint64, width int) string {
	text := strconv.FormatUint(n, 36)
	return digits[:max(0, width-len(text))] + text
}

func (s *Service) keys(name string) redisscript.Keys { return redisscript.KeysOf(s.o.KeyPrefix, name) }

func (s *Service) channel(client string) string { return redisscript.Channel(s.o.KeyPrefix, client) }

var errAnswer = &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
