//go:build unix

package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/internal/proctree"
)

// elect stands for election until a signal. It returns the exit code.
func (s *electSettings) elect() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// Caught and dropped: a message to a closed standard error must not end us while we lead.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	e := &election{electSettings: s, file: stateFile{path: s.stateFile}}
	err := e.file.set(func(now *electState) {
		*now = electState{State: stateFollowing, LockKey: s.names[0], PID: os.Getpid()}
	})
	if err != nil {
		s.complain("--state-file: %v", err)
		return exitNoCreate
	}
	locks, err := s.connect(ctx)
	if err == nil {
		go e.watchLeaders(ctx, locks)
		err = locks.Lead(ctx, s.names[0], e.lead, s.options...)
		s.close(locks, releaseTime)
	}
	e.tell(func(now *electState) { *now = electState{State: stateStopped, LockKey: s.names[0]} })
	if ctx.Err() != nil {
		return exitOK
	}
	s.complain("%v", err)
	return exitOf(err)
}

// election is one run of "fencelock elect".
type election struct {
	*electSettings
	file stateFile
	// seen is the leader that the service last reported; changed under the lock of file only. A new leader may be
	// seen while this process still leads by its own lease.
	seen string
}

// tell changes the state file.
func (e *election) tell(change func(*electState)) {
	if err := e.file.set(change); err != nil {
		e.complain("--state-file: %v", err)
	}
}

// watchLeaders keeps the leader in the state file, if the service reports it.
func (e *election) watchLeaders(ctx context.Context, locks *fencelock.Client) {
	for ctx.Err() == nil {
		for leader, err := range locks.Leaders(ctx, e.names[0]) {
			if errors.Is(err, fencelock.ErrUnsupported) {
				return
			}
			if err != nil {
				break
			}
			e.tell(func(now *electState) {
				if e.seen = leader.Owner; now.State == stateFollowing {
					now.LeaderID = e.seen
				}
			})
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second): // the service is unreachable
		}
	}
}

// lead runs while the process leads.
func (e *election) lead(ctx context.Context, lease *fencelock.Lease) error {
	leases := fencelock.Leases{lease}
	e.tell(func(now *electState) {
		now.State, now.LeaderID, now.TokenSpace = stateLeading, lease.Owner(), lease.TokenSpace()
		now.ExpiresAt, now.FencingToken = lease.Deadline().UTC(), 0
		if lease.Token().Valid() {
			now.FencingToken = uint64(lease.Token())
		}
	})
	e.report("leads %s", e.listed())
	err := e.whileLeading(ctx, leases)
	e.tell(func(now *electState) {
		*now = electState{State: stateFollowing, LockKey: now.LockKey, PID: now.PID}
		if e.seen != lease.Owner() {
			now.LeaderID = e.seen
		}
	})
	if lost := lease.Err(); lost != nil {
		e.complain("%v while this process led", lost)
	} else {
		e.report("leads %s no more", e.listed())
	}
	if e.onLoss != "" {
		end := proctree.Now().Add(e.killAfter)
		code := e.hook(context.Background(), e.onLoss, leases, func() proctree.Bounds {
			return proctree.Bounds{Term: end, Kill: end}
		})
		if code != 0 {
			e.complain("--on-loss: exit code %d", code)
		}
	}
	return err
}

// whileLeading returns when the leadership has ended, or is to end.
func (e *election) whileLeading(ctx context.Context, leases fencelock.Leases) error {
	ended := make(chan struct{})
	refreshed := make(chan struct{})
	go func() {
		defer close(refreshed)
		e.refresh(ended, leases[0])
	}()
	defer func() {
		close(ended)
		<-refreshed
	}()
	if e.onGain != "" {
		code := e.hook(ctx, e.onGain, leases, func() proctree.Bounds { return e.bounds(leases) })
		if code != 0 && ctx.Err() == nil {
			e.complain("--on-gain: exit code %d; this process resigns", code)
			return fencelock.ErrResign
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// refresh keeps expiresAt in the state file.
func (e *election) refresh(ended <-chan struct{}, lease *fencelock.Lease) {
	if e.stateFile == "" {
		return
	}
	for tick := time.Tick(max(time.Millisecond, e.ttl/6)); ; {
		select {
		case <-ended:
			return
		case <-tick:
			e.tell(func(now *electState) { now.ExpiresAt = lease.Deadline().UTC() })
		}
	}
}

// hook runs a shell command until it ends, or ctx does. It returns the exit code as a shell reports it.
func (e *election) hook(
	ctx context.Context, script string, leases fencelock.Leases, bounds func() proctree.Bounds,
) (code int) {
	tree, err := proctree.Start()
	if err != nil {
		e.complain("%v", err)
		return exitSystem
	}
	defer tree.Close()
	_, err = tree.Run(&proctree.Command{
		Path: e.path, Args: []string{"sh", "-c", script}, Env: environ(os.Environ(), leases), Bounds: bounds(),
	})
	if err != nil {
		e.complain("%v", err)
		return exitOfStart(err)
	}
	code = exitSignal + int(syscall.SIGKILL)
	done := ctx.Done()
	for tick := time.Tick(max(time.Millisecond, e.ttl/10)); ; {
		select {
		case event := <-tree.Events():
			switch status := syscall.WaitStatus(event.Status); event.Type {
			case proctree.Exited:
				if code = status.ExitStatus(); status.Signaled() {
					code = exitSignal + int(status.Signal())
				}
				tree.End(e.killAfter, true) // its leftover processes
			case proctree.Survived:
				e.complain("processes survive KILL: %s", listed(event.Left))
				return code
			case proctree.Ended:
				return code
			}
		case <-done:
			done = nil
			tree.End(e.killAfter, true)
		case <-tick:
			tree.SetBounds(bounds())
		}
	}
}
