package builtin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/internal/testtier"
)

// soakTarget has the addresses for a client of TestSoak: the members, and the proxy for each advertised address.
type soakTarget struct {
	Members []string
	Proxies map[string]string
}

// openSoak opens a driver for a soakTarget in JSON.
func openSoak(ctx context.Context, target string) (backend.Driver, error) {
	var to soakTarget
	if err := json.Unmarshal([]byte(target), &to); err != nil {
		return nil, err
	}
	d := builtin.New(to.Members, &builtin.Options{
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", to.Proxies[address])
		},
	})
	if err := d.Ping(ctx); err != nil {
		return nil, errors.Join(err, d.Close(ctx))
	}
	return d, nil
}

// TestSoak breaks three members, the paths to and between them, and the processes of their clients, at random.
func TestSoak(t *testing.T) {
	testtier.Only(t)
	nemesis.Run(t, func(t testing.TB) nemesis.Service {
		p := startProcesses(t, 3)
		admin := newAdmin(t, p.addrs()...)
		return nemesis.Service{
			Driver: "builtin",
			Nodes:  len(p.members),
			Client: func(t testing.TB) (string, fault.Links) {
				to, links := soakTarget{Members: p.addrs(), Proxies: map[string]string{}}, fault.Links{}
				for _, addr := range to.Members {
					proxy := newProxy(t, addr)
					to.Proxies[addr], links = proxy.Addr(), append(links, proxy)
				}
				text, err := json.Marshal(to)
				if err != nil {
					t.Fatal(err)
				}
				return string(text), links
			},
			Open: openSoak,
			Kill: p.kill, Start: p.start, Pause: p.pause, Resume: p.resume,
			Probe: func(ctx context.Context, node int) (string, error) {
				_, err := p.hello(ctx, node)
				return fmt.Sprint(p.child(node).Pid()), err
			},
			Leader: p.lead, Cut: p.cut, Heal: p.heal, Said: p.said,
			More:      p.soakKinds(),
			Leftovers: admin.leftovers,
			Logs: func(context.Context) map[string]string {
				logs := map[string]string{}
				for i := range p.members {
					logs[fmt.Sprintf("node%d", i)] = p.child(i).Stderr()
				}
				return logs
			},
		}
	})
}

// soakKinds returns the faults of the members' machines. The cluster must not depend on wall clocks, and a slow disk
// may only slow a member down.
func (p *processes) soakKinds() []nemesis.Kind {
	m := p.machines()
	more := func(ctx context.Context, count func(int) int64, node int, before int64) error {
		for count(node) == before {
			if ctx.Err() != nil {
				return fmt.Errorf("node %d has not felt it: %w", node, ctx.Err())
			}
			time.Sleep(10 * time.Millisecond) // there is no notification
		}
		return nil
	}
	last := func(ctx context.Context, d time.Duration) {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	}
	return []nemesis.Kind{
		nemesis.NewKind("clock-jump", "the clock of a node jumps by an hour, and back", 0.5, 2,
			func(ctx context.Context, variant uint32, length time.Duration) error {
				node, d := int(variant)%len(p.members), time.Hour
				if variant%2 == 1 {
					d = -d
				}
				looked := m.Looked(node)
				if err := m.Jump(ctx, node, d); err != nil {
					return err
				}
				last(ctx, length)
				_, err := p.hasLeader(ctx, node) // so that a follower reads its clock, too
				return errors.Join(err, more(ctx, m.Looked, node, looked), m.Jump(ctx, node, -d))
			}),
		nemesis.NewKind("slow-disk", "the leader's disk takes 100 ms for a write", 0.5, 2,
			func(ctx context.Context, _ uint32, length time.Duration) error {
				leader, _, err := p.lead(ctx, 0)
				if err != nil {
					return err
				}
				hits := m.Hits(leader)
				if err := m.Disk(ctx, leader, cluster.DiskSlow); err != nil {
					return err
				}
				last(ctx, length)
				return errors.Join(more(ctx, m.Hits, leader, hits), m.Disk(ctx, leader, cluster.DiskWorks))
			}),
	}
}
