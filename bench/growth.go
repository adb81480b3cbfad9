package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// growth is what a name costs that was held often before, in a store that nobody compacts: the median of acquires and
// releases by one caller, after 0, 10,000, 30,000 and 100,000 of them by one client after the other. A store that
// remembers what was deleted may answer ever more slowly, to all its users. It takes some minutes.
func growth() scenario {
	sizes := []int{0, 10_000, 30_000, 100_000}
	return scenario{
		name:    "growth",
		about:   "1 caller, 1 name: acquire + release, after as many of that name before; nothing is compacted",
		columns: columns("before; p50=p50 us; server-us=server CPU us/op; ratio=p50, x first; worst=worst x first>"),
		targets: map[string][]target{"etcd": {
			atMost("worst", 1.3, "acquire + release after up to 100,000 of that name, x the first"),
		}},
		rounds: 1, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.role == roleOurs },
		all: func(ctx context.Context, l *lab, peers []peer, _ int) []row {
			var rows []row
			for _, p := range peers {
				rows = append(rows, runGrowth(ctx, l, p, sizes)...)
			}
			return rows
		},
	}
}

// runGrowth returns a row for each size. The last one of a peer bears its name, and what the targets ask for.
func runGrowth(ctx context.Context, l *lab, p peer, sizes []int) []row {
	rows := make([]row, len(sizes))
	for i := range rows {
		rows[i] = row{name: fmt.Sprint(p.name, " after ", sizes[i]), role: roleFloor}
	}
	last := &rows[len(rows)-1]
	last.name, last.role = p.name, p.role
	if l.quick {
		sizes = slices.Clone(sizes)
		for i := range sizes {
			sizes[i] /= 100
		}
	}
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: 30 * time.Second})
	if err != nil {
		last.add(nil, err)
		return rows
	}
	defer closeAll()
	name, done, first, worst := l.fresh("growth"), 0, 0.0, 0.0
	for i, size := range sizes {
		s, err := sample(nil), spend(ctx, l, p, name, size-done)
		done = size
		if err == nil {
			s, err = runCallers(ctx, l, p, clients[0], []string{name},
				l.length(200*time.Millisecond, 50*time.Millisecond), l.length(2*time.Second, 200*time.Millisecond))
		}
		if err == nil {
			if i == 0 {
				first = s["p50"]
			}
			worst = max(worst, s["p50"]/first)
			s["before"], s["ratio"], s["worst"] = float64(size), s["p50"]/first, worst
		}
		rows[i].add(s, err)
		if err != nil {
			break
		}
	}
	return rows
}

// spend acquires and releases a name n times, by ten clients one after the other.
func spend(ctx context.Context, l *lab, p peer, name string, n int) error {
	for range 10 {
		clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: 30 * time.Second})
		for range n / 10 {
			if err != nil {
				break
			}
			var h hold
			if h, err = clients[0].lock(ctx, name); err == nil {
				err = h.unlock(ctx)
			}
		}
		if err != nil {
			return err
		}
		closeAll()
	}
	return nil
}
