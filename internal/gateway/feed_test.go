package gateway

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// counting is a service that counts its watches.
type counting struct {
	*memory.Driver
	mu         sync.Mutex
	open, ever int
	ends       []context.CancelCauseFunc
}

// cut ends the watches with ErrUnavailable.
func (c *counting) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, end := range c.ends {
		end(backend.ErrUnavailable)
	}
}

func (c *counting) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		c.mu.Lock()
		c.open++
		c.ever++
		ctx, end := context.WithCancelCause(ctx)
		c.ends = append(c.ends, end)
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.open--
		}()
		for change, err := range c.Driver.Watch(ctx, name, since) {
			if err != nil && context.Cause(ctx) == backend.ErrUnavailable { //nolint:errorlint // the value itself, of cut
				err = backend.ErrUnavailable
			}
			if !yield(change, err) {
				return
			}
		}
	}
}

func (c *counting) watches() (open, ever int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open, c.ever
}

// counted runs a test in simulated time with a gateway in front of a counting service.
func counted(t *testing.T, test func(t *testing.T, d *door, c *counting)) {
	synctest.Test(t, func(t *testing.T) {
		driver := memory.New(&memory.Options{Clock: backend.GoClock()})
		c := &counting{Driver: driver}
		g, err := New(Options{Driver: c, Key: testKey})
		if err != nil {
			t.Fatal(err)
		}
		d := &door{t, g}
		defer func() {
			g.Close(t.Context())
			if err := driver.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		test(t, d, c)
	})
}

// All clients that watch a name, or wait for a change of its state, share one watch of the service and get every event.
func TestWatchersShareOneWatch(t *testing.T) {
	counted(t, func(t *testing.T, d *door, c *counting) {
		ctx, hangUp := context.WithCancel(t.Context())
		var all []<-chan reply
		for range 50 {
			answer := make(chan reply, 1)
			all = append(all, answer)
			go func() { answer <- d.send(ctx, http.MethodGet, "/v1/locks/x/watch", "") }()
		}
		synctest.Wait()
		time.Sleep(time.Second)
		if open, ever := c.watches(); open != 1 || ever != 1 {
			t.Errorf("%d watches are open, %d were", open, ever)
		}
		for range 3 {
			l := d.granted(d.post(acquireX, acquireOf("a", "")))
			d.post(atX+"/release", `{"lockToken":"`+l.LockToken+`"}`)
		}
		time.Sleep(time.Second)
		tag := d.get(atX).header.Get(headerETag)
		polled := make(chan reply, 1)
		go func() {
			polled <- d.send(t.Context(), http.MethodGet, atX, "", func(r *http.Request) {
				r.Header.Set("If-None-Match", tag)
				r.Header.Set("Prefer", "wait=40")
			})
		}()
		synctest.Wait()
		if _, ever := c.watches(); ever != 1 {
			t.Errorf("a poll watches for itself: %d watches", ever)
		}
		d.granted(d.post(acquireX, acquireOf("b", "")))
		if got := <-polled; got.status != 200 {
			t.Errorf("the poll: %d %s", got.status, got.text)
		}
		time.Sleep(time.Second)
		hangUp()
		for _, answer := range all {
			got := <-answer
			if n := strings.Count(got.text, "event: acquired"); n != 4 || strings.Count(got.text, "event: released") != 3 {
				t.Errorf("a watcher gets:\n%s", got.text)
			}
		}
		synctest.Wait()
		if open, _ := c.watches(); open != 0 {
			t.Errorf("%d watches are left", open)
		}
	})
}

// record is a service whose changes the test writes. While lag is set, the first watch yields nothing.
type record struct {
	mu      sync.Mutex
	changes []backend.Change
	lag     bool // the first watch yields no further changes
	watches int
	written chan struct{} // closed when a field above changes
}

func newRecord() *record { return &record{written: make(chan struct{})} }

// write adds one change for each revision.
func (r *record) write(revisions ...uint64) {
	r.edit(func() {
		for i, revision := range revisions {
			c := backend.Change{Type: backend.ChangeAcquired, Name: "x", Owner: fmt.Sprint(i), Revision: revision}
			r.changes = append(r.changes, c)
		}
	})
}

func (r *record) edit(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	close(r.written)
	r.written = make(chan struct{})
}

// revision returns the revision of the last change.
func (r *record) revision() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changes[len(r.changes)-1].Revision
}

var errAhead = errors.New("the service has not come to the revision")

func (r *record) Watch(ctx context.Context, _ string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		r.mu.Lock()
		number := r.watches
		r.watches++
		r.mu.Unlock()
		if since > r.revision() {
			yield(backend.Change{}, errAhead)
			return
		}
		for at := 0; ; {
			r.mu.Lock()
			var rest []backend.Change
			if !r.lag || number > 0 {
				rest, at = slices.Clone(r.changes[at:]), len(r.changes)
			}
			written := r.written
			r.mu.Unlock()
			for _, c := range rest {
				if c.Revision > since && !yield(c, nil) {
					return
				}
			}
			select {
			case <-written:
			case <-ctx.Done():
				yield(backend.Change{}, ctx.Err())
				return
			}
		}
	}
}

// follows records what a watch that shares a feed yields.
type follows struct {
	mu   sync.Mutex
	told []string
	err  error
}

func (f *follows) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.told, " ")
}

// after returns what a watch after a revision must yield.
func (r *record) after(since uint64) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var want []string
	for _, c := range r.changes {
		if c.Revision > since {
			want = append(want, fmt.Sprint(c.Revision, "-", c.Owner))
		}
	}
	return strings.Join(want, " ")
}

// recorded runs a test in simulated time with a record at revision 5. follow begins a watch that pauses after some
// events.
func recorded(t *testing.T, test func(r *record, follow func(since uint64, slow int) *follows)) {
	counted(t, func(t *testing.T, d *door, _ *counting) {
		ctx, hangUp := context.WithCancel(t.Context())
		var all sync.WaitGroup
		defer all.Wait()
		defer hangUp()
		r := newRecord()
		r.write(1, 2, 3, 4, 5)
		test(r, func(since uint64, slow int) *follows {
			f := &follows{}
			now := r.revision()
			all.Go(func() {
				for events, err := range d.g.follow(ctx, r, "x", since, now, func() {}) {
					f.mu.Lock()
					f.err = err
					for _, e := range events {
						f.told = append(f.told, fmt.Sprint(e.Revision, "-", e.Owner))
					}
					n := len(f.told)
					f.mu.Unlock()
					if n == slow {
						time.Sleep(time.Hour)
					}
				}
			})
			synctest.Wait()
			return f
		})
	})
}

// A watch gets each event after its revision once and in order, wherever the shared watch begins and however slow the
// watcher is, even if several events have the same revision.
func TestWatchCatchesUpWithTheFeed(t *testing.T) {
	recorded(t, func(r *record, follow func(since uint64, slow int) *follows) {
		told := map[*follows]uint64{follow(0, 0): 5, follow(2, 0): 2, follow(3, 1): 3, follow(5, 0): 5}
		for _, slow := range []int{1, 2, 3, 4, 5} {
			told[follow(0, slow)] = 5
		}
		for revision := uint64(6); revision < 6+feedEvents; revision++ {
			r.write(revision, revision, revision)
			if revision < 10 {
				synctest.Wait()
			}
		}
		synctest.Wait()
		told[follow(4, 0)], told[follow(7, 2)], told[follow(r.revision()-1, 0)] = 4, 7, r.revision()-1
		time.Sleep(2 * time.Hour)
		r.write(r.revision()+2, r.revision()+2)
		synctest.Wait()
		for f, since := range told {
			if got, want := f.String(), r.after(since); got != want || f.err != nil {
				t.Errorf("since %d: %d bytes of events, want %d; error %v", since, len(got), len(want), f.err)
			}
		}
	})
}

// A watch from now on yields no earlier change, even if the shared watch lags.
func TestWatchBeginsBehindALaggingFeed(t *testing.T) {
	recorded(t, func(r *record, follow func(since uint64, slow int) *follows) {
		before := follow(0, 0)
		r.edit(func() { r.lag = true })
		r.write(6, 7)
		now, since := follow(0, 0), follow(6, 0)
		r.write(8)
		r.edit(func() { r.lag = false })
		synctest.Wait()
		for f, want := range map[*follows]uint64{before: 5, now: 7, since: 6} {
			if f.String() != r.after(want) || f.err != nil {
				t.Errorf("got %v, %v; want %s", f, f.err, r.after(want))
			}
		}
		if r.watches != 1 {
			t.Errorf("%d watches", r.watches)
		}
	})
}

// For a revision that the service has not reached, the gateway returns the error of the service, even if the name is
// already watched.
func TestWatchAheadOfTheFeed(t *testing.T) {
	recorded(t, func(_ *record, follow func(since uint64, slow int) *follows) {
		follow(0, 0)
		if ahead := follow(99, 0); !errors.Is(ahead.err, errAhead) {
			t.Errorf("got %v, %v", ahead, ahead.err)
		}
	})
	counted(t, func(t *testing.T, d *door, _ *counting) {
		ctx, hangUp := context.WithCancel(t.Context())
		alone := d.get(atX + "/watch?since=99")
		var watching sync.WaitGroup
		watching.Go(func() { d.send(ctx, http.MethodGet, atX+"/watch", "") })
		synctest.Wait()
		if got := d.get(atX + "/watch?since=99"); alone.status != 400 || got.status != alone.status {
			t.Errorf("status %d beside a watch, %d without: %s", got.status, alone.status, got.text)
		}
		hangUp()
		watching.Wait()
	})
}

// When the shared watch ends, all watches that share it end. The next watch begins another shared watch.
func TestFeedEnds(t *testing.T) {
	counted(t, func(t *testing.T, d *door, c *counting) {
		var all []<-chan reply
		for range 3 {
			answer := make(chan reply, 1)
			all = append(all, answer)
			go func() { answer <- d.send(t.Context(), http.MethodGet, atX+"/watch", "") }()
		}
		synctest.Wait()
		time.Sleep(time.Second)
		c.cut()
		for _, answer := range all {
			if got := <-answer; !strings.Contains(got.text, "event: error") || !strings.Contains(got.text, codeUnavailable) {
				t.Errorf("the end: %s", got.text)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if got := d.send(ctx, http.MethodGet, atX+"/watch", ""); !strings.HasPrefix(got.text, ": watching") {
			t.Errorf("the next watch: %d %s", got.status, got.text)
		}
	})
}

// All watchers of a busy name together get events at most sendsOfOne times a second, and each gets all of them.
func TestWatchersOfABusyNamePause(t *testing.T) {
	counted(t, func(t *testing.T, d *door, _ *counting) {
		const watchers, events = 300, 1000
		ctx, hangUp := context.WithCancel(t.Context())
		var all sync.WaitGroup
		defer all.Wait()
		defer hangUp()
		r := newRecord()
		r.write(1)
		var groups, got atomic.Int64
		for range watchers {
			all.Go(func() {
				for changes := range d.g.follow(ctx, r, "x", 0, 1, func() {}) {
					groups.Add(1)
					got.Add(int64(len(changes)))
				}
			})
		}
		synctest.Wait()
		for i := range uint64(events) {
			r.write(2 + i)
			time.Sleep(time.Millisecond)
		}
		if n := groups.Load(); n > sendsOfOne+watchers {
			t.Errorf("in a second of events the watchers got %d groups, want at most %d and one each", n, sendsOfOne)
		}
		time.Sleep(time.Second)
		if n := got.Load(); n != watchers*events {
			t.Errorf("the watchers got %d events, want %d", n, watchers*events)
		}
	})
}
