package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// cluster is a system of members of which one leads.
type cluster interface {
	system

	// endpoints returns the addresses of all members for clients, separated by commas.
	endpoints() string

	// processes returns the servers, to be ended and started again one by one.
	processes() []*process

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

// members are the servers of a cluster, in the order of their addresses.
type members struct {
	addresses []string   // for clients
	servers   []*process // none if it was running already
}

func (m *members) endpoints() string     { return strings.Join(m.addresses, ",") }
func (m *members) processes() []*process { return m.servers }

// pause implements system. False: the servers are not ours.
func (m *members) pause() bool {
	for _, p := range m.servers {
		if !p.pause() {
			return false
		}
	}
	return len(m.servers) > 0
}

func (m *members) resume() {
	for _, p := range m.servers {
		p.resume()
	}
}

// leading is the address of the member that leads.
func (m *members) leading(c cluster) string {
	if len(m.addresses) == 1 {
		return m.addresses[0]
	}
	leader, err := c.leader(context.Background())
	if err != nil {
		return m.endpoints() // clients find out why
	}
	return m.addresses[leader]
}

func closeAll(servers []*process) error {
	var errs []error
	for _, p := range servers {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}
