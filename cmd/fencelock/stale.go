package main

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/gateway"
)

const staleUsage = "read the state of the first member of the bundled server that answers, which may be out of date. " +
	"This works without a leader and without a majority. Standard error, or \"stale\" with --json, says how old the " +
	"state may be"

// stale marks one member's knowledge.
type stale struct {
	Address     string `json:"address"`
	NodeID      string `json:"nodeId"`
	HeardMillis *int64 `json:"heardMillis"` // since its last contact with a leader; null: no contact since its start
}

func staleLock(x *builtin.StaleState) lock {
	l := lock{State: gateway.StateOf(&x.State)}
	l.Stale = &stale{Address: x.Address, NodeID: x.Member}
	if x.Heard >= 0 {
		heard := x.Heard.Milliseconds()
		l.Stale.HeardMillis = &heard
	}
	return l
}

// sayStale explains a stale answer to people.
func sayStale(x *builtin.StaleState) {
	heard := "it considers itself the leader"
	switch {
	case x.Heard < 0:
		heard = "it has had no contact with a leader since its start"
	case x.Heard > 0:
		heard = fmt.Sprintf("its last contact with a leader was %v ago", x.Heard.Round(time.Millisecond))
	}
	say("stale: this is the state of the member at %s, which may be long out of date; %s", x.Address, heard)
}

func (s *lookSettings) staleHolder(ctx context.Context, name string) error {
	admin, err := builtin.OpenAdmin(s.backend)
	if err != nil {
		return err
	}
	x, err := admin.StaleLook(ctx, name)
	if err != nil {
		return err
	}
	defer sayStale(&x) // after the table
	return s.printHolder(staleLock(&x))
}

func (s *lookSettings) staleList(ctx context.Context, prefix string) error {
	admin, err := builtin.OpenAdmin(s.backend)
	if err != nil {
		return err
	}
	out := s.newPrinter(lockTitles...)
	first := true
	for x, err := range admin.StaleList(ctx, prefix) {
		if err != nil {
			return err
		}
		if first {
			defer sayStale(&x) // after the table
			first = false
		}
		l := staleLock(&x)
		if err := out.print(l, l.rows()...); err != nil {
			return err
		}
	}
	return out.flush()
}
