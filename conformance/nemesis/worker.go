package nemesis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/conformance/fault"
)

// Role is the name of the role that Client plays in a child process.
const Role = "nemesis-client"

// Client is the role of a child process that contends for locks, for fault.RunRole in TestMain. open is the function of
// Service.Open.
func Client(open func(ctx context.Context, target string) (backend.Driver, error)) fault.Role {
	return func(in <-chan string, args []string) int {
		var c config
		err := json.Unmarshal([]byte(args[0]), &c)
		if err == nil {
			err = work(c, open, in, os.Stdout)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
}

// config is the configuration of a client at its start.
type config struct {
	Target string
	Client string // its name: a new one for each process
	TTL    time.Duration
	Epoch  int
	Seed   uint64 // of the lengths of holds and pauses, which the schedule does not fix
}

// The lines to a client, and the lines from it that are not events.
const (
	lineEpoch = "epoch " // and its number: contend for its names, and no longer for earlier names
	lineKeep  = "keep "  // and the number of a name: hold it until lineFree
	lineFree  = "free"   // release the kept name
	lineStop  = "stop"   // release all locks, and end

	lineReady = "ready"   // the client contends
	lineLeft  = "left "   // and the number of an epoch: no call of it is in flight
	lineKept  = "kept "   // and a name
	lineLost  = "lost "   // and the reason: the kept name was lost
	lineFreed = "freed"   // the kept name was released, or was lost; and the error of the release, in one line
	lineBye   = "stopped" // no hold is left
)

// slot stands for one name in each epoch, for which all clients contend.
type slot struct {
	slug string
	kind backend.Kind // KindShared: shared or exclusive, at random
}

// slots are the names. A client can keep the first ones: they are always exclusive.
var slots = []slot{
	{"a", backend.KindExclusive},
	{"b", backend.KindExclusive},
	{"c", backend.KindExclusive},
	{"s", backend.KindShared},
	{"p", backend.KindPermits},
}

const (
	keepable    = 3
	permitLimit = 3
)

// name of a slot in an epoch.
func (s slot) name(epoch int) string { return fmt.Sprintf("soak/%d/%s", epoch, s.slug) }

// slotsOf returns the slots that a driver can serve.
func slotsOf(caps backend.Capabilities) []slot {
	var all []slot
	for _, s := range slots {
		if s.kind == backend.KindShared && !caps.Has(backend.CapShared) ||
			s.kind == backend.KindPermits && !caps.Has(backend.CapPermits) {
			continue
		}
		all = append(all, s)
	}
	return all
}

// worker is one client, in its own process or in the test's.
type worker struct {
	config
	out       io.Writer
	recorder  *check.Recorder
	locks     *check.Locker
	inspector backend.Inspector // nil if the driver cannot inspect
	slots     []slot
	ctx       context.Context    // ends with the worker
	free      context.CancelFunc // releases the kept name; nil without one
	keeper    sync.WaitGroup
	released  error // of the kept name; read only after keeper.Wait
}

// work contends until the line stop, or until in ends. Each line to out is one Write.
func work(c config, opener func(context.Context, string) (backend.Driver, error), in <-chan string,
	out io.Writer) error {
	// The first readings of a boot clock may lag behind it, on a busy machine: see backend.SystemClock.
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		for range 5 {
			backend.SystemClock().Now()
			time.Sleep(110 * time.Millisecond)
		}
	}()
	opening, cancelOpening := context.WithTimeout(context.Background(), patience)
	defer cancelOpening()
	driver, err := open(opening, opener, c.Target)
	if err != nil {
		return err
	}
	client, err := fencelock.New(driver, tierOf(driver), &fencelock.Options{TTL: c.TTL})
	if err != nil {
		return errors.Join(err, driver.Close(opening))
	}
	<-settled
	recorder := check.NewRecorder(check.Options{Writer: out, StreamOnly: true, Client: c.Client})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	caps := driver.Describe().Capabilities
	w := &worker{
		config: c, out: out, recorder: recorder, locks: recorder.Wrap("w", client), slots: slotsOf(caps), ctx: ctx,
	}
	if inspector, ok := backend.As[backend.Inspector](driver); ok && caps.Has(backend.CapInspect) {
		w.inspector = inspector
	}
	w.say(lineReady)
	w.contendUntilStopped(in)
	closing, cancelClosing := context.WithTimeout(context.Background(), patience)
	defer cancelClosing()
	err = errors.Join(client.Close(closing), driver.Close(closing), recorder.Err())
	w.say(lineBye)
	return err
}

func (w *worker) say(prefix string, args ...any) {
	_, _ = io.WriteString(w.out, prefix+fmt.Sprint(args...)+"\n") // if the parent does not read, it has exited
}

func (w *worker) contendUntilStopped(in <-chan string) {
	stopEpoch := w.startEpoch(w.Epoch)
	for line := range in {
		switch {
		case strings.HasPrefix(line, lineEpoch):
			stopEpoch()
			w.say(lineLeft, w.Epoch)
			w.Epoch, _ = strconv.Atoi(strings.TrimPrefix(line, lineEpoch))
			stopEpoch = w.startEpoch(w.Epoch)
		case strings.HasPrefix(line, lineKeep):
			i, _ := strconv.Atoi(strings.TrimPrefix(line, lineKeep))
			w.startKeeping(w.slots[i].name(w.Epoch))
		case line == lineFree:
			w.stopKeeping()
		case line == lineStop:
			stopEpoch()
			w.stopKeeping()
			return
		}
	}
	stopEpoch()
	w.stopKeeping()
}

// startEpoch starts contenders for the names of an epoch. stop ends them, and returns when they have released.
func (w *worker) startEpoch(epoch int) (stop func()) {
	ctx, cancel := context.WithCancel(w.ctx)
	var all sync.WaitGroup
	for i, s := range w.slots {
		r := rand.New(rand.NewPCG(w.Seed, uint64(epoch)<<8|uint64(i)))
		all.Go(func() { w.contend(ctx, s, s.name(epoch), r) })
	}
	return func() {
		cancel()
		all.Wait()
	}
}

// contend acquires, holds and releases one name, mostly briefly.
func (w *worker) contend(ctx context.Context, s slot, name string, r *rand.Rand) {
	upTo := func(d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d))) }
	for ctx.Err() == nil {
		acquire := w.locks.Acquire
		if r.IntN(6) == 0 {
			acquire = w.locks.TryAcquire
		}
		waiting, cancel := context.WithTimeout(ctx, w.TTL/4+upTo(4*w.TTL))
		held, err := acquire(waiting, name, s.options(r)...)
		cancel()
		if err != nil {
			pause(ctx, 10*time.Millisecond+upTo(40*time.Millisecond)) // refused connections fail immediately
			continue
		}
		length := upTo(20 * time.Millisecond)
		if r.IntN(20) == 0 {
			length = upTo(w.TTL / 3)
		}
		w.hold(ctx, held, length)
		_ = w.release(held) // the recorder has the outcome
		pause(ctx, upTo(60*time.Millisecond))
	}
}

// options returns the options of one acquire.
func (s slot) options(r *rand.Rand) []fencelock.AcquireOption {
	switch {
	case s.kind == backend.KindPermits:
		return []fencelock.AcquireOption{fencelock.Permits(1+r.IntN(2), permitLimit)}
	case s.kind == backend.KindShared && r.IntN(3) > 0:
		return []fencelock.AcquireOption{fencelock.Shared()}
	}
	return nil
}

// hold keeps a hold for d, while it is held and ctx lives. It records renewals, since no other process could report
// them after a kill, and the service's answer about the holder.
func (w *worker) hold(ctx context.Context, held *check.Held, d time.Duration) {
	end := time.NewTimer(d)
	defer end.Stop()
	renewed := time.NewTicker(w.TTL / 6)
	defer renewed.Stop()
	for {
		select {
		case <-renewed.C:
			held.Renewed()
			w.ask(ctx, held.Lease())
		case <-end.C:
			return
		case <-held.Lease().Context().Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// ask records the service's answer about the holder of an exclusive lock held here, if the driver can inspect.
func (w *worker) ask(ctx context.Context, lease *fencelock.Lease) {
	if w.inspector == nil || lease.Grant().Kind != backend.KindExclusive {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, w.TTL/2)
	defer cancel()
	defer context.AfterFunc(lease.Context(), cancel)()         // after the loss the answer is not needed
	_, _ = w.recorder.Ask(ctx, "w", w.inspector, lease.Name()) // the recorder has the answer
}

func (w *worker) release(held *check.Held) error {
	ctx, cancel := context.WithTimeout(context.Background(), w.TTL)
	defer cancel()
	return held.Release(ctx)
}

// startKeeping holds a name until stopKeeping.
func (w *worker) startKeeping(name string) {
	w.stopKeeping()
	ctx, cancel := context.WithCancel(w.ctx)
	w.free, w.released = cancel, nil
	w.keeper.Go(func() { w.keep(ctx, name) })
}

func (w *worker) keep(ctx context.Context, name string) {
	var held *check.Held
	for held == nil {
		waiting, cancel := context.WithTimeout(ctx, 4*w.TTL)
		held, _ = w.locks.Acquire(waiting, name)
		cancel()
		if held == nil && ctx.Err() != nil {
			return
		}
	}
	w.say(lineKept, name)
	w.hold(ctx, held, forever)
	if lost := (*fencelock.LostError)(nil); errors.As(held.Lease().Err(), &lost) {
		w.say(lineLost, lost.Reason)
		<-ctx.Done()
	}
	w.released = w.release(held)
}

const forever = time.Duration(1<<63 - 1)

// stopKeeping releases the kept name, if any.
func (w *worker) stopKeeping() {
	if w.free == nil {
		return
	}
	w.free()
	w.free = nil
	w.keeper.Wait()
	if w.released == nil {
		w.say(lineFreed)
	} else {
		w.say(lineFreed, " ", strings.ReplaceAll(w.released.Error(), "\n", "; "))
	}
}
