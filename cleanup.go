package fencelock

// Clean-up in the background. It is in the core, and not in each driver, because the loop is the same for all of them
// and Close has to wait for it in one place. A tombstone in the service, which refuses a request that arrives late,
// would be exact, but would cost one more command in every acquire, for a case that is rare and bounded by one TTL
// anyway (see docs/decisions, the-core-cleans-up).
//
//	add ─► waiting (timer) ─► ready (fresh or again) ─► under way ─► finish
//	            ▲                                            │
//	            └──────────── judge: not yet ────────────────┘
//
// Goroutines and timers. Each call of Driver.Release runs on its own goroutine, for cleanTimeout at most; a waiting
// job has one timer and no goroutine. close stops them all, and cleaner.running counts the calls in progress.

import (
	"container/list"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// cleaner releases leftover holds: after an acquire with an unknown outcome, after a release without an answer, after
// a loss, and at Close. It calls Driver.Release, detached from any caller's context, until the service has answered,
// or can no longer have the entry.
//
// A few calls run concurrently. A hanging call makes room for others after a moment, and retries queue behind first
// attempts: an unresponsive part of a service does not delay the release of other names
// (TestHungReleasesDelayNoOtherName).
//
// mu is a leaf except for telling.mu: no other mutex is locked under it, and Driver.Release is called without it.
type cleaner struct {
	client *Client

	mu sync.Mutex // protects the following fields and those of all jobs
	// jobs has every job that has not ended, the oldest first.
	jobs list.List
	// fresh and again are the queues of jobs that are ready: never tried, and tried before.
	fresh []*cleanJob
	again []*cleanJob
	// quick and slow count the calls in progress: calls that have begun within slowClean, and the others.
	quick int
	slow  int
	// closing: close has begun. New jobs do not wait then, and "not held" ends a job whatever may be in flight.
	closing bool
	// drained is made by close, if there are jobs, and closed after the last of them.
	drained chan struct{}

	// running counts the goroutines of calls in progress; no call begins after stop.
	running sync.WaitGroup
	// ctx bounds all calls; stop ends it, when close stops waiting.
	ctx  context.Context
	stop context.CancelFunc
}

// certainty is the knowledge about the entry that a job removes.
//
// An acquire that was sent and not answered, with a TTL of 10 s:
//
//	0 s       Release ─► ErrNotHeld: not there, or not there yet
//	0.1 s     Release ─► ErrNotHeld
//	0.3 s     Release ─► nil: it had arrived late, and is gone: done
//	…
//	> 10 s    Release ─► ErrNotHeld: a late arrival has ended by its TTL: done
type certainty uint8

const (
	// granted: the entry was granted. "Not held" is then the end of the matter.
	granted certainty = iota
	// maybeInFlight: the request may not even have arrived. "Not held" may be followed by a late arrival, so the job
	// retries with growing pauses until one TTL has passed.
	maybeInFlight
)

// cleanJob is one entry that has to go. It is in exactly one place: waiting for its timer, in one of the queues, or
// under way; and in cleaner.jobs in all three. When it has ended, err is the last answer, and done is closed.
type cleanJob struct {
	// grant identifies the entry to remove: a hold, or the leftover of a request.
	grant backend.Grant
	known certainty
	// ctx is the acquire's, for events.
	ctx context.Context
	// done is closed at the end.
	done chan struct{}
	// started is when the job was due first.
	started instant

	// err is the last answer. It and the following fields are protected by cleaner.mu.
	err error
	// place is the job's in cleaner.jobs; nil if it was never there.
	place *list.Element
	// reported is when the observer was last notified of a refusal, and started before that.
	reported instant
	// timer is set while the job waits for its next try.
	timer *time.Timer
	// ready: the job is in one of the queues.
	ready bool
	// attempts counts the calls that have returned.
	attempts int
	ended    bool
}

const (
	// maxQuickCleans bounds the calls that have begun within slowClean: a service that answers is not asked for more at
	// once.
	maxQuickCleans = 32
	// maxCleans bounds all calls, the slow ones among them. Beyond that even fresh jobs wait.
	maxCleans = 1024
	// slowClean is the time after which a call counts as slow.
	slowClean = 100 * time.Millisecond
	// cleanTimeout bounds one call. Unfinished releases are retried.
	cleanTimeout = 5 * time.Second
	// firstCleanBackoff is the pause after the first call. It doubles up to a quarter of the TTL, but at least
	// leastCleanBackoff and at most maxCleanBackoff, and is at least cleanSpacing for each job.
	firstCleanBackoff = 100 * time.Millisecond
	leastCleanBackoff = time.Second
	maxCleanBackoff   = 30 * time.Second
	cleanSpacing      = time.Millisecond
	// maxCleanJobs bounds the jobs. One more drops the oldest, which ends with its TTL: the driver does not keep alive
	// a hold after its Release.
	maxCleanJobs = 1 << 17
	// abandonedEvery is the time between two events of a release that is refused.
	abandonedEvery = time.Minute
	// afterlife bounds how long Close tries a job beyond its TTL.
	afterlife = time.Minute
)

// init starts no goroutine.
func (c *cleaner) init(client *Client) {
	c.client = client
	c.ctx, c.stop = context.WithCancel(context.Background())
}

// add starts a job for g after a delay. ctx is the acquire's, for events. The minimum hold is kept if g says so, see
// withoutMinimum. After close the job has ended when it is returned, with ErrClosed. The caller may hold hold.mu.
func (c *cleaner) add(ctx context.Context, g backend.Grant, known certainty, delay time.Duration) *cleanJob {
	job := &cleanJob{grant: g, known: known, ctx: ctx, done: make(chan struct{})}
	job.started = c.client.set.Clock.Now().Add(delay)
	job.reported = job.started
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		c.finish(job, ErrClosed)
		return job
	}
	if c.jobs.Len() >= maxCleanJobs {
		c.abandon(c.jobs.Front().Value.(*cleanJob), errTooManyCleans)
	}
	job.place = c.jobs.PushBack(job)
	if delay <= 0 || c.closing {
		c.enqueue(job)
	} else {
		c.enqueueAfter(job, delay)
	}
	return job
}

// errTooManyCleans is the error of EventAbandoned for the oldest job, when there are more than maxCleanJobs.
var errTooManyCleans = errors.New("dropped, since too many releases wait")

// hurry retries a waiting job now. If its timer has already fired, it is about to run anyway.
func (c *cleaner) hurry(job *cleanJob) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if job.timer != nil && job.timer.Stop() {
		c.enqueue(job)
	}
}

// enqueueAfter makes job ready after d. The caller holds mu.
func (c *cleaner) enqueueAfter(job *cleanJob, d time.Duration) {
	job.timer = time.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.enqueue(job)
	})
}

// enqueue makes job ready, unless it is ready or has ended. The caller holds mu.
func (c *cleaner) enqueue(job *cleanJob) {
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
// A job in a queue that has ended meanwhile, because close gave it up, is dropped here.
func (c *cleaner) start() {
	for c.ctx.Err() == nil && c.quick < maxQuickCleans && c.quick+c.slow < maxCleans {
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

// run makes one call for job, on its own goroutine. After slowClean the call counts as slow and another one may begin;
// the counters are changed exactly once each way, whichever of the call's end and the timer comes first.
//
//	quick ──call ends──► counted out
//	  └──slowClean──► slow ──call ends──► counted out
func (c *cleaner) run(job *cleanJob) {
	defer c.running.Done()
	isSlow := false
	slow := time.AfterFunc(slowClean, func() {
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
	ctx, cancel := context.WithTimeout(c.ctx, cleanTimeout)
	err := c.client.driver.Release(ctx, job.grant)
	cancel()
	slow.Stop()
	now := c.client.set.Clock.Now()

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
//	an answer that stays the same       dropped (EventAbandoned)
//	a refusal, or a minute after the    dropped, if Close waits
//	TTL anything
//	anything, after close has timed out done
//	anything else                       retried after a pause, without end; an EventAbandoned every minute
//
// A refusal may be temporary: a database that is read-only for a while, a right that was revoked, a password that was
// changed.
func (c *cleaner) judge(job *cleanJob, err error, now instant) {
	job.attempts++
	job.err = err
	age := now.Sub(job.started)
	switch {
	case job.ended:
	case err == nil, errors.Is(err, ErrNotHeld) && (job.known == granted || c.closing || age > job.grant.TTL):
		c.finish(job, err)
	case c.ctx.Err() != nil:
		c.finish(job, err)
	case !errors.Is(err, ErrNotHeld) && final(err),
		c.closing && (errors.Is(err, ErrMisconfigured) || errors.Is(err, ErrDenied) || age > job.grant.TTL+afterlife):
		c.abandon(job, err)
	default:
		if !errors.Is(err, ErrNotHeld) && now.Sub(job.reported) >= abandonedEvery {
			job.reported = now
			c.report(job, err)
		}
		c.enqueueAfter(job, c.pause(job))
	}
}

// pause returns the time until the next call for job. The caller holds mu.
func (c *cleaner) pause(job *cleanJob) time.Duration {
	most := min(max(job.grant.TTL/4, leastCleanBackoff), maxCleanBackoff)
	pause := min(firstCleanBackoff<<min(job.attempts-1, 10), most)
	return max(pause, time.Duration(c.jobs.Len())*cleanSpacing)
}

// final reports whether an answer will be the same next time, so that a retry is useless.
func final(err error) bool {
	for _, definite := range []error{
		ErrUnsupported, ErrInvalidName, ErrInvalidTTL, ErrInvalidOption, ErrLimitMismatch, ErrHistoryLost, ErrClosed,
		ErrTier,
	} {
		if errors.Is(err, definite) {
			return true
		}
	}
	return false
}

// abandon drops a job and notifies the observer: the name may be closed until the TTL. The caller holds mu.
func (c *cleaner) abandon(job *cleanJob, err error) {
	if job.timer != nil {
		job.timer.Stop()
	}
	c.report(job, err)
	c.finish(job, err)
}

// report notifies the observer that a job is refused or dropped. The caller holds mu.
func (c *cleaner) report(job *cleanJob, err error) {
	c.client.tell(job.ctx, &Event{
		Type: EventAbandoned, Name: strings.TrimPrefix(job.grant.Name, c.client.set.prefix), Kind: job.grant.Kind,
		HoldID: job.grant.HoldID, Err: err,
	})
}

// finish ends job, and notifies its waiters and close. The caller holds mu.
func (c *cleaner) finish(job *cleanJob, err error) {
	job.err, job.ended = err, true
	if job.place != nil {
		c.jobs.Remove(job.place)
	}
	close(job.done)
	if c.drained != nil && c.jobs.Len() == 0 {
		close(c.drained)
		c.drained = nil
	}
}

// close tries every waiting job immediately, until all are done or ctx ends. It returns the number of
// remaining jobs, which end with ErrClosed; their names are free when their TTL ends. Jobs that are added meanwhile
// are tried immediately, too; jobs added afterwards end immediately.
func (c *cleaner) close(ctx context.Context) (left int) {
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
		if job := e.Value.(*cleanJob); job.timer != nil && job.timer.Stop() {
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
		job := e.Value.(*cleanJob)
		if job.timer != nil {
			job.timer.Stop()
		}
		c.finish(job, ErrClosed)
	}
	return left
}
