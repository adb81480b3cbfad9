// Command fencelock runs commands under distributed locks, and the lock server, also over HTTP.
//
//	fencelock run --backend redis://127.0.0.1:6379 --name nightly-report -- /usr/local/bin/report --day yesterday
//	fencelock serve
//
// "fencelock help" lists the subcommands, "fencelock run --help" tells all about one.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"
)

// subcommand is one word after "fencelock". It gets the arguments after that word and returns the exit code.
type subcommand struct {
	name, summary string
	run           func(args []string) int
}

var subcommands = []subcommand{
	{"run", "run a command under a lock", runMain},
	{"acquire", "take a lock, and go on without it: for scripts", acquireMain},
	{"renew", "prolong what acquire took", renewMain},
	{"release", "give back what acquire took", releaseMain},
	{"ls", "list the locks that are held", lsMain},
	{"holder", "tell who holds a lock", holderMain},
	{"watch", "print what happens to a lock", watchMain},
	{"force-release", "take a lock away from its holder", forceReleaseMain},
	{"serve", "run a lock server", serveMain},
	{"gateway", "serve locks over HTTP, before any lock service", gatewayMain},
	{"status", "tell how the members of a lock server are", statusMain},
	{"transfer", "have another member of a lock server lead", transferMain},
	{"maintenance", "have a member of a lock server lead no more, or again", maintenanceMain},
	{"member", "list, add and remove members of a lock server", memberMain},
	{"session", "list and end the sessions of a lock server", sessionMain},
	{"postgres", "make the tables of the PostgreSQL driver", postgresMain},
	{"guard", "look at what a fencing guard remembers, and change it", guardMain},
	{"backup", "write all that a lock server keeps to a file", backupMain},
	{"verify", "look for damage in a data directory", verifyMain},
	{"recover", "make a cluster of one of a disk that is left", recoverMain},
	{"restore", "make a data directory of a backup", restoreMain},
}

func main() {
	os.Exit(dispatch(os.Args[1:], os.Stdout))
}

func dispatch(args []string, stdout io.Writer) int {
	if len(args) == 0 {
		return usageError("", errors.New("a subcommand is missing"))
	}
	word, rest := args[0], args[1:]
	switch word {
	case "help", "-h", "-help", "--help":
		if len(rest) == 0 {
			usage(stdout)
			return exitOK
		}
		word, rest = rest[0], []string{"--help"}
	case "version", "-version", "--version":
		fmt.Fprintln(stdout, "fencelock", version())
		return exitOK
	}
	for _, c := range subcommands {
		if c.name == word {
			return c.run(rest)
		}
	}
	return usageError("", fmt.Errorf("there is no subcommand %q", word))
}

func usage(w io.Writer) {
	fmt.Fprint(w, "fencelock runs commands under distributed locks, and the lock server.\n\nUsage:\n\n")
	for _, c := range subcommands {
		fmt.Fprintf(w, "  fencelock %-14s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w,
		"  fencelock version        print the version\n"+
			"  fencelock help           print this, or with a subcommand its help\n")
}

// usageError tells what is wrong with the command line, and where to read how it should be.
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

// version is the module's version, or the commit for a build from a working tree.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return "devel " + s.Value
		}
	}
	return "devel"
}
