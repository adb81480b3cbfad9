//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/internal/proctree"
)

// hold acquires the locks, runs the command under them and releases. It returns the exit code.
func (s *runSettings) hold() int {
	if err := s.status.waiting(s.names); err != nil {
		s.complain("--status-file: %v", err)
		return exitNoCreate
	}
	r := s.holdAndRun()
	if r.outcome == outcomeHeld {
		r.code = s.conflictCode
	}
	// The file first: standard error may block.
	err := s.status.ended(r)
	if r.message != "" {
		s.complain("%s", r.message)
	}
	if err != nil {
		s.complain("--status-file: %v", err)
	}
	return r.code
}

func (s *runSettings) holdAndRun() result {
	signals := make(chan os.Signal, 32)
	// SIGPIPE is caught and dropped: a message to a closed standard error must not end us while the command runs. The
	// command would inherit an ignored SIGPIPE.
	catch(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	tree, err := proctree.Start() // before the lock, so that no waiter waits for the guardian
	if err != nil {
		return result{outcome: outcomeNotStarted, code: exitSystem, message: err.Error()}
	}
	defer tree.Close()
	locks, leases, err := s.await(signals)
	if err != nil {
		return s.notAcquired(err)
	}
	catch(signals, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTSTP, syscall.SIGCONT)
	if err := leases.Err(); err != nil {
		// The process stood still between the grant and now. The command did not run, so only time was lost.
		s.release(locks, leases)
		return result{
			outcome: outcomeLost, code: exitLost, message: fmt.Sprintf("%v, before the command was started", err),
		}
	}
	group, err := tree.Run(&proctree.Command{
		Path: s.path, Args: s.command, Env: environ(os.Environ(), leases), Bounds: s.bounds(leases),
	})
	if err != nil {
		s.release(locks, leases)
		return result{outcome: outcomeNotStarted, code: exitOfStart(err), message: err.Error()}
	}
	if err := s.status.running(group, leases); err != nil {
		s.complain("--status-file: %v", err)
	}
	w := &watch{runSettings: s, tree: tree, group: group, leases: leases, signals: signals}
	w.run()
	return w.conclude(locks)
}

// notAcquired is the result of an acquire that failed.
func (s *runSettings) notAcquired(err error) result {
	var interrupted *interruptedError
	var held *fencelock.HeldError
	switch {
	case errors.As(err, &interrupted):
		return result{
			outcome: outcomeInterrupted, code: exitSignal + int(interrupted.signal),
			message: fmt.Sprintf("%v while waiting for %s", err, s.listed()),
		}
	case errors.As(err, &held):
		return result{
			outcome: outcomeHeld, code: exitOf(err), message: fmt.Sprintf("lock %s: %v", s.listed(), held),
		}
	case errors.Is(err, fencelock.ErrHeld), errors.Is(err, fencelock.ErrDeadlock):
		return result{outcome: outcomeHeld, code: exitOf(err), message: err.Error()}
	}
	return result{outcome: outcomeFailed, code: exitOf(err), message: err.Error()}
}

// conclude releases the locks and returns the result.
func (w *watch) conclude(locks *fencelock.Client) result {
	code := w.status.ExitStatus()
	how := fmt.Sprintf("exit code %d", code)
	if w.status.Signaled() {
		code = exitSignal + int(w.status.Signal())
		how = fmt.Sprintf("signal %v", w.status.Signal())
	}
	if !w.exited {
		code, how = exitSignal+int(syscall.SIGKILL), fmt.Sprintf("signal %v", syscall.SIGKILL)
	}
	if w.survived {
		r := result{outcome: outcomeSurvived, code: exitSystem, message: fmt.Sprintf(
			"processes survive KILL: %s; lock %s is not released and ends with its TTL of %v", listed(w.left),
			w.listed(), w.ttl)}
		if w.exited {
			r.command = &code
		}
		return r
	}
	r := result{outcome: outcomeExited, code: code, command: &code}
	switch lost := w.release(locks, w.leases); {
	case lost:
		r.outcome, r.code = outcomeLost, exitLost
		r.message = fmt.Sprintf("%v while the command ran (its end: %s)", lossOf(w.leases), how)
	case w.terminating && code == exitSignal+int(syscall.SIGKILL):
		r.message = fmt.Sprintf("the command did not end within %v of TERM and was killed", w.stopTimeout)
	case w.orphaned:
		r.message = "the guardian process has died; the command and its children were killed (its end: " + how + ")"
	case w.expired:
		r.message = fmt.Sprintf("the guardian process learned of no renewal of %s in time; the command and its "+
			"children were killed (its end: %s)", w.listed(), how)
	}
	return r
}

// lossOf returns why a lease was lost, even if only its release showed that.
func lossOf(leases fencelock.Leases) error {
	for _, l := range leases {
		if err := l.Err(); errors.Is(err, fencelock.ErrLost) {
			return err
		}
	}
	l := leases[0]
	return &fencelock.LostError{Name: l.Name(), Token: l.Token(), Reason: fencelock.ReasonEvicted}
}

// interruptedError means that a signal ended the wait.
type interruptedError struct{ signal syscall.Signal }

func (e *interruptedError) Error() string { return e.signal.String() }

// await acquires the locks unless a signal comes first.
func (s *runSettings) await(signals <-chan os.Signal) (*fencelock.Client, fencelock.Leases, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var locks *fencelock.Client
	var leases fencelock.Leases
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		locks, leases, err = s.acquire(ctx)
	}()
	for {
		select {
		case <-done:
			return locks, leases, err
		case sig := <-signals:
			if sig == syscall.SIGPIPE {
				continue
			}
			cancel()
			<-done
			if err == nil {
				s.release(locks, leases)
			}
			return nil, nil, &interruptedError{sig.(syscall.Signal)}
		}
	}
}

// catch requests signals, except the ones that the starting program ignores (nohup, a background job of a script):
// they stay ignored, by the command too.
func catch(signals chan<- os.Signal, wanted ...os.Signal) {
	for _, sig := range wanted {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
}
