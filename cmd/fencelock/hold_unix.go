//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/fencelock/fencelock"
)

// hold acquires the lock, runs the command under it and releases. It returns the exit code.
func (s *runSettings) hold() int {
	signals := make(chan os.Signal, 32)
	// SIGPIPE is caught and dropped: a message to a standard error that nobody reads must not end us while the command
	// runs. Ignoring it instead would make the command inherit that.
	catch(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	locks, lease, err := s.await(signals)
	if interrupted := (*interruptedError)(nil); errors.As(err, &interrupted) {
		s.complain("%v while waiting for %q", err, s.name)
		return exitSignal + int(interrupted.signal)
	}
	if held := (*fencelock.HeldError)(nil); errors.As(err, &held) {
		s.complain("lock %q: %v", s.name, held)
		return exitOf(err)
	}
	if err != nil {
		s.complain("%v", err)
		return exitOf(err)
	}

	catch(signals, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTSTP, syscall.SIGCONT)
	cmd := exec.Command(s.path)
	cmd.Args = s.command
	cmd.Env = environ(os.Environ(), lease)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr // files: package exec copies nothing
	if err := lease.Err(); err != nil {
		// We stood still between the grant and now. Nothing ran, so nothing was lost but time.
		s.release(locks, lease)
		s.complain("%v, before the command was started", err)
		return exitLost
	}
	g, err := startGroup(cmd)
	if err != nil {
		s.release(locks, lease)
		s.complain("%v", err)
		return exitOfStart(err)
	}
	w := &watch{group: g, lease: lease, grace: s.killAfter, signals: signals}
	w.run()
	return s.conclude(w, locks, lease)
}

// conclude gives the lock back, then says what happened: not the other way round, since standard error may block.
func (s *runSettings) conclude(w *watch, locks *fencelock.Client, lease *fencelock.Lease) int {
	code := w.status.ExitStatus()
	how := fmt.Sprintf("exit code %d", code)
	if w.status.Signaled() {
		code = exitSignal + int(w.status.Signal())
		how = fmt.Sprintf("signal %v", w.status.Signal())
	}
	if !w.exited {
		code, how = exitSignal+int(syscall.SIGKILL), "it does not die"
	}
	if w.survivors {
		s.complain("processes of the command do not die; lock %q is not given back and ends with its TTL of %v", s.name,
			s.ttl)
		if lease.Err() == nil {
			return code
		}
		return exitLost
	}
	if !s.release(locks, lease) {
		return code
	}
	s.complain("%v while the command ran (its end: %s)", lossOf(lease), how)
	return exitLost
}

// lossOf is why the lease was lost, also if that came out only when it was given back.
func lossOf(lease *fencelock.Lease) error {
	if err := lease.Err(); errors.Is(err, fencelock.ErrLost) {
		return err
	}
	return &fencelock.LostError{Name: lease.Name(), Token: lease.Token(), Reason: fencelock.ReasonEvicted}
}

// interruptedError says that a signal ended the wait.
type interruptedError struct{ signal syscall.Signal }

func (e *interruptedError) Error() string { return e.signal.String() }

// await acquires the lock unless a signal comes first.
func (s *runSettings) await(signals <-chan os.Signal) (*fencelock.Client, *fencelock.Lease, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var locks *fencelock.Client
	var lease *fencelock.Lease
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		locks, lease, err = s.acquire(ctx)
	}()
	for {
		select {
		case <-done:
			return locks, lease, err
		case sig := <-signals:
			if sig == syscall.SIGPIPE {
				continue
			}
			cancel()
			<-done
			if err == nil {
				s.release(locks, lease)
			}
			return nil, nil, &interruptedError{sig.(syscall.Signal)}
		}
	}
}

// catch asks for signals, except those that the starting program ignores (nohup, a background job of a script): they
// stay ignored, by the command too.
func catch(signals chan<- os.Signal, wanted ...os.Signal) {
	for _, sig := range wanted {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
}
