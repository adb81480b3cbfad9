//go:build unix

// Command contender acquires and releases a few names until its standard input ends, and appends each hold to a file.
// TestVersions builds it in the tree of an earlier release and in this one, so it uses only the public interface of both.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	_ "github.com/fencelock/fencelock/builtin"
	_ "github.com/fencelock/fencelock/etcd"
	_ "github.com/fencelock/fencelock/postgres"
	_ "github.com/fencelock/fencelock/redis"
	_ "github.com/fencelock/fencelock/redlock"
	_ "github.com/fencelock/fencelock/zookeeper"
)

const (
	workers = 3
	// maxWait bounds the wait of a patient acquire. A wait that long is an error.
	maxWait = time.Minute
)

// line is a line of the file.
type line struct {
	Who   string        `json:"who"`             // the side, such as older
	What  string        `json:"what"`            // began, ended, held, cancelled, trouble, error or refused
	Hold  string        `json:"hold,omitempty"`  // of began and ended
	Name  string        `json:"name,omitempty"`  // of began
	Kind  string        `json:"kind,omitempty"`  // of began: exclusive, shared or permits
	Token uint64        `json:"token,omitempty"` // of began
	Wait  time.Duration `json:"wait,omitempty"`  // of began: how long the acquire took
	At    int64         `json:"at"`              // by the clock that all processes share, in nanoseconds
	Text  string        `json:"text,omitempty"`  // of trouble, error, refused, and of ended before its time
}

var (
	url    = flag.String("url", "", "the `URL` of the service")
	file   = flag.String("file", "", "the `file` to which the holds are appended")
	side   = flag.String("side", "", "the `side` that the lines name")
	ttl    = flag.Duration("ttl", 2*time.Second, "the TTL of the holds")
	tokens = flag.Bool("tokens", false, "want fencing tokens")
	mortal = flag.Bool("mortal", false, "kill the process while it holds, after some seconds")
)

type contender struct {
	locks *fencelock.Client
	out   *os.File

	mu    sync.Mutex // protects the following field, and is held while the process kills itself
	holds map[*fencelock.Lease]bool

	rare     atomic.Int64 // when the next rare event is due
	refusals atomic.Int64
}

func main() {
	flag.Parse()
	goredis.SetLogger(silent{})
	out, err := os.OpenFile(*file, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	c := &contender{out: out, holds: map[*fencelock.Lease]bool{}}
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	driver, err := backend.Open(ctx, *url)
	if err == nil { // by the constructors that both versions have
		if fences, ok := driver.(backend.FencingDriver); ok && *tokens {
			c.locks, err = fencelock.ForCorrectness(fences, &fencelock.Options{TTL: *ttl})
		} else {
			c.locks, err = fencelock.ForEfficiency(driver, &fencelock.Options{TTL: *ttl})
		}
	}
	if err != nil {
		if ctx.Err() != nil {
			return
		}
		c.write(line{What: "refused", Text: err.Error()})
		os.Exit(3)
	}
	c.rare.Store(now() + int64(rand.N(4**ttl)))
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for ctx.Err() == nil {
				c.turn(ctx)
			}
		})
	}
	all.Wait()
	ctx, stop = context.WithTimeout(context.Background(), maxWait)
	defer stop()
	if err := c.locks.Close(ctx); err != nil {
		c.fail(err)
	}
}

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// now is the time by the clock that all processes share.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return t.Nano()
}

// write appends a line in one write, so that lines of several processes do not mix.
func (c *contender) write(l line) {
	l.Who = *side
	if l.At == 0 {
		l.At = now()
	}
	text, err := json.Marshal(l)
	if err == nil {
		_, err = c.out.Write(append(text, '\n'))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// fail notes an error. A few permanent refusals end the process.
func (c *contender) fail(err error) {
	what := "error"
	switch {
	case errors.Is(err, fencelock.ErrUnavailable), errors.Is(err, fencelock.ErrUnknown),
		errors.Is(err, fencelock.ErrLost), errors.Is(err, fencelock.ErrNotHeld):
		what = "trouble" // a machine that stalls has it
	case errors.Is(err, fencelock.ErrMisconfigured), errors.Is(err, fencelock.ErrHistoryLost):
		what = "refused"
	}
	c.write(line{What: what, Text: err.Error()})
	if what == "refused" && c.refusals.Add(1) > 2*workers {
		c.endAll() // and nothing begins any more
		os.Exit(3)
	}
	time.Sleep(100 * time.Millisecond)
}

// later sets the time of the next rare event, which closes a name for up to a TTL.
func (c *contender) later() {
	c.rare.Store(now() + int64(4**ttl+rand.N(4**ttl)))
}

// due reports whether a rare event is due, to one worker.
func (c *contender) due() bool {
	at := c.rare.Load()
	return now() > at && c.rare.CompareAndSwap(at, now()+int64(time.Hour))
}

// turn acquires, holds and releases once.
func (c *contender) turn(ctx context.Context) {
	names, opts := []string{fmt.Sprint("exclusive-", rand.N(2))}, []fencelock.AcquireOption{}
	kind := "exclusive"
	switch p := rand.N(100); {
	case p < 10:
		names = []string{"exclusive-0", "exclusive-1"}
	case p < 25:
		names[0] = "shared"
		if p < 20 {
			kind, opts = "shared", append(opts, fencelock.Shared())
		}
	case p < 35:
		names[0], kind, opts = "permits", "permits", append(opts, fencelock.Permits(2, 3))
	case p < 38:
		opts = append(opts, fencelock.HoldAtLeast(5*time.Millisecond))
	}
	rare := ""
	if c.due() {
		defer c.later()
		some := []string{"expires", "renews"}
		if *mortal {
			some = append(some, "dies", "dies", "dies")
		}
		if rare = some[rand.N(len(some))]; rare == "expires" {
			opts = append(opts, fencelock.NoRenew())
		}
	}
	patience, acquire := maxWait, c.locks.AcquireAll
	switch p := rand.N(100); {
	case rare != "":
	case p < 15:
		patience = rand.N(30*time.Millisecond) + time.Millisecond
	case p < 30:
		acquire = c.locks.TryAcquireAll
	}
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	began := now()
	var leases fencelock.Leases
	var err error
	if len(names) == 1 {
		leases = make(fencelock.Leases, 1)
		if patience == maxWait && rand.N(100) < 15 && rare == "" {
			leases[0], err = c.locks.TryAcquire(bounded, names[0], opts...)
		} else {
			leases[0], err = c.locks.Acquire(bounded, names[0], opts...)
		}
	} else {
		leases, err = acquire(bounded, names, opts...)
	}
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return
	case errors.Is(err, fencelock.ErrHeld):
		c.write(line{What: "held"})
		time.Sleep(rand.N(5 * time.Millisecond))
		return
	case bounded.Err() != nil && patience < maxWait:
		c.write(line{What: "cancelled"})
		return
	case errors.Is(err, fencelock.ErrUnsupported):
		return // the driver has no such kind
	default:
		c.fail(fmt.Errorf("acquire %s of %v: %w", kind, names, err))
		return
	}
	for _, l := range leases {
		c.begin(l, kind, time.Duration(now()-began))
	}
	switch rare {
	case "dies":
		c.die()
	case "expires":
		time.Sleep(max(0, time.Until(leases[0].Deadline())))
	case "renews":
		time.Sleep(*ttl + *ttl/2)
	default:
		time.Sleep(rand.N(4 * time.Millisecond))
	}
	for _, l := range leases {
		c.end(l)
	}
	if rare == "expires" {
		return
	}
	for _, l := range leases {
		bounded, cancel := context.WithTimeout(context.Background(), maxWait)
		if err := l.Release(bounded); err != nil {
			c.fail(fmt.Errorf("release %s: %w", l.Name(), err))
		}
		cancel()
	}
}

// begin notes the beginning of a hold, if it is still held.
func (c *contender) begin(l *fencelock.Lease, kind string, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := now()
	if l.Err() != nil {
		return
	}
	c.holds[l] = true
	c.write(line{
		What: "began", Hold: l.HoldID(), Name: l.Name(), Kind: kind, Token: uint64(l.Token()), Wait: wait, At: at,
	})
}

// end notes the end of a hold: the present, or the lease's deadline if that is over.
func (c *contender) end(l *fencelock.Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(l)
}

func (c *contender) endLocked(l *fencelock.Lease) {
	if !c.holds[l] {
		return
	}
	delete(c.holds, l)
	at, text := now(), ""
	if left := time.Until(l.Deadline()); left <= 0 {
		at += int64(left)
	} else if err := l.Err(); err != nil {
		text = err.Error()
	}
	c.write(line{What: "ended", Hold: l.HoldID(), Name: l.Name(), At: at, Text: text})
}

// endAll ends all holds for a process that is about to end, and locks c.mu permanently, so that no other hold begins.
func (c *contender) endAll() {
	c.mu.Lock()
	for l := range c.holds {
		c.endLocked(l)
	}
}

// die kills the process while it holds. Its holds have ended by then, since it does nothing more under them.
func (c *contender) die() {
	c.endAll()
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {}
}
