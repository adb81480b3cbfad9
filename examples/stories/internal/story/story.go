// Package story is the shared part of the examples: flags, a lock service, a folder for data, and a voice. The examples
// themselves explain the use of locks.
package story

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
)

// Options say how a story is told.
type Options struct {
	Backend   string    // URL of the lock service. Default: the bundled server, in this process
	Unsafe    bool      // leave out the story's safeguard, and show the damage
	Dir       string    // an empty folder for data. Default: a temporary one, removed at the end
	Namespace string    // keeps the locks of one story apart from those of others. Default: random
	Out       io.Writer // the output. Default: standard output
}

// Flags makes flags of the options. The caller parses them.
func Flags() *Options {
	o := &Options{}
	flag.StringVar(&o.Backend, "backend", "",
		"`URL` of the lock service, such as redis://127.0.0.1:6379. Default: one in this process")
	flag.BoolVar(&o.Unsafe, "unsafe", false, "leave the protection out, and show the damage")
	flag.StringVar(&o.Dir, "dir", "", "an empty `folder` for data. Default: a temporary one, removed at the end")
	flag.StringVar(&o.Namespace, "namespace", "", "put before every lock's `name`. Default: random")
	return o
}

// Main parses the flags, tells the story within a minute, and exits with 1 if it goes otherwise than it must. A signal
// ends the story, and everything is closed.
func Main(tell func(context.Context, *Story) error) {
	o := Flags()
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := Run(ctx, *o, tell); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(os.Args[0]), err)
		os.Exit(1)
	}
}

// Run tells a story. Everything that was opened for it is closed when it returns.
func Run(ctx context.Context, o Options, tell func(context.Context, *Story) error) (err error) {
	s := &Story{Options: o}
	defer func() { err = errors.Join(err, s.end(context.WithoutCancel(ctx))) }()
	if s.Out == nil {
		s.Out = os.Stdout
	}
	if s.Namespace == "" {
		s.Namespace = "examples-" + rand.Text()
	}
	if s.Dir == "" {
		if s.Dir, err = os.MkdirTemp("", "fencelock-example-"); err != nil {
			return err
		}
		s.AtEnd(func(context.Context) error { return os.RemoveAll(s.Dir) })
	}
	if s.Backend == "" {
		if err := s.serve(ctx); err != nil {
			return err
		}
	}
	return tell(ctx, s)
}

// Story is one run of an example.
type Story struct {
	Options
	ends []func(context.Context) error // closing functions, in the order of opening
	mu   sync.Mutex                    // keeps lines apart
}

// Open returns a client of the lock service that goes by the name owner. Each participant of a story has its own, as if
// it were a separate process. It is closed when the story ends.
func (s *Story) Open(ctx context.Context, tier fencelock.Tier, owner string) (*fencelock.Client, error) {
	locks, err := fencelock.Open(ctx, s.Backend, tier, &fencelock.Options{Owner: owner, Namespace: s.Namespace})
	if err != nil {
		return nil, err
	}
	s.AtEnd(locks.Close)
	return locks, nil
}

// ShortTTL is the TTL of a holder about to die: a second, or the driver's least if that is longer.
func ShortTTL(locks *fencelock.Client) time.Duration {
	return max(time.Second, locks.Describe().MinTTL)
}

// Tell prints one line. It is safe for concurrent use, unlike the methods that open and close.
func (s *Story) Tell(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.Out, format+"\n", args...)
}

// Args are the flags that let another process of the same program take part in this story.
func (s *Story) Args() []string {
	return []string{
		"-backend=" + s.Backend, fmt.Sprintf("-unsafe=%t", s.Unsafe), "-dir=" + s.Dir, "-namespace=" + s.Namespace,
	}
}

// AtEnd adds a function to call when the story ends, before earlier ones. The context bounds it.
func (s *Story) AtEnd(f func(context.Context) error) { s.ends = append(s.ends, f) }

// end calls the functions of AtEnd, the last first.
func (s *Story) end(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for i := len(s.ends) - 1; i >= 0; i-- {
		err = errors.Join(err, s.ends[i](ctx))
	}
	return err
}
