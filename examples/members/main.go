// Command members runs locks inside the application: three processes, each with a member of the bundled lock server in
// it, and no service beside them. Start it three times:
//
//	go run ./examples/members -data a -peer 127.0.0.1:7491 -listen 127.0.0.1:7481
//	go run ./examples/members -data b -peer 127.0.0.1:7492 -listen 127.0.0.1:7482
//	go run ./examples/members -data c -peer 127.0.0.1:7493 -listen 127.0.0.1:7483
//
// Tier: correctness. Each process appends lines to one file, under one lock. Stop any of them and restart it, one
// after the other, as a deployment does: the others go on, and the tokens in the file increase. docs/EMBEDDED.md lists
// the changes between machines (TLS, and how long to wait between two of them).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/builtin/embedded"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "members:", err)
		os.Exit(1)
	}
}

// run is one process, until ctx ends.
func run(ctx context.Context, args []string) (err error) {
	f := flag.NewFlagSet("members", flag.ContinueOnError)
	data := f.String("data", "", "folder of this member")
	peer := f.String("peer", "", "address for the other members")
	listen := f.String("listen", "", "address for the drivers of the others")
	members := f.String("members", "127.0.0.1:7491,127.0.0.1:7492,127.0.0.1:7493", "all addresses of -peer")
	file := f.String("file", "members.txt", "what the lock protects")
	if err := f.Parse(args); err != nil {
		return err
	}
	server, err := embedded.Start(ctx, embedded.Options{
		DataDir: *data, Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Cluster: &embedded.Cluster{
			Members: strings.Split(*members, ","), PeerListen: *peer, Listen: *listen,
			JoinKey: []byte(os.Getenv("MEMBERS_JOIN_KEY")), // a process that lost its folder rejoins
		},
	})
	if err != nil {
		return err
	}
	locks, err := fencelock.ForCorrectness(server.Driver(nil), nil)
	if err != nil {
		return errors.Join(err, server.Close(context.WithoutCancel(ctx)))
	}
	defer func() { // the client first: it releases its locks; then the server, which hands the leadership over
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err = errors.Join(err, locks.Close(bounded), server.Close(bounded))
	}()
	fmt.Println("started") // not yet ready: the first lock waits for most of the members
	for ctx.Err() == nil {
		err := locks.Do(ctx, "members.txt", func(_ context.Context, lease *fencelock.Lease) error {
			fmt.Println("token", lease.Token())
			return appendLine(*file, fmt.Sprintf("%v by %s", lease.Token(), *peer))
		})
		if err != nil && ctx.Err() == nil {
			fmt.Println("tries again:", err)
		}
		select {
		case <-time.After(50 * time.Millisecond): // other work
		case <-ctx.Done():
		}
	}
	return nil
}

// appendLine writes to the file that the lock protects.
func appendLine(file, line string) error {
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, line)
	return errors.Join(err, f.Close())
}
