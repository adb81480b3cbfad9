package main

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/fencing/httpguard"
)

const runHelp = `Usage: fencelock run --name NAME [options] [--] COMMAND [ARGUMENT...]

Waits for the lock NAME, runs COMMAND under it, releases the lock and exits with COMMAND's exit code.

  fencelock run --backend-file /etc/fencelock/backend --name nightly-report --wait 10m -- /usr/local/bin/report

Options (durations like 500ms, 30s, 5m):

{options}

Each option except --name and --owner can also be set in the environment, as FENCELOCK_BACKEND and so on; an empty
variable counts as unset. The command line overrides the environment, and the environment overrides --config.

The environment of COMMAND contains:

  FENCELOCK_NAME         NAME; several names are on separate lines
  FENCELOCK_OWNER        the owner text
  FENCELOCK_TOKEN        the fencing token in decimal digits: send it with every write. Empty in the efficiency tier
  FENCELOCK_TOKEN_SPACE  the cluster that issued the token; not set if there is none
  FENCELOCK_CLAIMS       the claims of the locks, one per line, for "fencelock guard check" and as the header
                         Fencing-Claim of HTTP requests; not set in the efficiency tier
  FENCELOCK_UNDER        the holds under which COMMAND runs, for a nested fencelock: the bundled server refuses a wait
                         that would deadlock, and "fencelock explain" shows what a holder waits for

With several names, FENCELOCK_TOKEN and FENCELOCK_TOKEN_SPACE are not set. FENCELOCK_BACKEND is never passed on.

Fencelock controls COMMAND and all its descendants. When the lock is lost, a guardian process, which knows the deadline
of the lock, sends TERM to all of them, and KILL after --kill-after. If the lock cannot be renewed, it is treated as
lost --kill-after before it expires, so that KILL comes before another process can acquire the lock. The guardian works
even if fencelock is killed or stopped. If the guardian dies, fencelock kills the processes. If the service itself ended
the hold (evicted, force-released), another process may acquire the lock before COMMAND is dead; --kill-after 0 shortens
that time.

The lock is released when no descendant of COMMAND is left. A daemon that COMMAND leaves running keeps the lock, and a
message names it; --kill-children ends it (TERM, --kill-after, KILL). If INT, TERM, HUP or QUIT to fencelock or to
COMMAND has ended COMMAND, its children are ended too (TERM, --stop-timeout, KILL).

After TERM, fencelock sends TERM to COMMAND's process group, TERM to the remaining processes when COMMAND has exited,
and KILL after --stop-timeout. If a process survives KILL, fencelock exits with 71 and does not release the lock, which
then expires after its TTL. Fencelock forwards INT, HUP, QUIT, USR1 and USR2 to COMMAND's process group. After TERM,
INT, HUP and QUIT it also sends CONT, so that a stopped COMMAND ends too.

COMMAND can use the controlling terminal, even if standard input is a pipe: fencelock gives its process group the
foreground at the start or, in a pipeline or a script, when it asks for the terminal. Ctrl-Z stops COMMAND and
fencelock, and the lock expires unless they are resumed in time.

Fencelock does not control processes that another service starts for COMMAND (systemd-run, docker run, ssh, at),
COMMAND's children if fencelock and its guardian are killed or stopped at the same time, or a paused machine or
container. Fencing tokens stop the writes of these. On systems other than Linux, it controls only COMMAND's process
group, and not processes that leave it.

Exit codes, in addition to COMMAND's own:

   64  the command line is invalid, or the backend does not support the request (tier, TTL, kind of lock,
       --at-least), or NAME is in use with another kind or LIMIT
   69  the lock service cannot be reached, even within the time of --wait, or is not configured for locks
   71  the guardian process cannot start, or a process of COMMAND survived KILL; then the lock is not released
   73  the status file cannot be written. COMMAND was not run
   75  another process holds the lock: with --try, after the time of --wait, or because waiting would deadlock: the
       other process waits for a lock that this one holds. COMMAND was not run
   76  the lock was lost while COMMAND ran, whatever COMMAND's exit code
   77  the rules of the lock service deny the lock. COMMAND was not run
  126  COMMAND cannot be executed
  127  COMMAND was not found
  128+n  COMMAND was killed by signal n, or signal n ended the wait for the lock
`

// runSettings are the command line of "fencelock run", checked.
type runSettings struct {
	backend        string
	names          []string
	tier           fencelock.Tier
	readTier       func() (fencelock.Tier, error)
	metadata       map[string]string
	ttl, killAfter time.Duration
	stopTimeout    time.Duration
	killChildren   bool
	wait           time.Duration // zero: without limit
	try            bool
	options        []fencelock.AcquireOption
	owner          string
	conflictCode   int
	command        []string
	path           string // of the command
	runLog
	status   statusFile
	narrator narrator
}

const nameOption = "name"

func defineRun(o *options) func([]string) error {
	s := &runSettings{}
	o.String(configOption, "", configUsage)
	from := o.backend("the lock service, such as redis://host:6379/0")
	o.Func(nameOption, "the `NAME` of the lock; all processes that give the same NAME exclude each other. Given several "+
		"times, COMMAND runs under all of the locks", func(name string) error {
		s.names = append(s.names, name)
		return backend.ValidateName(name)
	})
	hierarchical := o.Bool("hierarchical", false, "NAME is a path: a/b excludes a and everything below a/b")
	shared := o.Bool("shared", false, "share the lock with other processes that give --shared")
	permits := o.String("permits", "", "hold `N/LIMIT` permits, N of at most LIMIT. All processes that use NAME must give "+
		"the same LIMIT")
	o.DurationVar(&s.wait, "wait", 0, "the maximum time to wait for the lock, even while the lock service cannot be "+
		"reached. Without it, run waits indefinitely, and fails if the lock service cannot be reached at the start")
	o.BoolVar(&s.try, "try", false, "do not wait")
	atLeast := o.Duration("at-least", 0, "keep the lock for at least this long after the start, even if COMMAND ends "+
		"earlier")
	s.define(o)
	o.DurationVar(&s.stopTimeout, "stop-timeout", 8*time.Second, "the time between TERM and KILL after TERM to fencelock")
	o.BoolVar(&s.killChildren, "kill-children", false, "end the children that are still running when COMMAND exits. "+
		"Without it, the lock is kept until they end")
	o.IntVarP(&s.conflictCode, "conflict-exit-code", "E", exitHeld, "exit with `N` if another process holds the lock")
	o.StringVar(&s.status.path, "status-file", "", "write the state (waiting, running or ended) to `FILE`, as JSON, "+
		"with the exit codes of COMMAND and of fencelock")
	return func(args []string) error {
		err := s.read(from, o.given("kill-after"))
		if err == nil {
			err = s.check(o, args, *shared, *permits, *atLeast)
		}
		if err != nil {
			return err
		}
		if *hierarchical {
			s.options = append(s.options, fencelock.Hierarchical())
		}
		// Before the lock: a typo must not show only after an hour of waiting.
		if s.path, err = exec.LookPath(s.command[0]); err != nil {
			s.complain("%v", err)
			return exit(exitOfStart(err))
		}
		return exit(s.hold())
	}
}

// define adds the options that "fencelock run" and "fencelock elect" share.
func (s *runSettings) define(o *options) {
	s.readTier = o.tier("in the efficiency tier a rare double run only wastes work; correctness is for a double run that " +
		"corrupts data, and refuses a backend without fencing tokens")
	o.DurationVar(&s.ttl, "ttl", fencelock.DefaultTTL, "the time after which the lock expires if this process dies; "+
		"it is renewed until then")
	o.DurationVar(&s.killAfter, "kill-after", 0, "the time between TERM and KILL after the lock was lost, at most "+
		"half the TTL; 0 kills immediately. The default is 5s or a sixth of the TTL, whichever is less")
	o.StringVar(&s.owner, "owner", "", "a `TEXT` shown to processes that find the lock held. The default is "+
		"host/pid/random")
	s.metadata = map[string]string{}
	o.Func(metadataOption, "a pair `KEY=VALUE` shown with the owner. May be given several times", func(text string) error {
		key, value, found := strings.Cut(text, "=")
		if !found || key == "" {
			return errors.New("want KEY=VALUE")
		}
		s.metadata[key] = value
		return nil
	})
	o.StringVar(&s.format, "log-format", "text", logFormatUsage)
	o.BoolVar(&s.quiet, "quiet", false, "print nothing but usage errors")
	o.BoolVar(&s.verbose, "verbose", false, "also print when the lock is acquired and released")
}

const metadataOption = "metadata"

// read checks these options.
func (s *runSettings) read(from *urlSource, killAfter bool) (err error) {
	if s.tier, err = s.readTier(); err != nil {
		return err
	}
	if s.backend, err = from.required(); err != nil {
		return err
	}
	if s.quiet && s.verbose {
		return errors.New("--quiet and --verbose exclude each other")
	}
	if len(s.metadata) > 0 {
		s.options = append(s.options, fencelock.Metadata(s.metadata))
	}
	return s.checkTimes(killAfter)
}

// check checks the options of "fencelock run" alone.
func (s *runSettings) check(o *options, args []string, shared bool, permits string, atLeast time.Duration) error {
	switch {
	case len(s.names) == 0:
		return errors.New("--name is missing")
	case s.conflictCode < 0 || s.conflictCode > 255:
		return fmt.Errorf("--conflict-exit-code %d: want 0 to 255", s.conflictCode)
	case len(args) == 0 || args[0] == "":
		return errors.New("the command to run is missing")
	case s.stopTimeout < 0:
		return fmt.Errorf("--stop-timeout %v is negative", s.stopTimeout)
	case o.given("wait") && s.try:
		return errors.New("--try and --wait exclude each other")
	case o.given("wait") && s.wait <= 0:
		return fmt.Errorf("--wait %v is not positive; to not wait, give --try", s.wait)
	case shared && o.given("permits"):
		return errors.New("--shared and --permits exclude each other")
	case o.given("at-least") && atLeast <= 0:
		return fmt.Errorf("--at-least %v is not positive", atLeast)
	}
	if shared {
		s.options = append(s.options, fencelock.Shared())
	}
	if o.given("permits") {
		n, limit, err := parsePermits(permits)
		if err != nil {
			return err
		}
		s.options = append(s.options, fencelock.Permits(n, limit))
	}
	if o.given("at-least") {
		s.options = append(s.options, fencelock.HoldAtLeast(atLeast))
	}
	s.command = args
	s.runLog.names = s.names
	return s.runLog.open()
}

// checkTimes checks --ttl and --kill-after, which has a default.
func (s *runSettings) checkTimes(given bool) error {
	if !given {
		s.killAfter = max(0, min(5*time.Second, s.ttl/6))
	}
	switch {
	case s.ttl <= 0:
		return fmt.Errorf("--ttl %v is not positive", s.ttl)
	case s.killAfter < 0:
		return fmt.Errorf("--kill-after %v is negative", s.killAfter)
	case s.killAfter > s.ttl/2:
		return fmt.Errorf("--kill-after %v: it is more than half of --ttl %v; the command is warned that long "+
			"before the lock ends, which leaves too little time to hold it", s.killAfter, s.ttl)
	}
	return nil
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

// environ returns the command's environment, without the variables of an outer fencelock, which belong to another
// lock, and without the URL of the backend, which may have a password in it.
func environ(outer []string, leases fencelock.Leases) []string {
	under := ""
	env := slices.DeleteFunc(slices.Clone(outer), func(kv string) bool {
		key, value, _ := strings.Cut(kv, "=")
		switch key {
		case namesVariable, claimsVariable, underVariable, "FENCELOCK_OWNER", "FENCELOCK_TOKEN", "FENCELOCK_TOKEN_SPACE",
			variable(backendOption):
			if key == underVariable {
				under = value
			}
			return true
		}
		return false
	})
	names, refs := make([]string, len(leases)), make([]string, len(leases))
	for i, l := range leases {
		names[i], refs[i] = l.Name(), builtin.HoldRef(l.Grant().RequestID)
	}
	if under != "" {
		refs = append(refs, strings.Split(under, ",")...)
	}
	env = append(env, "FENCELOCK_OWNER="+leases[0].Owner(), namesVariable+"="+strings.Join(names, "\n"),
		underVariable+"="+strings.Join(refs[:min(len(refs), backend.MaxUnder)], ","))
	if len(leases) == 1 {
		token := ""
		if leases[0].Token().Valid() {
			token = leases[0].Token().String()
		}
		env = append(env, "FENCELOCK_TOKEN="+token)
		if space := leases[0].TokenSpace(); space != "" {
			env = append(env, "FENCELOCK_TOKEN_SPACE="+space)
		}
	}
	if claims := leases.Claims(); leases[0].Token().Valid() {
		h := http.Header{}
		httpguard.SetHeader(h, claims)
		env = append(env, claimsVariable+"="+strings.Join(h.Values(httpguard.Header), "\n"))
	}
	return env
}

// namesVariable has the names of all locks, one on each line.
const namesVariable = "FENCELOCK_NAME"

// underVariable has builtin.HoldRef of the holds that a command runs under, the innermost first, with commas
// between them.
const underVariable = "FENCELOCK_UNDER"

// claimsVariable has the claims of all locks, one on each line, as the header of fencing/httpguard has them.
const claimsVariable = "FENCELOCK_CLAIMS"
