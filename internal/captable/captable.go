// Command captable writes the table of the drivers' capabilities into docs/DRIVERS.md, from the drivers' declarations
// in their default configuration. The conformance suite proves the declarations; a test here proves the table.
//
//	go run ./internal/captable docs/DRIVERS.md
package main

import (
	"bytes"
	"fmt"
	"log"
	"os"
	"strings"

	goredis "github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/etcd"
	"github.com/fencelock/fencelock/postgres"
	"github.com/fencelock/fencelock/redis"
	"github.com/fencelock/fencelock/redlock"
	"github.com/fencelock/fencelock/zookeeper"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: captable FILE")
	}
	if err := rewrite(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

// described are the drivers in the order of the table's columns. Describe does no I/O, so no server has to be there.
func described() []backend.Description {
	one := func() *goredis.Client { return goredis.NewClient(&goredis.Options{Addr: "127.0.0.1:1"}) }
	return []backend.Description{
		builtin.New([]string{"127.0.0.1:1"}, nil).Describe(),
		etcd.New(&clientv3.Client{}, nil).Describe(),
		zookeeper.New([]string{"127.0.0.1:1"}, nil).Describe(),
		postgres.New(nil, nil).Describe(),
		redis.New(one(), nil).Describe(),
		redlock.New([]goredis.UniversalClient{one(), one(), one()}, nil).Describe(),
		memory.New(nil).Describe(),
	}
}

// rows explain the capabilities in a user's words.
var rows = []struct {
	what string
	caps backend.Capabilities
}{
	{"fencing tokens: the correctness tier", backend.CapFencing},
	{"FIFO: no later request overtakes a waiter, not even `TryAcquire`", backend.CapFair},
	{"`Shared` beside exclusive", backend.CapShared},
	{"`Permits`", backend.CapPermits},
	{"several names in one step (etcd: only `TryAcquireAll`; without it, one by one in sorted order)", backend.CapMultiAcquire},
	{"`Hierarchical` names", backend.CapHierarchy},
	{"deadlocks detected and refused (without it, use `Options.Order`)", backend.CapDeadlock},
	{"`HoldAtLeast`", backend.CapMinHold},
	{"`Metadata`", backend.CapMetadata},
	{"the service notifies holders of a loss", backend.CapPushLoss},
	{"`Look`, `Leader`", backend.CapInspect},
	{"`List`", backend.CapList},
	{"`Watch`", backend.CapWatch},
	{"`Watch` with `Since`, `Leaders` without polling", backend.CapWatchReplay},
	{"`ForceRelease`", backend.CapForceRelease},
}

// shown are the rows of the fields that inspections fill in.
var shown = []struct {
	what string
	is   func(s *backend.Shows) (look, list bool)
}{
	{"start of each hold", func(s *backend.Shows) (bool, bool) { return s.Look.Since, s.List.Since }},
	{"when the hold expires", func(s *backend.Shows) (bool, bool) { return s.Look.ExpiresIn, s.List.ExpiresIn }},
	{"limit and remaining permits", func(s *backend.Shows) (bool, bool) { return s.Look.Limit, s.List.Limit }},
	{"number of waiters", func(s *backend.Shows) (bool, bool) { return s.Look.Waiters, s.List.Waiters }},
	{"queue in order: owner, hold ID, kind", func(s *backend.Shows) (bool, bool) { return s.Look.Queue, s.List.Queue }},
	{"start of each wait", func(s *backend.Shows) (bool, bool) { return s.Look.QueueSince, s.List.QueueSince }},
	{"`ErrHeld` with the time after which to retry", func(s *backend.Shows) (bool, bool) { return s.RetryAfter, s.RetryAfter }},
	{"time of a change", func(s *backend.Shows) (bool, bool) { return s.ChangeTime, s.ChangeTime }},
	{"author of a forced release in its change", func(s *backend.Shows) (bool, bool) { return s.ChangeAuthor, s.ChangeAuthor }},
}

// shows is the table of what inspections return.
func shows() string {
	drivers := described()
	var b strings.Builder
	b.WriteString(heading(drivers))
	for _, row := range shown {
		fmt.Fprintf(&b, "| %s |", row.what)
		for _, d := range drivers {
			switch look, list := row.is(&d.Shows); {
			case look && list:
				b.WriteString(" yes |")
			case look && d.Capabilities.Has(backend.CapList):
				b.WriteString(" `Look` |")
			case look:
				b.WriteString(" yes |")
			default:
				b.WriteString(" – |")
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

func heading(drivers []backend.Description) string {
	var b strings.Builder
	b.WriteString("| |")
	for _, d := range drivers {
		fmt.Fprintf(&b, " %s |", d.Name)
	}
	return b.String() + "\n|---|" + strings.Repeat("---|", len(drivers)) + "\n"
}

func table() string {
	drivers := described()
	var b strings.Builder
	b.WriteString(heading(drivers))
	for _, row := range rows {
		fmt.Fprintf(&b, "| %s |", row.what)
		for _, d := range drivers {
			if d.Capabilities.Has(row.caps) {
				b.WriteString(" yes |")
			} else {
				b.WriteString(" – |")
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// tables has the functions that write a table, by the name in the marks around it.
var tables = map[string]func() string{"capabilities": table, "inspections": shows}

// replaced returns text with the tables between their marks.
func replaced(text []byte) ([]byte, error) {
	for name, table := range tables {
		begin := "<!-- " + name + ": go run ./internal/captable docs/DRIVERS.md -->\n"
		end := "<!-- end of " + name + " -->\n"
		before, rest, found := bytes.Cut(text, []byte(begin))
		_, after, closed := bytes.Cut(rest, []byte(end))
		if !found || !closed {
			return nil, fmt.Errorf("captable: the marks %q and %q are not there", begin, end)
		}
		text = bytes.Join([][]byte{before, []byte(begin + table() + end), after}, nil)
	}
	return text, nil
}

func rewrite(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text, err = replaced(text)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}
