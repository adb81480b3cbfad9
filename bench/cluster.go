package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// cluster is a system of members of which one leads.
type cluster interface {
	system

	// endpoints returns the addresses of all members for clients, separated by commas.
	endpoints() string

	// members returns the servers, to be ended and started again one by one.
	members() []*process

	// leader waits until a member leads, and returns which.
	leader(ctx context.Context) (int, error)

	// serving waits until a member that was started follows or leads.
	serving(ctx context.Context, member int) error
}

// awaitLeader asks all members until one says that it leads.
func awaitLeader(ctx context.Context, members int, leads func(ctx context.Context, member int) (bool, error)) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		errs, yes := make([]error, members), make([]bool, members)
		var all sync.WaitGroup
		for i := range members {
			all.Go(func() {
				attempt, end := context.WithTimeout(ctx, time.Second)
				defer end()
				yes[i], errs[i] = leads(attempt, i)
			})
		}
		all.Wait()
		if leader := slices.Index(yes, true); leader >= 0 {
			return leader, nil
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("none of %d members leads: %w", members, errors.Join(append(errs, ctx.Err())...))
		}
		sleep(ctx, 5*time.Millisecond)
	}
}

// pauseAll pauses all servers. False: they are not ours.
func pauseAll(servers []*process) bool {
	for _, p := range servers {
		if !p.pause() {
			return false
		}
	}
	return len(servers) > 0
}

func resumeAll(servers []*process) {
	for _, p := range servers {
		p.resume()
	}
}

func closeAll(servers []*process) error {
	var errs []error
	for _, p := range servers {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}
