package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

const (
	heldLocks   = 100_000
	atOnce      = 64 // names of one acquire
	workers     = 8  // that acquire and release while the time is taken
	rounds      = 5  // of each kind, by turns
	roundTime   = 8 * time.Second
	scrapeEvery = time.Second
	scrapeGoal  = 50 * time.Millisecond // the greatest
)

// measureScrapes prints how long /metrics takes of a durable server with heldLocks, and how long an acquire and release
// of another name takes with a scrape per second and without one.
func measureScrapes(ctx context.Context, to io.Writer) error {
	return withProgram(ctx, func(program, dir string) error {
		found, stop, err := startServer(ctx, program, []string{
			"--data-dir", filepath.Join(dir, "data"), "--peer-listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0",
		}, "serving clients at ", "serving probes at ")
		if err != nil {
			return err
		}
		defer stop()
		d := builtin.New(found[:1], nil)
		defer func() { _ = d.Close(context.WithoutCancel(ctx)) }()
		if err := holdMany(ctx, d); err != nil {
			return err
		}
		return alternate(ctx, d, found[1]+"/metrics", to)
	})
}

func request(name string) backend.Request {
	return backend.Request{Name: name, Owner: "measure", RequestID: backend.NewRequestID(), TTL: 30 * time.Second}
}

// holdMany acquires heldLocks, which the driver keeps alive.
func holdMany(ctx context.Context, d *builtin.Driver) error {
	for n := 0; n < heldLocks; n += atOnce {
		var some []backend.Request
		for i := n; i < min(n+atOnce, heldLocks); i++ {
			some = append(some, request(fmt.Sprintf("held/%d", i)))
		}
		if _, err := d.AcquireAll(ctx, some); err != nil {
			return err
		}
	}
	return nil
}

// alternate measures with scrapes and without, by turns: the machine may do something else meanwhile.
func alternate(ctx context.Context, d *builtin.Driver, metrics string, to io.Writer) error {
	var pairs [2][]time.Duration // without and with scrapes
	var worst [2][]time.Duration // of each round, the 99th percentile
	var scrapes []time.Duration
	for n := range 2 * rounds {
		round, cancel := context.WithTimeout(ctx, roundTime)
		var scraping sync.WaitGroup
		var failed error
		if n%2 == 1 {
			scraping.Go(func() {
				some, err := scrape(round, metrics)
				scrapes, failed = append(scrapes, some...), err
			})
		}
		took, err := acquireAndRelease(round, d)
		cancel()
		scraping.Wait()
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		slices.Sort(took)
		pairs[n%2], worst[n%2] = append(pairs[n%2], took...), append(worst[n%2], at(took, 0.99))
	}
	out := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(out, "median\tp99\tgreatest\tgoal\t  with %d locks\n", heldLocks)
	slices.Sort(scrapes)
	fmt.Fprintf(out, "%v\t%v\t%v\t%v\t  %d scrapes of /metrics\n", short(at(scrapes, 0.5)), short(at(scrapes, 0.99)),
		short(at(scrapes, 1)), scrapeGoal, len(scrapes))
	for i, what := range []string{"without scrapes", "with a scrape per second"} {
		slices.Sort(pairs[i])
		slices.Sort(worst[i])
		fmt.Fprintf(out, "%v\t%v\t%v\t–\t  acquire and release %s; p99 of %d rounds: %v to %v, median %v\n",
			short(at(pairs[i], 0.5)), short(at(pairs[i], 0.99)), short(at(pairs[i], 1)), what, rounds,
			short(worst[i][0]), short(worst[i][rounds-1]), short(worst[i][rounds/2]))
	}
	return out.Flush()
}

// at returns a quantile of sorted values.
func at(sorted []time.Duration, quantile float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(quantile*float64(len(sorted)-1))]
}

func short(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }

// acquireAndRelease has workers acquire and release names of their own until ctx ends, and returns how long each pair
// took.
func acquireAndRelease(ctx context.Context, d *builtin.Driver) ([]time.Duration, error) {
	var mu sync.Mutex // protects the following
	var all []time.Duration
	var failed error
	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			var took []time.Duration
			for ctx.Err() == nil {
				began := time.Now()
				g, err := d.Acquire(context.WithoutCancel(ctx), request(fmt.Sprintf("measured/%d", w)))
				if err == nil {
					err = d.Release(context.WithoutCancel(ctx), g)
				}
				if err != nil {
					mu.Lock()
					defer mu.Unlock()
					failed = err
					return
				}
				took = append(took, time.Since(began))
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, took...)
		})
	}
	work.Wait()
	return all, failed
}

// scrape reads the metrics once per scrapeEvery until ctx ends, and returns how long each took.
func scrape(ctx context.Context, url string) (took []time.Duration, err error) {
	tick := time.NewTicker(scrapeEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return took, nil
		}
		began := time.Now()
		q, err := http.NewRequestWithContext(context.WithoutCancel(ctx), http.MethodGet, url, nil)
		if err != nil {
			return took, err
		}
		answer, err := http.DefaultClient.Do(q)
		if err != nil {
			return took, err
		}
		_, err = io.Copy(io.Discard, answer.Body)
		if err := errors.Join(err, answer.Body.Close()); err != nil {
			return took, err
		}
		took = append(took, time.Since(began))
	}
}
