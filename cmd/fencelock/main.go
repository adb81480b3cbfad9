// Command fencelock runs commands under distributed locks, and the lock server, over gRPC and HTTP.
//
//	fencelock run --backend redis://127.0.0.1:6379 --name nightly-report -- /usr/local/bin/report --day yesterday
//	fencelock serve
//
// "fencelock help" lists the subcommands, "fencelock run --help" documents one.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// subcommand is one word after "fencelock".
type subcommand struct {
	name, summary, help string
	// define adds the options to o. Its result runs with the other arguments when all options are set. An error
	// other than an exit is a mistake in the command line.
	define func(o *options) func(args []string) error
	words  []string // possible first arguments, for completion
}

func subcommands() []subcommand {
	return []subcommand{
		{"run", "run a command under a lock", runHelp, defineRun, nil},
		{"elect", "stand for election, with hooks and a state file", electHelp, defineElect, nil},
		{"acquire", "acquire a lock that outlives this command, for scripts", acquireHelp, defineAcquire, nil},
		{"renew", "renew a lock from acquire", renewHelp, defineRenew, nil},
		{"release", "release a lock from acquire", releaseHelp, defineRelease, nil},
		{"ls", "list held locks", lsHelp, defineLs, nil},
		{"holder", "show who holds a lock", holderHelp, defineHolder, nil},
		{"explain", "show the holders and waiters that block a lock", explainHelp, defineExplain, nil},
		{"top", "show the locks with the longest queues", topHelp, defineTop, nil},
		{"watch", "print the changes of a lock", watchHelp, defineWatch, nil},
		{"force-release", "release a lock that another client holds", forceReleaseHelp, defineForceRelease, nil},
		{"serve", "run a lock server", serveHelp, defineServe, nil},
		{"gateway", "expose any lock service over HTTP", gatewayHelp, defineGateway, nil},
		{"token", "create a token for clients of a gateway", tokenHelp, defineToken, []string{"create"}},
		{"rules", "check, show and set access rules", rulesHelp, defineRules,
			[]string{"get", "set", "remove", "test"}},
		{"policies", "show and set limits on holds, queues and permits", policiesHelp, definePolicies,
			[]string{"get", "set", "remove"}},
		{"status", "show the health of a cluster's members", statusHelp, defineStatus, nil},
		{"doctor", "check each address of a lock service for contradictions", doctorHelp, defineDoctor, nil},
		{"transfer", "hand leadership to another member of a cluster", transferHelp, defineTransfer, nil},
		{"maintenance", "put a member into maintenance, or take it out", maintenanceHelp, defineMaintenance,
			[]string{"on", "off"}},
		{"member", "list, add and remove members of a cluster", memberHelp, defineMember,
			[]string{"list", "add", "remove"}},
		{"session", "list and end the sessions of a cluster", sessionHelp, defineSession, []string{"list", "end"}},
		{"postgres", "create the tables of the PostgreSQL driver", postgresHelp, definePostgres, []string{"migrate"}},
		{"guard", "check claims, and show and change the memory of a fencing guard", guardHelp, defineGuard,
			[]string{"check", "show", "raise", "accept", "install", "enforce", "migrate"}},
		{"backup", "write a cluster's data to a file", backupHelp, defineBackup, nil},
		{"verify", "check a data directory for damage", verifyHelp, defineVerify, nil},
		{"recover", "rebuild a single-member cluster from a surviving disk", recoverHelp, defineRecover, nil},
		{"restore", "create a data directory from a backup", restoreHelp, defineRestore, nil},
		{"open", "open a restored cluster early, or show when it opens", openHelp, defineOpen, nil},
		{"man", "write the manual pages", manHelp, defineMan, nil},
		{"version", "print the version", versionHelp, defineVersion, nil},
	}
}

func main() {
	os.Exit(dispatch(os.Args[1:], os.Stdout))
}

// dispatch runs the subcommand that args name, and returns the exit code.
func dispatch(args []string, stdout io.Writer) int {
	if len(args) == 0 {
		usage(os.Stderr)
		return usageError("", errors.New("a subcommand is missing"))
	}
	root, all := newRoot(stdout)
	if cmd, rest, err := root.Find(args); err == nil && all[cmd] != nil {
		if err := all[cmd].readSettings(rest); err != nil {
			return usageError(cmd.Name(), err)
		}
	}
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	var code exit
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &code):
		return int(code)
	case cmd == root:
		return usageError("", err)
	}
	return usageError(cmd.Name(), err)
}

// exit is the exit code of a subcommand that has printed its error.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// failed prints an error, and returns its exit.
func failed(code int, err error) error {
	say("%v", err)
	return exit(code)
}

// newRoot returns the command line of the program, and the options of its subcommands.
func newRoot(stdout io.Writer) (*cobra.Command, map[*cobra.Command]*options) {
	root := &cobra.Command{
		Use: "fencelock", Args: cobra.ArbitraryArgs, SilenceErrors: true, SilenceUsage: true,
		SuggestionsMinimumDistance: maxMisspelt,
		RunE: func(cmd *cobra.Command, args []string) error {
			if v, err := cmd.Flags().GetBool("version"); v || err != nil {
				fmt.Fprintln(stdout, "fencelock", version())
				return err
			}
			return unknownWord(cmd, args)
		},
	}
	root.Flags().Bool("version", false, "print the version")
	root.SetOut(stdout)
	root.SetFlagErrorFunc(misspelt)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		if cmd == root {
			usage(stdout)
			return
		}
		fmt.Fprint(stdout, helpOf(cmd))
	})
	all := map[*cobra.Command]*options{}
	for _, c := range subcommands() {
		cmd, o := c.command()
		all[cmd] = o
		root.AddCommand(cmd)
	}
	root.SetHelpCommand(&cobra.Command{
		Use: "help", Short: "print the help of a subcommand",
		RunE:              func(_ *cobra.Command, args []string) error { return help(root, args) },
		ValidArgsFunction: completeHelp,
	})
	return root, all
}

// command returns the subcommand for cobra.
func (c *subcommand) command() (*cobra.Command, *options) {
	cmd := &cobra.Command{Use: c.name, Short: c.summary, Long: c.help, ValidArgs: c.words}
	f := cmd.Flags()
	f.SortFlags = false
	o := &options{FlagSet: f, interspersed: c.name != "run"} // COMMAND has its own options
	f.SetInterspersed(o.interspersed)
	do := c.define(o)
	cmd.RunE = func(_ *cobra.Command, args []string) error { return do(args) }
	hideHelp(f)
	completeValues(cmd)
	return cmd, o
}

// help prints the help of a subcommand or a topic.
func help(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return root.Help()
	}
	if args[0] == backendTopic {
		_, err := fmt.Fprint(root.OutOrStdout(), backendHelp)
		return err
	}
	cmd, _, err := root.Find(args[:1])
	if err != nil || cmd == root {
		return unknownWord(root, args)
	}
	return cmd.Help()
}

// unknownWord returns the error for an unknown subcommand.
func unknownWord(root *cobra.Command, args []string) error {
	return fmt.Errorf("there is no subcommand %q%s", args[0], meant("", root.SuggestionsFor(args[0])))
}

func usage(w io.Writer) {
	fmt.Fprint(w, "fencelock runs commands under distributed locks, and the lock server.\n\n"+
		"  fencelock serve --dev\n"+
		"  fencelock run --backend fencelock://127.0.0.1:7480 --name nightly-report -- ./report\n\nUsage:\n\n")
	for _, c := range subcommands() {
		fmt.Fprintf(w, "  fencelock %-14s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w,
		"  fencelock completion     print the completion for bash, zsh, fish or powershell\n"+
			"  fencelock help           print this, the help of a subcommand, or \"help backend\": the URLs of lock services\n")
}

// usageError prints the error in the command line, and where its documentation is.
func usageError(subcommand string, err error) int {
	say("%v", err)
	fmt.Fprintf(os.Stderr, "Run '%s' for usage.\n", strings.TrimSpace("fencelock help "+subcommand))
	return exitUsage
}

// say prints one sentence to standard error. Texts of the core begin with the same prefix and get no second one.
func say(format string, args ...any) {
	text := strings.TrimPrefix(fmt.Sprintf(format, args...), "fencelock: ")
	fmt.Fprintf(os.Stderr, "fencelock: %s\n", text)
}

const versionHelp = "Usage: fencelock version\n\nPrints the version.\n"

func defineVersion(*options) func([]string) error {
	return func(args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("%q: version takes no arguments", args[0])
		}
		fmt.Println("fencelock", version())
		return nil
	}
}

// release is the version of a release: .ci/release sets it.
var release string

// upcoming is the next release. The go.mod files of the other modules require it too: TestModulesOfARelease.
const upcoming = "v0.1.0-devel"

// version returns the version of the release or of the module. A build in a clone has a pseudo-version, which names the
// commit; a build without version control, and each test, has the upcoming version.
func version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return upcoming
}
