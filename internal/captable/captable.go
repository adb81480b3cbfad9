// Command captable writes the table of what each driver can do into README.md, from what the drivers declare in their
// default configuration. The conformance suite proves the declarations; a test here proves the table.
//
//	go run ./internal/captable README.md
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

// described are the drivers in the order of the table's columns. Describe does no I/O, so nothing has to be there.
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

// rows say in a user's words what the capabilities are for.
var rows = []struct {
	what string
	caps backend.Capabilities
}{
	{"fencing tokens: the correctness tier", backend.CapFencing},
	{"FIFO, nobody barges, not by `TryAcquire` either", backend.CapFair},
	{"`Shared` beside exclusive", backend.CapShared},
	{"`Permits`", backend.CapPermits},
	{"several names in one step (etcd: `TryAcquireAll` only; in sorted order elsewhere)", backend.CapMultiAcquire},
	{"`Hierarchical` names", backend.CapHierarchy},
	{"deadlocks refused (`Options.Order` elsewhere)", backend.CapDeadlock},
	{"`HoldAtLeast`", backend.CapMinHold},
	{"`Metadata`", backend.CapMetadata},
	{"loss pushed by the service", backend.CapPushLoss},
	{"`Look`, `Leader`", backend.CapInspect},
	{"`List`", backend.CapList},
	{"`Watch`", backend.CapWatch},
	{"`Watch` with `Since`, `Leaders` without polling", backend.CapWatchReplay},
	{"`ForceRelease`", backend.CapForceRelease},
}

func table() string {
	drivers := described()
	var b strings.Builder
	b.WriteString("| |")
	for _, d := range drivers {
		fmt.Fprintf(&b, " %s |", d.Name)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(drivers)) + "\n")
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

const (
	begin = "<!-- capabilities: go run ./internal/captable README.md -->\n"
	end   = "<!-- end of capabilities -->\n"
)

// replaced returns text with the table between the marks.
func replaced(text []byte) ([]byte, error) {
	before, rest, found := bytes.Cut(text, []byte(begin))
	_, after, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		return nil, fmt.Errorf("captable: the marks %q and %q are not there", begin, end)
	}
	return bytes.Join([][]byte{before, []byte(begin + table() + end), after}, nil), nil
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
