package main

import (
	"context"

	"github.com/fencelock/fencelock/builtin"
)

const transferHelp = `Usage: fencelock transfer [options]

Has another member of a cluster of bundled servers lead, for example before the machine of the leader is stopped.
Clients follow it within a second; locks, waiters and sessions stay as they are. It prints the id of the member that
leads then.

Options:

{options}

Exit codes:

    0  another member leads, or NODE does
    1  there is no such member, or none with a vote answers the leader
   64  the command line makes no sense
   69  no leader reachable, or no answer in time; the change may have been applied
`

// leads is the printed form of the leader.
type leads struct {
	NodeID string `json:"nodeId"`
}

func defineTransfer(o *options) func([]string) error {
	to := o.String("to", "", "the id of the `MEMBER` that is to lead, see \"fencelock member list\"; the member that has the "+
		"most of the log if none is given")
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
