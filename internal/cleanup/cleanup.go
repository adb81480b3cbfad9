// Package cleanup releases leftover holds in the background. It is for callers of a driver: the core, and the gateway.
//
// It is not in each driver, because the loop is the same for all of them and Close has to wait for it in one place. A
// tombstone in the service, which refuses a request that arrives late, would be exact, but would cost one more command
// in every acquire, for a case that is rare and bounded by one TTL anyway (see docs/decisions, the-core-cleans-up).
//
//	Add ─► waiting (timer) ─► ready (fresh or again) ─► under way ─► finish
//	            ▲                                            │
//	            └──────────── judge: not yet ────────────────┘
//
// Goroutines and timers. Each release runs on its own goroutine, for callTimeout at most; a waiting job has one timer
// and no goroutine. Close stops them all, and Cleaner.running counts the calls in progress.
package cleanup

import (
	"container/list"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Cleaner releases leftover holds: after an acquire with an unknown outcome, after a release without an answer, after
// a loss, and at Close. It calls release, detached from any caller's context, until the service has answered, or can no
// longer have the entry.
//
// A few calls run concurrently. A hanging call makes room for others after a moment, and retries queue behind first
// attempts: an unresponsive part of a service does not delay the release of other names
// (TestHungReleasesDelayNoOtherName).
//
// release is called without mu, and report under it. No other mutex is locked under it.
type Cleaner struct {
	most    int // bounds the jobs
	clock   backend.Clock
	release func(context.Context, backend.Grant) error
	report  func(ctx context.Context, g *backend.Grant, err error)

	mu sync.Mutex // protects the following fields and those of all jobs
	// jobs has every job that has not ended, the oldest first.
	jobs list.List
	// fresh and again are the queues of jobs that are ready: never tried, and tried before.
	fresh []*Job
	again []*Job
	// quick and slow count the calls in progress: calls that have begun within slowCall, and the others.
	quick int
	slow  int
	// closing: Close has begun. New jobs do not wait then, and "not held" ends a job whatever may be in flight.
	closing bool
	// drained is made by Close, if there are jobs, and closed after the last of them.
	drained chan struct{}

	// running counts the goroutines of calls in progress; no call begins after stop.
	running sync.WaitGroup
	// ctx bounds all calls; stop ends it, when Close stops waiting.
	ctx  context.Context
	stop context.CancelFunc
}

// Certainty is the knowledge about the entry that a job removes.
//
// An acquire that was sent and not answered, with a TTL of 10 s:
//
//	0 s       Release ─► ErrNotHeld: not there, or not there yet
//	0.1 s     Release ─► ErrNotHeld
//	0.3 s     Release ─► nil: it had arrived late, and is gone: done
//	…
//	> 10 s    Release ─► ErrNotHeld: a late arrival has ended by its TTL: done
type Certainty uint8

const (
	// Granted: the entry was granted. "Not held" is then the end of the matter.
	Granted Certainty = iota
	// InFlight: the request may not even have arrived. "Not held" may be followed by a late arrival, so the job
	// retries with growing pauses until one TTL has passed.
	InFlight
)

// Job is one entry that has to go. It is in exactly one place: waiting for its timer, in one of the queues, or under
// way; and in Cleaner.jobs in all three. When it has ended, err is the last answer.
type Job struct {
	// Done is closed at the end.
	Done chan struct{}
	// Known is the argument of Add.
	Known Certainty
	// grant identifies the entry to remove: a hold, or the leftover of a request.
	grant backend.Grant
	// ctx is the acquire's, for reports.
	ctx context.Context
	// started is when the job was due first.
	started backend.Instant

	// err is the last answer. It and the following fields are protected by Cleaner.mu.
	err error
	// place is the job's in Cleaner.jobs; nil if it was never there.
	place *list.Element
	// reported is when a refusal was last reported, and started before that.
	reported backend.Instant
	// timer is set while the job waits for its next try.
	timer *time.Timer
	// ready: the job is in one of the queues.
	ready bool
	// attempts counts the calls that have returned.
	attempts int
	ended    bool
}

const (
	// maxQuick bounds the calls that have begun within slowCall: a service that answers is not asked for more at
	// once.
	maxQuick = 32
	// maxCalls bounds all calls, the slow ones among them. Beyond that even fresh jobs wait.
	maxCalls = 1024
	// slowCall is the time after which a call counts as slow.
	slowCall = 100 * time.Millisecond
	// callTimeout bounds one call. Unfinished releases are retried.
	callTimeout = 5 * time.Second
	// firstPause is the pause after the first call. It doubles up to a quarter of the TTL, but at least
	// leastPause and at most maxPause, and is at least spacing for each job.
	firstPause = 100 * time.Millisecond
	leastPause = time.Second
	maxPause   = 30 * time.Second
	spacing    = time.Millisecond
	// reportEvery is the time between two reports of a release that is refused.
	reportEvery = time.Minute
	// afterlife bounds how long Close retries a job beyond its TTL.
	afterlife = time.Minute
)

// Init prepares a Cleaner that calls release. It starts no goroutine. The cleaner calls report, under its mutex, for a
// release that is refused or dropped: the name may be closed until the TTL. It has at most so many jobs: one more drops
// the oldest.
func (c *Cleaner) Init(
	most int, clock backend.Clock, release func(context.Context, backend.Grant) error,
	report func(ctx context.Context, g *backend.Grant, err error),
) {
	c.most, c.clock, c.release, c.report = most, clock, release, report
	c.ctx, c.stop = context.WithCancel(context.Background())
}

// Add starts a job for g after a delay. ctx is the acquire's, for reports. After Close the job has ended when it is
// returned.
func (c *Cleaner) Add(ctx context.Context, g backend.Grant, known Certainty, delay time.Duration) *Job {
	job := &Job{grant: g, Known: known, ctx: ctx, Done: make(chan struct{})}
	job.started = c.clock.Now().Add(delay)
	job.reported = job.started
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		c.finish(job, backend.ErrClosed)
		return job
	}
	if c.jobs.Len() >= c.most {
		c.abandon(c.jobs.Front().Value.(*Job), errTooMany)
	}
	job.place = c.jobs.PushBack(job)
	if delay <= 0 || c.closing {
		c.enqueue(job)
	} else {
		c.enqueueAfter(job, delay)
	}
	return job
}

// errTooMany is reported for the oldest job, when there are more than Cleaner.most.
var errTooMany = errors.New("dropped, since too many releases wait")

// Hurry retries a waiting job now. If its timer has already fired, it is about to run anyway.
func (c *Cleaner) Hurry(job *Job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if job.timer != nil && job.timer.Stop() {
		c.enqueue(job)
	}
}

// enqueueAfter makes job ready after d. The caller holds mu.
func (c *Cleaner) enqueueAfter(job *Job, d time.Duration) {
	job.timer = time.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.enqueue(job)
	})
}

// enqueue makes job ready, unless it is ready or has ended. The caller holds mu.
func (c *Cleaner) enqueue(job *Job) {
	job.timer = nil
	if job.ended || job.ready {
		return
	}
	job.ready = true
	if job.attempts == 0 {
		c.fresh = append(c.fresh, job)
	} else {
		c.again = append(c.again, job)
	}
	c.start()
}

// start begins calls for the jobs that are ready, as many as may run: fresh ones first. The caller holds mu.
//
// A job in a queue that has ended meanwhile, because Close gave it up, is dropped here.
func (c *Cleaner) start() {
	for c.ctx.Err() == nil && c.quick < maxQuick && c.quick+c.slow < maxCalls {
		queue := &c.fresh
		if len(c.fresh) == 0 {
			queue = &c.again
		}
		if len(*queue) == 0 {
			return
		}
		// From the front, and clear of the job: the queue keeps its memory for a while.
		job := (*queue)[0]
		(*queue)[0] = nil
		if *queue = (*queue)[1:]; len(*queue) == 0 {
			*queue = nil
		}
		job.ready = false
		if job.ended {
			continue
		}
		c.quick++
		c.running.Add(1)
		go c.run(job)
	}
}

// run makes one call for job, on its own goroutine. After slowCall the call counts as slow and another one may begin;
// the counters are changed exactly once each way, whichever of the call's end and the timer comes first.
//
//	quick ──call ends──► counted out
//	  └──slowCall──► slow ──call ends──► counted out
func (c *Cleaner) run(job *Job) {
	defer c.running.Done()
	isSlow := false
	slow := time.AfterFunc(slowCall, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if job.ended || isSlow {
			return
		}
		isSlow = true
		c.quick--
		c.slow++
		c.start()
	})
	ctx, cancel := context.WithTimeout(c.ctx, callTimeout)
	err := c.release(ctx, job.grant)
	cancel()
	slow.Stop()
	now := c.clock.Now()

	c.mu.Lock()
	defer c.mu.Unlock()
	if isSlow {
		c.slow--
	} else {
		isSlow = true // the timer may be on its way
		c.quick--
	}
	c.judge(job, err, now)
	c.start()
}

// judge decides after a call whether the job is done. The caller holds mu.
//
//	nil                                 done
//	ErrNotHeld                          done if the entry was granted, if Close waits, or if a TTL has passed
//	an answer that stays the same       dropped, and reported
//	a refusal, or a minute after the    dropped, if Close waits
//	TTL anything
//	anything, after Close has timed out done
//	anything else                       retried after a pause, without end; reported every minute
//
// A refusal may be temporary: a database that is read-only for a while, a right that was revoked, a password that was
// changed.
func (c *Cleaner) judge(job *Job, err error, now backend.Instant) {
	job.attempts++
	job.err = err
	age := now.Sub(job.started)
	switch {
	case job.ended:
	case err == nil, errors.Is(err, backend.ErrNotHeld) && (job.Known == Granted || c.closing || age > job.grant.TTL):
		c.finish(job, err)
	case c.ctx.Err() != nil:
		c.finish(job, err)
	case !errors.Is(err, backend.ErrNotHeld) && Final(err),
		c.closing && (errors.Is(err, backend.ErrMisconfigured) || errors.Is(err, backend.ErrDenied) || age > job.grant.TTL+afterlife):
		c.abandon(job, err)
	default:
		if !errors.Is(err, backend.ErrNotHeld) && now.Sub(job.reported) >= reportEvery {
			job.reported = now
			c.report(job.ctx, &job.grant, err)
		}
		c.enqueueAfter(job, c.pause(job))
	}
}

// pause returns the time until the next call for job. The caller holds mu.
func (c *Cleaner) pause(job *Job) time.Duration {
	most := min(max(job.grant.TTL/4, leastPause), maxPause)
	pause := min(firstPause<<min(job.attempts-1, 10), most)
	return max(pause, time.Duration(c.jobs.Len())*spacing)
}

// Final reports whether an answer will be the same next time, so that a retry is useless.
func Final(err error) bool {
	return isOne(err, backend.ErrUnsupported, backend.ErrInvalidName, backend.ErrInvalidTTL, backend.ErrInvalidOption,
		backend.ErrLimitMismatch, backend.ErrHistoryLost, backend.ErrClosed)
}

// abandon drops a job and reports that. The caller holds mu.
func (c *Cleaner) abandon(job *Job, err error) {
	if job.timer != nil {
		job.timer.Stop()
	}
	c.report(job.ctx, &job.grant, err)
	c.finish(job, err)
}

// finish ends job, and notifies its waiters and Close. The caller holds mu.
func (c *Cleaner) finish(job *Job, err error) {
	job.err, job.ended = err, true
	if job.place != nil {
		c.jobs.Remove(job.place)
	}
	close(job.Done)
	if c.drained != nil && c.jobs.Len() == 0 {
		close(c.drained)
		c.drained = nil
	}
}

// Close tries every waiting job immediately, until all are done or ctx ends. It returns the number of
// remaining jobs, which end with ErrClosed; their names are free when their TTL ends. Jobs that are added meanwhile
// are tried immediately, too; jobs added afterwards end immediately.
func (c *Cleaner) Close(ctx context.Context) (left int) {
	c.mu.Lock()
	c.closing = true
	drained := make(chan struct{})
	if c.jobs.Len() == 0 {
		close(drained)
	} else {
		c.drained = drained
	}
	// A timer that cannot be stopped has fired, and is about to enqueue its job itself.
	for e := c.jobs.Front(); e != nil; e = e.Next() {
		if job := e.Value.(*Job); job.timer != nil && job.timer.Stop() {
			c.enqueue(job)
		}
	}
	c.mu.Unlock()
	select {
	case <-drained:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stop()
	left = c.jobs.Len()
	for e := c.jobs.Front(); e != nil; e = c.jobs.Front() {
		job := e.Value.(*Job)
		if job.timer != nil {
			job.timer.Stop()
		}
		c.finish(job, backend.ErrClosed)
	}
	return left
}

// Wait waits until the calls that were in progress at Close have returned.
func (c *Cleaner) Wait() { c.running.Wait() }

// Ambiguous reports whether a failed acquire may have left an entry in the service: if the driver says so, and for an
// error outside of the contract. The latter costs a needless release now and then; trusting an unknown error could
// close a name for a TTL.
//
//	ErrUnknown, alone or with others          true
//	one of the contract's other errors        false: no entry was left
//	the bare error of a context               false: the driver marks sent requests
//	io.EOF, a bug in a driver                 true
func Ambiguous(err error) bool {
	return errors.Is(err, backend.ErrUnknown) || !isOne(err, backend.ErrHeld, backend.ErrQueueFull,
		backend.ErrUnavailable, backend.ErrUnsupported, backend.ErrMisconfigured, backend.ErrDenied, backend.ErrDeadlock,
		backend.ErrLimitMismatch, backend.ErrInvalidName, backend.ErrInvalidTTL, backend.ErrInvalidOption,
		backend.ErrHistoryLost, backend.ErrClosed, context.Canceled, context.DeadlineExceeded)
}

func isOne(err error, of ...error) bool {
	return slices.ContainsFunc(of, func(target error) bool { return errors.Is(err, target) })
}
