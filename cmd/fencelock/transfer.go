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

  --to NODE      the member that is to lead, by its id; see "fencelock member list". Default: the one that has the most
                 of the log
` + lookOptions + `
Exit codes:

    0  another member leads, or NODE does
    1  there is no such member, or none with a vote answers the leader
   64  the command line makes no sense
   69  no leader can be reached; or it did not answer, and may have done it
`

// leads is what is printed of the member that leads.
type leads struct {
	NodeID string `json:"nodeId"`
}

// transferMain is "fencelock transfer".
func transferMain(args []string) int {
	s, f := newLook("transfer")
	to := f.String("to", "", "")
	return s.runAdmin(s.parse(f, args), transferHelp, func(ctx context.Context, admin *builtin.Admin) error {
		id, err := admin.TransferLeadership(ctx, *to)
		if err != nil {
			return err
		}
		return s.printOne([]string{"LEADER"}, leads{id}, []string{id})
	})
}
