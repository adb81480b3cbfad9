//go:build unix

package main

import "testing"

// runAt is the arguments for a command on the server at url that says "in" and stays until its input ends.
func runAt(url string, options ...string) []string {
	args := append([]string{"run", "--backend", url, "--name", "x"}, options...)
	return append(args, "--", "sh", "-c", "echo in; cat")
}

func TestSharedAndPermits(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	for name, c := range map[string]struct{ option, other string }{
		"shared":  {option: "--shared", other: "--quiet"},
		"permits": {option: "--permits=1/2", other: "--permits=2/2"},
	} {
		t.Run(name, func(t *testing.T) {
			one, two := start(t, runAt(url, c.option)...), start(t, runAt(url, c.option)...)
			one.await("in")
			two.await("in")
			start(t, runAt(url, c.other, "--try")...).expectExit(exitHeld)
			two.CloseStdin()
			two.expectExit(exitOK)
			start(t, runAt(url, c.other, "--try")...).expectExit(exitHeld)
			if name == "permits" {
				start(t, runAt(url, "--permits=1/3", "--try")...).expectExit(exitUsage, "another kind or limit")
			}
			one.CloseStdin()
			one.expectExit(exitOK)
			last := start(t, runAt(url, c.other, "--try")...)
			last.await("in")
			last.CloseStdin()
			last.expectExit(exitOK)
		})
	}
}
