package main

import (
	"context"

	"github.com/fencelock/fencelock/builtin"
)

const transferHelp = `Usage: fencelock transfer [options]

Hands leadership to another member of a cluster of bundled servers, for example before the machine of the leader is
stopped, and prints the id of the new leader. Clients follow within a second; locks, waiters and sessions are not
affected.

Options:

{options}

Exit codes:

    0  another member leads, or MEMBER does
    1  there is no such member, or no voting member answers the leader
   64  the command line is invalid
   69  no leader reachable, or no answer in time; the change may have been applied
`

// leads is the printed form of the leader.
type leads struct {
	NodeID string `json:"nodeId"`
}

func defineTransfer(o *options) func([]string) error {
	to := o.String("to", "", "the id of the `MEMBER` to lead, see \"fencelock member list\"; the default is the "+
		"member with the longest log")
	s := o.administer("transfer")
	return func(args []string) error {
		return s.runAdmin(s.parse(args), func(ctx context.Context, admin *builtin.Admin) error {
			id, err := admin.TransferLeadership(ctx, *to)
			if err != nil {
				return err
			}
			return s.printOne([]string{"LEADER"}, leads{id}, []string{id})
		})
	}
}
