package main

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/rules"
)

const policiesHelp = `Usage: fencelock policies get [options]
       fencelock policies set FILE [options]
       fencelock policies remove [options]

Shows and changes the policies of a cluster of bundled servers. For each prefix of names, they limit the duration of a
hold and the number of waiters, and set the number of permits. Other lock services have no policies.

get prints the policies of the cluster. set replaces them with the policies of FILE, on all members at the same log
position. remove deletes them. Each line of FILE has settings, separated by commas, and a prefix:

  max-queue=5000             ""
  max-hold=1h,max-queue=100  accounts
  max-hold=none              accounts/audit
  permits=8                  gpu/pool

Options:

{options}

Exit codes:

    0  done
    1  a member of the cluster runs a version without policies, or this address accepts no changes: use --admin-listen
   64  the command line or the file is invalid
   69  no leader reachable, or no answer in time; the change may have been applied
`

func definePolicies(o *options) func([]string) error {
	s := o.administer("policies")
	return func(args []string) error {
		return s.runAction(args, "get, set or remove", map[string]action{
			"get": {nil, func(ctx context.Context, admin *builtin.Admin) error {
				all, err := admin.Policies(ctx)
				fmt.Print(all.GetText())
				return err
			}},
			"set": {[]string{"FILE"}, func(ctx context.Context, admin *builtin.Admin) error {
				text, err := fileFor(s, rules.ParsePolicies)
				if err != nil {
					return err
				}
				_, err = admin.SetPolicies(ctx, text)
				return err
			}},
			"remove": {nil, func(ctx context.Context, admin *builtin.Admin) error {
				_, err := admin.SetPolicies(ctx, "")
				return err
			}},
		})
	}
}
