package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
)

// This file has the reports of "fencelock run": the log on standard error, and the status file.

// runLog writes messages to standard error.
type runLog struct {
	quiet, verbose bool
	format         string
	names          []string
	json           *slog.Logger // nil: text for people
}

// open checks the format.
func (l *runLog) open() error {
	switch l.format {
	case "text":
	case "json":
		l.json = slog.New(slog.NewJSONHandler(os.Stderr, nil)).With("locks", l.names)
	default:
		return fmt.Errorf("--log-format %s: want text or json", l.format)
	}
	return nil
}

// complain reports a failure, and report a success.
func (l *runLog) complain(format string, args ...any) {
	if !l.quiet {
		l.write(slog.LevelWarn, format, args...)
	}
}

func (l *runLog) report(format string, args ...any) {
	if l.verbose {
		l.write(slog.LevelInfo, format, args...)
	}
}

func (l *runLog) write(level slog.Level, format string, args ...any) {
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", "; ")
	if l.json == nil {
		say("%s", text)
		return
	}
	l.json.Log(context.Background(), level, strings.TrimPrefix(text, "fencelock: "))
}

// Outcomes of a run, in the status file.
const (
	outcomeExited      = "exited"      // COMMAND ran and has ended, and the lock was released
	outcomeHeld        = "held"        // another holder has the lock
	outcomeLost        = "lost"        // the lock was lost while COMMAND ran
	outcomeInterrupted = "interrupted" // a signal ended the wait
	outcomeNotStarted  = "not-started" // COMMAND cannot be executed
	outcomeFailed      = "failed"      // the lock could not be acquired
	outcomeSurvived    = "survived"    // processes of COMMAND survive KILL, and the lock was not released
)

// result is the result of a run.
type result struct {
	outcome string
	code    int    // of fencelock
	command *int   // COMMAND's exit code as a shell reports it; nil if it did not run
	message string // for the log; empty: no error
}

// statusFile reports the state of a run to other programs. It has the field names of docs/HTTP.md.
type statusFile struct {
	path string
	now  runStatus
}

// runStatus is the content of a status file.
type runStatus struct {
	State           string       `json:"state"` // waiting, running or ended
	Since           time.Time    `json:"since"`
	LockKeys        []string     `json:"lockKeys"`
	PID             int          `json:"pid"` // of fencelock
	CommandPID      int          `json:"commandPid,omitempty"`
	Locks           []statusLock `json:"locks,omitempty"`
	Outcome         string       `json:"outcome,omitempty"`
	ExitCode        *int         `json:"exitCode,omitempty"`
	CommandExitCode *int         `json:"commandExitCode,omitempty"`
	Message         string       `json:"message,omitempty"`
}

// statusLock is a held lock.
type statusLock struct {
	LockKey      string `json:"lockKey"`
	OwnerID      string `json:"ownerId"`
	FencingToken uint64 `json:"fencingToken,omitempty"`
	TokenSpace   string `json:"tokenSpace,omitempty"`
}

func (s *statusFile) waiting(names []string) error {
	s.now = runStatus{State: "waiting", LockKeys: names, PID: os.Getpid()}
	return s.write()
}

func (s *statusFile) running(pid int, leases fencelock.Leases) error {
	s.now.State, s.now.CommandPID = "running", pid
	for _, l := range leases {
		lock := statusLock{LockKey: l.Name(), OwnerID: l.Owner(), TokenSpace: l.TokenSpace()}
		if l.Token().Valid() {
			lock.FencingToken = uint64(l.Token())
		}
		s.now.Locks = append(s.now.Locks, lock)
	}
	return s.write()
}

func (s *statusFile) ended(r result) error {
	s.now.State, s.now.Locks = "ended", nil
	s.now.Outcome, s.now.ExitCode, s.now.CommandExitCode, s.now.Message = r.outcome, &r.code, r.command, r.message
	return s.write()
}

func (s *statusFile) write() error {
	s.now.Since = time.Now().UTC()
	return replaceFile(s.path, &s.now)
}

// replaceFile replaces a file by an object in one step, so that a reader never sees half of it. An empty path means
// no file.
func replaceFile(path string, object any) error {
	if path == "" {
		return nil
	}
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".fencelock-*")
	if err != nil {
		return err
	}
	_, err = file.Write(append(text, '\n'))
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Chmod(file.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		_ = os.Remove(file.Name())
	}
	return err
}
