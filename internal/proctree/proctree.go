// Package proctree runs a command and owns every process that descends from it.
//
//	caller ──socket──► guardian ──fork──► command ──► its children, whatever group or session they move to
//
// The guardian is the same program, started by Start before the command. It has the deadline of the lock and kills the
// tree then, so that the tree ends even after SIGSTOP or the death of the caller. Caller and guardian are both
// subreapers: the orphans of the tree become children of the guardian, and of the caller if the guardian dies. The
// tree has ended when its reaper has no child left, which the kernel answers without a race.
//
// On systems without subreapers the tree is the process group of the command.
package proctree

import (
	"errors"
	"syscall"
	"time"
)

// ErrUnsupported is returned by Start on a system without process groups.
var ErrUnsupported = errors.New("proctree: this system has no process groups")

// Command is the command that the guardian starts.
type Command struct {
	// Path is the program, Args its arguments with its name, Env its environment. Standard input, output and error,
	// the directory and other inherited files are those of the caller.
	Path string   `json:"path"`
	Args []string `json:"args"`
	Env  []string `json:"env"`
	// Bounds are those at the start.
	Bounds Bounds `json:"bounds"`
}

// Instant is a time on a clock of the machine, which counts the time of a suspension on Linux. Instants of the caller
// and of the guardian compare.
type Instant int64

// Add returns t + d.
func (t Instant) Add(d time.Duration) Instant { return t + Instant(d) }

// Bounds are the instants at which the guardian ends the tree without an order.
type Bounds struct {
	// Term is when every process of the tree gets TERM.
	Term Instant `json:"term"`
	// Kill is when every process of the tree gets KILL.
	Kill Instant `json:"kill"`
}

// EventType is the kind of an event of the tree.
type EventType string

const (
	// Stopped: a signal, in Status, has stopped the command.
	Stopped EventType = "stopped"
	// Exited: the command has ended with Status. Left are its descendants, which run on.
	Exited EventType = "exited"
	// Expired: the guardian reached a bound, and ends the tree.
	Expired EventType = "expired"
	// Orphaned: the guardian died, and the caller kills the tree.
	Orphaned EventType = "orphaned"
	// Ended: no process of the tree is left. It is the last event.
	Ended EventType = "ended"
	// Survived: KILL did not end the processes in Left within the time that processes need to die. It is the last event;
	// the guardian continues as long as they live.
	Survived EventType = "survived"
)

// Event is one change of the tree.
type Event struct {
	Type   EventType `json:"type"`
	Status uint32    `json:"status,omitempty"`
	Left   []Process `json:"left,omitempty"`
}

// Process is a process of the tree.
type Process struct {
	PID  int    `json:"pid"`
	Name string `json:"name,omitempty"`
}

// startError is why the command did not start.
type startError struct {
	Errno syscall.Errno `json:"errno,omitempty"`
	Text  string        `json:"text,omitempty"`
}
