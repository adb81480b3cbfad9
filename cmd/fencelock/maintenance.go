package main

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock/builtin"
)

const maintenanceHelp = `Usage: fencelock maintenance on [options]
       fencelock maintenance off [options]

Puts one member of a cluster of bundled servers into maintenance, for example while you work on its machine, or takes
it out. With on, the member hands leadership over if it leads, and the command returns once another member leads. From
then on, the member follows and votes as before, but leads only if no other member does, until off or its next start.
Locks, waiters and sessions are not affected. "fencelock status" shows members in maintenance. To stop a server, you do
not need this: INT and TERM also hand leadership over.

Options:

{options}

Exit codes:

    0  done
    1  there is no such member; or it leads, and no other voting member can
   64  the command line is invalid
   69  the member cannot be reached, or no other member became leader in time
`

func defineMaintenance(o *options) func([]string) error {
	node := o.String("node", "", "the id of the member, see \"fencelock member list\"; the default is the member at "+
		"--backend, if that is one address")
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
