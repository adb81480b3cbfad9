package main

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock/builtin"
)

const maintenanceHelp = `Usage: fencelock maintenance on [options]
       fencelock maintenance off [options]

Has one member of a cluster of bundled servers lead no more, for example while its machine is worked on, or again. With
on, it hands the leadership over if it has it, and returns once another member leads. From then on the member follows
and votes as before, and leads only if nobody else does, until off, or until it is started anew. Locks, waiters and
sessions stay as they are. "fencelock status" says who is in maintenance. Stopping a server needs none of this: INT and
TERM hand over too.

Options:

{options}

Exit codes:

    0  done
    1  there is no such member; or it leads, and no other member with a vote can
   64  the command line makes no sense
   69  the member cannot be reached, or no other one leads in time
`

func defineMaintenance(o *options) func([]string) error {
	node := o.String("node", "", "the id of the member, see \"fencelock member list\"; the member at --backend, if that is "+
		"one address")
	s := o.administer("maintenance")
	return func(args []string) error {
		err := s.parse(args, "on or off")
		on := err == nil && s.args[0] == "on"
		if err == nil && !on && s.args[0] != "off" {
			err = fmt.Errorf("%q: want on or off", s.args[0])
		}
		return s.runAdmin(err, func(ctx context.Context, admin *builtin.Admin) error {
			return admin.SetMaintenance(ctx, *node, on)
		})
	}
}
