package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// usage is what was consumed so far: by this process (all clients), by the server, and by the whole machine.
type usage struct {
	at      time.Time
	client  time.Duration // CPU
	server  counters
	machine time.Duration // CPU of everybody; negative if the system does not tell
}

// take reads all counters.
func takeUsage(ctx context.Context, s system) (usage, error) {
	c, err := s.counters(ctx)
	if err != nil {
		err = fmt.Errorf("counters: %w", err)
	}
	return usage{at: time.Now(), client: ownCPU(), server: c, machine: machineCPU()}, err
}

// ownCPU is user and system time of this process. Clients live in it, servers do not.
func ownCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// machineCPU is the busy time of all processors, which shows what others did meanwhile.
func machineCPU() time.Duration {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return -1
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	fields := bytes.Fields(line)
	var ticks int64
	for i, f := range fields {
		if i == 0 || i == 4 || i == 5 || i > 8 { // the label, idle, iowait; guest time is part of user time
			continue
		}
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return -1
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100 on every port of Linux that Go knows
}

// spent is the difference between two usages.
type spent struct {
	wall     time.Duration
	client   time.Duration
	server   time.Duration
	commands float64
	trips    float64
	foreign  float64 // cores that neither the clients nor the server used
}

func (u usage) since(before usage) spent {
	d := spent{
		wall:     u.at.Sub(before.at),
		client:   u.client - before.client,
		server:   u.server.cpu - before.server.cpu,
		commands: u.server.commands - before.server.commands,
		trips:    u.server.trips - before.server.trips,
		foreign:  math.NaN(),
	}
	if u.machine >= 0 {
		busy := u.machine - before.machine - d.client - d.server
		d.foreign = max(0, busy.Seconds()/d.wall.Seconds())
	}
	return d
}

// spend returns what was consumed while do ran.
func (l *lab) spend(ctx context.Context, p peer, do func() error) (spent, error) {
	before, err := takeUsage(ctx, l.at(p))
	if err == nil {
		err = do()
	}
	after, err2 := takeUsage(ctx, l.at(p))
	return after.since(before), errors.Join(err, err2)
}

// perOp adds what one operation cost.
func (d spent) perOp(s sample, ops float64) {
	s["trips"] = d.trips / ops
	s["commands"] = d.commands / ops
	s["client-us"] = float64(d.client.Microseconds()) / ops
	if !math.IsNaN(d.commands) { // there is a server
		s["server-us"] = float64(d.server.Microseconds()) / ops
	}
	s["foreign"] = d.foreign
}

// perSecond adds what a second cost.
func (d spent) perSecond(s sample) {
	sec := d.wall.Seconds()
	s["trips/s"] = d.trips / sec
	s["commands/s"] = d.commands / sec
	s["client-cpu"] = 100 * d.client.Seconds() / sec
	s["server-cpu"] = 100 * d.server.Seconds() / sec
	s["foreign"] = d.foreign
}

// footprint is what a process keeps while it waits or holds.
type footprint struct {
	goroutines int
	bytes      uint64 // live heap, and stacks
}

func takeFootprint() footprint {
	runtime.GC()
	runtime.GC() // the second one frees what finalizers and pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return footprint{goroutines: runtime.NumGoroutine(), bytes: m.HeapAlloc + m.StackInuse}
}

// each adds the growth since before, per piece.
func (f footprint) each(s sample, before footprint, pieces int) {
	s["goroutines"] = float64(f.goroutines-before.goroutines) / float64(pieces)
	s["kb"] = (float64(f.bytes) - float64(before.bytes)) / 1024 / float64(pieces)
}
