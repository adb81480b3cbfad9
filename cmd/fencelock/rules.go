package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

const rulesHelp = `Usage: fencelock rules get [options]
       fencelock rules set FILE [options]
       fencelock rules remove [options]
       fencelock rules test --rules FILE [NAME --as PRINCIPAL --verb VERB]

Shows and changes the access rules of a cluster of bundled servers, and tests rules.

get prints the rules of the cluster. set replaces them with the rules of FILE, on all members at the same log position.
remove deletes them: without rules, every client may make every call.

test needs no service. Without NAME, it only checks the file. VERB is acquire, read, force, admin or proxy; for admin,
NAME is "".

  fencelock rules test accounts/42 --rules rules --as token:ci --verb acquire

Options:

{options}

Exit codes:

    0  success; for test, the file is valid, and the rules allow the call
    1  a member of the cluster runs a version without rules, or this address accepts no changes: use --admin-listen
   64  the command line or the file is invalid
   69  no leader reachable, or no answer in time; the change may have been applied
   77  for test, the rules deny the call
`

func defineRules(o *options) func([]string) error {
	file := o.String(rulesOption, "", "for test, the `FILE` of rules")
	as := o.String("as", "", "for test, the `PRINCIPAL`; empty means a client without a credential")
	word := o.String("verb", "", "for test, the `VERB`")
	subtree := o.Bool("subtree", false, "for test, check the right to NAME and everything under it, as for a "+
		"hierarchical lock")
	s := o.administer("rules")
	return func(args []string) error {
		if len(args) == 0 || args[0] != "test" {
			return s.runAction(args, "get, set, remove or test", map[string]action{
				"get": {nil, func(ctx context.Context, admin *builtin.Admin) error {
					all, err := admin.Rules(ctx)
					fmt.Print(all.GetText())
					return err
				}},
				"set": {[]string{"FILE"}, func(ctx context.Context, admin *builtin.Admin) error {
					text, err := fileFor(s, rules.Parse)
					if err != nil {
						return err
					}
					return setRules(ctx, admin, text)
				}},
				"remove": {nil, func(ctx context.Context, admin *builtin.Admin) error { return setRules(ctx, admin, "") }},
			})
		}
		switch {
		case len(args) > 2:
			return fmt.Errorf("%q: rules takes no such argument", args[2])
		case *file == "":
			return errors.New("--rules is missing")
		}
		all, err := parsed("--rules", *file, rules.Parse)
		if err != nil || len(args) == 1 {
			return err
		}
		v, known := rules.ParseVerb(*word)
		who := principal.Nobody
		if *as != "" {
			if who, err = principal.Parse(*as); err != nil {
				return fmt.Errorf("--as %q: %w", *as, err)
			}
		}
		switch name := args[1]; {
		case !known:
			return fmt.Errorf("--verb %q: want acquire, read, force, admin or proxy", *word)
		case v == rules.Admin && name != "":
			return fmt.Errorf(`%q: admin is about the cluster, whose name is ""`, name)
		case v != rules.Admin:
			if err := backend.ValidateName(name); err != nil {
				return err
			}
		}
		decide := all.Decide
		if *subtree {
			decide = all.DecideSubtree
		}
		d := decide(who, v, args[1])
		why := "no rule allows it"
		if d.Line > 0 {
			why = fmt.Sprintf("line %d", d.Line)
		}
		if !d.Allowed {
			fmt.Println("denied: " + why)
			return exit(exitDenied)
		}
		fmt.Println("allowed: " + why)
		return nil
	}
}

// fileFor returns the text of the file that the cluster is to use, which parse accepts. An empty one is a mistake: it
// would permit everything.
func fileFor[T any](s *lookSettings, parse func([]byte) (T, error)) (text string, err error) {
	_, err = parsed("FILE", s.args[0], func(content []byte) (T, error) {
		text = string(content)
		return parse(content)
	})
	if err == nil && strings.TrimSpace(text) == "" {
		err = fmt.Errorf("%s is empty: to delete the %[2]s, run \"fencelock %[2]s remove\"", s.args[0], s.word)
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", backend.ErrInvalidOption, err)
	}
	return text, nil
}

func setRules(ctx context.Context, admin *builtin.Admin, text string) error {
	is, err := admin.SetRules(ctx, text)
	if err == nil {
		fmt.Printf("the rules of the cluster are version %d\n", is.GetVersion())
	}
	return err
}
