package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
)

const runHelp = `Usage: fencelock run --backend URL --name NAME [options] [--] COMMAND [ARGUMENT...]

Waits for the lock NAME, runs COMMAND under it, releases the lock and exits with COMMAND's exit code.

Options (durations like 500ms, 30s, 5m):

  --backend URL      the lock service, such as redis://user:password@host:6379/0. Default: $FENCELOCK_BACKEND
  --name NAME        the lock; all who give the same NAME exclude each other
  --tier TIER        efficiency (default): a rare double run only wastes work
                     correctness: a double run corrupts data. A backend without fencing tokens is refused
  --ttl D            how long the lock outlives this process if it dies. Default 30s; renewed meanwhile
  --wait D           wait at most D for the lock, the time to connect included. Default: as long as it takes
  --try              do not wait
  --shared           hold it beside others who give --shared, and beside nobody else
  --permits N/LIMIT  hold N of LIMIT permits: at most LIMIT run at once. All who use NAME give the same LIMIT
  --at-least D       keep the name closed for D after the start, even if COMMAND ends or dies earlier
  --kill-after D     time between TERM and KILL, at most half the TTL. 0: KILL at once. Default: 5s or a sixth of the
                     TTL, whichever is less
  --owner TEXT       shown to those who find the lock held. Default: host/pid/random
  --quiet            say nothing but usage errors
  --verbose          say also when the lock is acquired, in doubt and released

COMMAND finds in its environment:

  FENCELOCK_NAME         NAME
  FENCELOCK_OWNER        the owner text
  FENCELOCK_TOKEN        the fencing token in decimal digits: send it with every write. Empty in the efficiency tier
  FENCELOCK_TOKEN_SPACE  the cluster that issued the token; not set if there is none

When the lock is lost, COMMAND and all of its process group get TERM, and KILL after --kill-after. A lock that cannot be
renewed counts as lost that much before its end: the KILL comes before anybody else can get the lock. If fencelock
itself stood still for longer (SIGSTOP, a suspended machine), KILL comes at once when it goes on; until then COMMAND ran
without the lock, and only a fencing token stops its writes. A lock that was taken away in the service (evicted,
force-released) may have a new holder before COMMAND is dead; --kill-after 0 makes that time short.

INT, TERM, HUP, QUIT, USR1 and USR2 are passed on to COMMAND's process group. What COMMAND leaves in its process group
when it exits is ended (TERM, --kill-after, KILL) before the lock is released. A process that leaves the group, by
setsid for example, is not followed. If standard input is a terminal in whose foreground fencelock runs, COMMAND's group
has the foreground, and Ctrl-C and Ctrl-Z reach it there. If fencelock is killed with KILL, COMMAND is killed too, on
Linux; the processes that COMMAND started are not, nor is COMMAND on other systems.

Exit codes, apart from COMMAND's own:

   64  the command line makes no sense, or the backend cannot do what it asks for (tier, TTL, kind of lock,
       --at-least), or NAME is in use with another kind or LIMIT
   69  the lock service cannot be reached, also within the time of --wait, or is not fit for locks
   75  somebody else holds the lock: at once with --try, after the time of --wait. COMMAND was not run
   76  the lock was lost while COMMAND ran, whatever COMMAND's exit code
  126  COMMAND cannot be executed
  127  COMMAND was not found
  128+n  COMMAND was killed by signal n, or signal n ended the wait for the lock
`

// runSettings are the command line of "fencelock run", checked.
type runSettings struct {
	backend, name  string
	tier           fencelock.Tier
	ttl, killAfter time.Duration
	wait           time.Duration // zero: as long as it takes
	try            bool
	options        []fencelock.AcquireOption
	owner          string
	quiet, verbose bool
	command        []string
	path           string // of the command
}

// runMain is "fencelock run".
func runMain(args []string) int {
	s, err := parseRun(args)
	if code, done := unparsed("run", runHelp, err); done {
		return code
	}
	// Before the lock: nobody should wait an hour to learn of a typing mistake.
	if s.path, err = exec.LookPath(s.command[0]); err != nil {
		s.complain("%v", err)
		return exitOfStart(err)
	}
	return s.hold()
}

func parseRun(args []string) (*runSettings, error) {
	s := &runSettings{}
	var tier, permits string
	var shared bool
	var atLeast time.Duration
	f := newFlags("run")
	f.StringVar(&s.backend, "backend", os.Getenv("FENCELOCK_BACKEND"), "")
	f.StringVar(&s.name, "name", "", "")
	f.StringVar(&tier, "tier", fencelock.Efficiency.String(), "")
	f.DurationVar(&s.ttl, "ttl", fencelock.DefaultTTL, "")
	f.DurationVar(&s.wait, "wait", 0, "")
	f.BoolVar(&s.try, "try", false, "")
	f.BoolVar(&shared, "shared", false, "")
	f.StringVar(&permits, "permits", "", "")
	f.DurationVar(&atLeast, "at-least", 0, "")
	f.DurationVar(&s.killAfter, "kill-after", 0, "")
	f.StringVar(&s.owner, "owner", "", "")
	f.BoolVar(&s.quiet, "quiet", false, "")
	f.BoolVar(&s.verbose, "verbose", false, "")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	given := givenOf(f)
	if !given["kill-after"] {
		s.killAfter = min(5*time.Second, s.ttl/6)
	}
	var err error
	if s.tier, err = tierOf(tier); err != nil {
		return nil, err
	}
	switch {
	case s.backend == "":
		return nil, errors.New("--backend is missing, and FENCELOCK_BACKEND is not set")
	case s.name == "":
		return nil, errors.New("--name is missing")
	case f.NArg() == 0 || f.Arg(0) == "":
		return nil, errors.New("the command to run is missing")
	case s.ttl <= 0:
		return nil, fmt.Errorf("--ttl %v: it is not positive", s.ttl)
	case s.killAfter < 0:
		return nil, fmt.Errorf("--kill-after %v: it is negative", s.killAfter)
	case s.killAfter > s.ttl/2:
		return nil, fmt.Errorf("--kill-after %v: it is more than half of --ttl %v; the command is warned that long "+
			"before the lock ends, which leaves too little time to hold it", s.killAfter, s.ttl)
	case given["wait"] && s.try:
		return nil, errors.New("--try and --wait exclude each other")
	case given["wait"] && s.wait <= 0:
		return nil, fmt.Errorf("--wait %v: it is not positive; --try does not wait", s.wait)
	case shared && given["permits"]:
		return nil, errors.New("--shared and --permits exclude each other")
	case given["at-least"] && atLeast <= 0:
		return nil, fmt.Errorf("--at-least %v: it is not positive", atLeast)
	case s.quiet && s.verbose:
		return nil, errors.New("--quiet and --verbose exclude each other")
	}
	if err := checkBackend(s.backend); err != nil {
		return nil, err
	}
	if shared {
		s.options = append(s.options, fencelock.Shared())
	}
	if given["permits"] {
		n, limit, err := parsePermits(permits)
		if err != nil {
			return nil, err
		}
		s.options = append(s.options, fencelock.Permits(n, limit))
	}
	if given["at-least"] {
		s.options = append(s.options, fencelock.HoldAtLeast(atLeast))
	}
	s.command = f.Args()
	return s, nil
}

// parsePermits reads "2/8".
func parsePermits(text string) (n, limit int, err error) {
	before, after, _ := strings.Cut(text, "/")
	n, err1 := strconv.Atoi(before)
	limit, err2 := strconv.Atoi(after)
	if err1 != nil || err2 != nil || n < 1 || limit < n || limit > math.MaxInt32 {
		return 0, 0, fmt.Errorf("--permits %s: want N/LIMIT, such as 2/8, with N from 1 to LIMIT", text)
	}
	return n, limit, nil
}

// complain says what went wrong, and report what went well.
func (s *runSettings) complain(format string, args ...any) {
	if !s.quiet {
		say(format, args...)
	}
}

func (s *runSettings) report(format string, args ...any) {
	if s.verbose {
		say(format, args...)
	}
}

// attemptTime bounds the connection, and an attempt that does not wait.
const attemptTime = 10 * time.Second

// acquire connects and takes the lock. The client is nil on error.
func (s *runSettings) acquire(ctx context.Context) (*fencelock.Client, *fencelock.Lease, error) {
	began, limit := time.Now(), attemptTime
	if s.wait > 0 {
		limit = min(limit, s.wait)
	}
	opening, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	locks, err := fencelock.OpenURL(opening, s.backend, s.tier, &fencelock.Options{
		TTL: s.ttl, Owner: s.owner, Observer: fencelock.ObserverFunc(s.observe),
		// The lease ends that much earlier, so that the time between TERM and KILL passes while nobody else can hold
		// the lock. A lease that ends at the last moment would leave the command alive beside the next holder.
		StopEarly: s.killAfter,
	})
	if err != nil && opening.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("lock %q: the service did not answer within %v, so that nobody knows whether it is held: %w",
			s.name, limit, err)
	}
	if err != nil {
		return nil, nil, err
	}
	var lease *fencelock.Lease
	if s.try {
		trying, cancel := context.WithTimeout(ctx, attemptTime)
		defer cancel()
		lease, err = locks.TryAcquire(trying, s.name, s.options...)
	} else {
		options := s.options
		if s.wait > 0 {
			left := max(s.wait-time.Since(began), time.Millisecond)
			options = append(slices.Clone(options), fencelock.WaitAtMost(left))
		}
		lease, err = locks.Acquire(ctx, s.name, options...)
	}
	if err != nil {
		s.close(locks, releaseTime)
		return nil, nil, err
	}
	return locks, lease, nil
}

// What is left to do at the end is bounded. After a loss there is little: what the service may still keep ends with a
// TTL that is almost over, and the service is likely out of reach.
const (
	releaseTime = 5 * time.Second
	lostTime    = 500 * time.Millisecond
)

// release gives the lock back, whatever signals arrive meanwhile, and reports whether the lock had been lost.
func (s *runSettings) release(locks *fencelock.Client, lease *fencelock.Lease) (lost bool) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
	defer cancel()
	err := lease.Release(ctx)
	if errors.Is(err, fencelock.ErrLost) {
		s.close(locks, lostTime)
		return true
	}
	if closed := locks.Close(ctx); err != nil && closed != nil { // Close has tried again
		s.complain("the release of %q was not confirmed, it ends with its TTL of %v: %v", s.name, s.ttl, err)
	}
	return false
}

// close tidies up where nothing is held any more. If it fails, something that was asked for in vain ends with its TTL.
func (s *runSettings) close(locks *fencelock.Client, within time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := locks.Close(ctx); err != nil {
		s.report("%v", err)
	}
}

// environ is the command's environment. What an outer fencelock put there belongs to another lock.
func environ(outer []string, lease *fencelock.Lease) []string {
	env := slices.DeleteFunc(slices.Clone(outer), func(kv string) bool {
		key, _, _ := strings.Cut(kv, "=")
		switch key {
		case "FENCELOCK_NAME", "FENCELOCK_OWNER", "FENCELOCK_TOKEN", "FENCELOCK_TOKEN_SPACE":
			return true
		}
		return false
	})
	token := ""
	if lease.Token().Valid() {
		token = lease.Token().String()
	}
	env = append(env,
		"FENCELOCK_NAME="+lease.Name(), "FENCELOCK_OWNER="+lease.Owner(), "FENCELOCK_TOKEN="+token)
	if space := lease.TokenSpace(); space != "" {
		env = append(env, "FENCELOCK_TOKEN_SPACE="+space)
	}
	return env
}

// observe prints for --verbose.
func (s *runSettings) observe(_ context.Context, e fencelock.Event) {
	switch e.Type {
	case fencelock.EventAcquired:
		s.report("lock %q is acquired after %v", e.Name, e.Wait.Round(time.Millisecond))
	case fencelock.EventSuspect:
		s.report("lock %q was not renewed and is tried again, for %v at most: %v", e.Name,
			e.Left.Round(time.Millisecond), e.Err)
	case fencelock.EventReleased:
		if e.Err == nil {
			s.report("lock %q is given back after %v", e.Name, e.Held.Round(time.Millisecond))
		}
	}
}
