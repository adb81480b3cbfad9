//go:build unix

package main

import (
	"slices"
	"strings"
	"testing"
)

// A session is listed with what hangs on it, without its id, and ends when an operator says so.
func TestSessions(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	if all := objects[sessionRow](t, succeed(t, "session", "list", "--backend", url, "--json")); len(all) != 0 {
		t.Fatalf("%+v", all)
	}
	held := start(t, "run", "--backend", url, "--name", "x", "--ttl", "1m", "--", "sh", "-c", "echo ready; sleep 60")
	held.await("ready")
	all := objects[sessionRow](t,
		succeed(t, "session", "list", "--backend", url, "--client", "address 127.0.0.1", "--json"))
	if len(all) != 1 || all[0].Holds != 1 || all[0].Waits != 0 || !all[0].Connected || all[0].TTL != 60 ||
		len(all[0].Session) != 16 || all[0].Owner == "" || !slices.Equal(all[0].Names, []string{"x"}) {
		t.Fatalf("%+v", all)
	}
	text := succeed(t, "session", "list", "--backend", url)
	if !strings.Contains(text, all[0].Session) || !strings.Contains(text, "address 127.0.0.1") {
		t.Errorf("list:\n%s", text)
	}
	if other := succeed(
		t, "session", "list", "--backend", url, "--client", "address 127.0.0.9", "--json",
	); other != "" {
		t.Errorf("sessions of somebody else: %s", other)
	}
	succeed(t, "session", "end", all[0].Session, "--backend", url)
	held.expectExit(exitLost)
	again := start(t, "session", "end", all[0].Session, "--backend", url)
	again.expectExit(exitRefused, "no such session")
}
