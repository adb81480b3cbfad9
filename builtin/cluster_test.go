package builtin_test

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestClusterFaults breaks three members, their machines, and the paths to and between them, under contending clients.
func TestClusterFaults(t *testing.T) {
	testtier.Only(t)
	cluster.RunAll(t, func(t testing.TB, f cluster.Fault) cluster.Harness {
		var like []member
		if f.Slug == "far-behind" { // a log that is soon compacted
			like = append(like, member{
				SegmentBytes: smallSegment, SnapshotEntries: 32, TrailingEntries: 8, SnapshotInterval: 100 * time.Millisecond,
			})
		}
		return startProcesses(t, 3, like...).harness(t)
	})
}

// harness returns the members as a cluster on which every fault can be injected.
func (p *processes) harness(t testing.TB) cluster.Harness {
	admin := newAdmin(t, p.addrs()...)
	return cluster.Harness{
		Nodes: len(p.members),
		Client: func(t testing.TB) (backend.FencingDriver, fault.Links) {
			d, link := linked(t, p.addrs()...)
			return d, link.(fault.Links)
		},
		Kill: p.kill, Start: p.start, Pause: p.pause, Resume: p.resume,
		Leader: p.lead, HasLeader: p.hasLeader,
		Cut: p.cut, Heal: p.heal, Said: p.said,
		Leftovers: admin.leftovers,
		Machines:  p.machines(),
	}
}
