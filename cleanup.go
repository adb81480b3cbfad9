package fencelock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// cleaner gives back what nobody holds any more: after an acquire whose outcome is unknown, after a release that got no
// answer, and at Close. It calls Driver.Release, detached from any caller's context, until the service has answered.
// A few workers serve all jobs, and none runs while there is nothing to do: an outage that fails thousands of calls must
// not become thousands of goroutines that hang on it.
type cleaner struct {
	driver backend.Driver

	mu      sync.Mutex // protects the following fields
	jobs    map[cleanKey]*cleanJob
	ready   []*cleanJob
	workers int
	closing bool
	drained chan struct{} // closed when closing and no job is left
	empty   sync.Once     // closes drained

	running sync.WaitGroup
	ctx     context.Context
	stop    context.CancelFunc
}

type cleanKey struct{ name, requestID string }

// certainty says what is known about the entry that a job removes.
type certainty uint8

const (
	// granted: the entry was granted. "Not held" is then the end of the matter.
	granted certainty = iota
	// maybeInFlight: the request may not even have arrived. "Not held" may be followed by a late arrival, so the job
	// looks again, ever more seldom, until one TTL has passed.
	maybeInFlight
)

type cleanJob struct {
	grant backend.Grant
	known certainty
	done  chan struct{} // closed at the end
	err   error         // the last answer; valid after done

	// The following fields are protected by cleaner.mu.

	timer     *time.Timer // while waiting for the next try
	attempts  int
	started   time.Time
	abandoned bool // by claim
}

const (
	maxCleaners       = 16
	cleanTimeout      = 5 * time.Second // of one try
	firstCleanBackoff = 100 * time.Millisecond
	maxCleanBackoff   = 5 * time.Second
)

func (c *cleaner) init(driver backend.Driver) {
	c.driver = driver
	c.jobs = map[cleanKey]*cleanJob{}
	c.drained = make(chan struct{})
	c.ctx, c.stop = context.WithCancel(context.Background())
}

// add starts a job for g, or returns the one that is already at it.
func (c *cleaner) add(g backend.Grant, known certainty) *cleanJob { return c.addAfter(g, known, 0) }

// addAfter is add with a delay before the first try. A job that is waiting for a later try goes ahead now if there is no
// delay.
func (c *cleaner) addAfter(g backend.Grant, known certainty, delay time.Duration) *cleanJob {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := cleanKey{g.Name, g.RequestID}
	if job := c.jobs[key]; job != nil {
		if delay <= 0 && job.timer != nil && job.timer.Stop() {
			c.enqueue(job)
		}
		return job
	}
	job := &cleanJob{grant: g, known: known, done: make(chan struct{}), started: time.Now()}
	if c.ctx.Err() != nil {
		job.err = ErrClosed
		close(job.done)
		return job
	}
	c.jobs[key] = job
	if delay <= 0 {
		c.enqueue(job)
	} else {
		c.enqueueAfter(job, delay)
	}
	return job
}

// enqueueAfter hands job to a worker after d. The caller holds c.mu.
func (c *cleaner) enqueueAfter(job *cleanJob, d time.Duration) {
	job.timer = time.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.enqueue(job)
	})
}

// claim ends the job of a request that its owner sends again, and waits until its try in flight is over: it would give
// back what the owner is about to be granted.
func (c *cleaner) claim(ctx context.Context, name, requestID string) error {
	c.mu.Lock()
	job := c.jobs[cleanKey{name, requestID}]
	if job == nil {
		c.mu.Unlock()
		return nil
	}
	job.abandoned = true
	if job.timer != nil && job.timer.Stop() {
		c.finish(job, ErrUnknown)
	}
	c.mu.Unlock()
	select {
	case <-job.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// enqueue hands job to a worker. The caller holds c.mu.
func (c *cleaner) enqueue(job *cleanJob) {
	job.timer = nil
	if c.ctx.Err() != nil {
		c.finish(job, job.err)
		return
	}
	c.ready = append(c.ready, job)
	if c.workers < maxCleaners {
		c.workers++
		c.running.Add(1)
		go c.work()
	}
}

// work runs jobs until none is ready.
func (c *cleaner) work() {
	defer c.running.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.ready) > 0 {
		job := c.ready[0]
		c.ready[0] = nil
		c.ready = c.ready[1:]
		if job.abandoned || c.ctx.Err() != nil {
			c.finish(job, ErrUnknown)
			continue
		}
		c.mu.Unlock()
		ctx, cancel := context.WithTimeout(c.ctx, cleanTimeout)
		err := c.driver.Release(ctx, job.grant)
		cancel()
		c.mu.Lock()
		c.judge(job, err)
	}
	c.workers--
}

// judge decides after a try whether the job is done. The caller holds c.mu.
func (c *cleaner) judge(job *cleanJob, err error) {
	job.attempts++
	job.err = err
	looked := errors.Is(err, ErrNotHeld)
	resolved := err == nil || errors.Is(err, ErrClosed) || errors.Is(err, ErrUnsupported) ||
		looked && (job.known == granted || c.closing || time.Since(job.started) > job.grant.TTL)
	if resolved || job.abandoned || c.ctx.Err() != nil {
		c.finish(job, err)
		return
	}
	c.enqueueAfter(job, min(firstCleanBackoff<<min(job.attempts-1, 10), maxCleanBackoff))
}

// finish ends job. The caller holds c.mu.
func (c *cleaner) finish(job *cleanJob, err error) {
	job.err = err
	delete(c.jobs, cleanKey{job.grant.Name, job.grant.RequestID})
	close(job.done)
	if c.closing && len(c.jobs) == 0 {
		c.empty.Do(func() { close(c.drained) })
	}
}

// close tries every waiting job at once and goes on until all are done or ctx ends.
func (c *cleaner) close(ctx context.Context) error {
	c.mu.Lock()
	c.closing = true
	if len(c.jobs) == 0 {
		c.empty.Do(func() { close(c.drained) })
	}
	for _, job := range c.jobs {
		if job.timer != nil && job.timer.Stop() {
			c.enqueue(job)
		}
	}
	c.mu.Unlock()

	var err error
	select {
	case <-c.drained:
	case <-ctx.Done():
		c.mu.Lock()
		err = fmt.Errorf("%w: %d locks could not be given back and end with their TTL: %w",
			ErrUnknown, len(c.jobs), ctx.Err())
		c.mu.Unlock()
	}
	c.stop()
	c.mu.Lock()
	for _, job := range c.jobs {
		if job.timer != nil && job.timer.Stop() {
			c.finish(job, job.err)
		}
	}
	c.mu.Unlock()
	c.running.Wait()
	return err
}
