// Package containers starts lock services for tests of drivers: isolated, fresh, and with the means to break them.
// The first test builds a program of another module (runner), which starts the containers with testcontainers-go. So
// testcontainers-go is not among the modules of a program that uses Fencelock.
//
//	redis := containers.Redis(t)
//	client := connect(redis.Addr())
//	...
//	redis.Restart(ctx) // the address stays
//
// A server runs in a container if a Docker engine answers and has the image or can pull it; otherwise as a local
// process, if the program is on PATH. With neither, the test is skipped and reports what to install. The test's log
// reports how the server runs.
//
// Environment variables:
//
//	FENCELOCK_IMAGE_REDIS   the image to use instead of the official one
//	FENCELOCK_IMAGE_ETCD    the same for etcd; …_ZOOKEEPER, …_POSTGRES and …_MARIADB for those; …_FENCELOCK for the
//	                        bundled server
//	FENCELOCK_REQUIRE=all   never skip: fail instead. If a Docker engine answers, the container must start, too
//
// The variables of testcontainers-go and of Docker (DOCKER_HOST, TESTCONTAINERS_...) apply as well.
package containers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// startTimeout bounds one start, without the pull of an image.
const startTimeout = 2 * time.Minute

// Server is one server of a lock service. Clients reach it through its own proxies, so that a restart never changes
// the address for clients. Methods are safe for concurrent use; methods that change the server's state run one after
// the other, and return when the server is in that state.
type Server struct {
	spec spec
	way  string
	main *fault.Proxy

	control sync.Mutex // serialises changes of the server's state
	node    node
	paused  bool

	mu      sync.Mutex // protects the following fields
	addr    string     // where the server listens; empty while it does not
	proxies map[*fault.Proxy]struct{}
}

// spec describes how to run one kind of server.
type spec struct {
	name  string // for the log
	image string // unless env names another
	env   string // the name of that variable
	port  string // of the container, 6379/tcp for example

	command []string // of the container, in front of args; nil if the image has an entrypoint

	entrypoint []string // of the container; nil: the image's
	user       string   // of the container; empty: the image's

	fixed   *freeport.Port // where to listen, in both ways: a container shares the host's network. nil: anywhere
	environ []string       // in both ways, KEY=value

	observer bool              // see LastObserves
	settings []string          // see Settings
	files    map[string][]byte // see Files
	last     []string          // see LastSettings
	ensemble []string          // of a ZooKeeper in an ensemble that runs as a process: lines of its configuration
	java     []string          // and options of its virtual machine

	binary  string                             // the program on PATH
	args    []string                           // in both ways
	process func(addr, dir string) []string    // in front of args, for a process that listens on addr
	ready   func(context.Context, string) bool // the server answers at this address
	install string                             // the package to install if neither is there
}

// node is one server, in a container or a process. Its methods are not called concurrently.
type node interface {
	// start starts the server, at first or after kill, with the files of the earlier run, and returns its address. It
	// does not wait until the server answers.
	start(context.Context) (addr string, err error)
	// ended returns the reason why the server is not running any more, or nil.
	ended(context.Context) error
	kill(context.Context) error
	pause(context.Context) error
	resume(context.Context) error
	logs(context.Context) string
	close(context.Context) error
}

// Option changes how a server is started.
type Option func(*options)

type options struct {
	args      []string
	image     string
	container bool // no other way
	process   bool // no other way
	observer  bool
	settings  []string
	files     map[string][]byte
	last      []string
	environ   []string
}

// Args appends arguments to the server's command line.
func Args(args ...string) Option { return func(o *options) { o.args = append(o.args, args...) } }

// Image sets the image, instead of the environment's.
func Image(image string) Option { return func(o *options) { o.image = image } }

// AsContainer disables the fallback to a process.
func AsContainer() Option { return func(o *options) { o.container, o.process = true, false } }

// AsProcess starts a process without trying a container.
func AsProcess() Option { return func(o *options) { o.container, o.process = false, true } }

// LastObserves makes the last node of a ZooKeeper ensemble an observer, which has no vote.
func LastObserves() Option { return func(o *options) { o.observer = true } }

// Settings adds lines to the configuration of each ZooKeeper, key=value each.
func Settings(lines ...string) Option {
	return func(o *options) { o.settings = append(o.settings, lines...) }
}

// Java adds options for the virtual machine of a ZooKeeper, -Djute.maxbuffer=4096 for example.
func Java(flags ...string) Option {
	return func(o *options) { o.environ = append(o.environ, "JAVA_TOOL_OPTIONS="+strings.Join(flags, " ")) }
}

// LastSettings adds lines to the configuration of the last node of a ZooKeeper ensemble, after those of Settings.
func LastSettings(lines ...string) Option {
	return func(o *options) { o.last = append(o.last, lines...) }
}

// Files puts files into the data folder of a single ZooKeeper before its first start, by their paths below the folder.
// The server runs as a process, whose folder can be written from outside.
func Files(files map[string][]byte) Option {
	return func(o *options) { o.container, o.process, o.files = false, true, files }
}

// create makes a server in one way, and describes the way; it does not start the server.
type create func(context.Context, spec) (node, string, error)

// run starts a server, in the first of two ways that works. The server ends with the test.
func run(t testing.TB, sp spec, opts []Option, newContainer, newProcess create) (s *Server) {
	t.Helper()
	firstWay(t, sp, opts, newContainer, newProcess, func(sp spec, create create) (err error) {
		s, err = try(t, sp, create)
		return err
	})
	return s
}

// firstWay calls start for each way until one works, with the spec changed by options and environment. If all fail,
// it fails or skips the test.
func firstWay(t testing.TB, sp spec, opts []Option, newContainer, newProcess create, start func(spec, create) error) {
	t.Helper()
	o := options{image: sp.image, container: true, process: true}
	if image := os.Getenv(sp.env); image != "" {
		o.image = image
	}
	for _, opt := range opts {
		opt(&o)
	}
	sp.image, sp.args = o.image, append(append([]string(nil), sp.args...), o.args...)
	sp.observer, sp.settings, sp.files = o.observer, o.settings, o.files
	sp.last, sp.environ = o.last, slices.Concat(sp.environ, o.environ)
	if len(o.settings) > 0 {
		sp.environ = append(slices.Clip(sp.environ), "ZOO_CFG_EXTRA="+strings.Join(o.settings, " "))
	}
	require := os.Getenv("FENCELOCK_REQUIRE") == "all"

	var reasons []error
	if o.container {
		err := start(sp, newContainer)
		if err == nil {
			return
		}
		if require && !errors.Is(err, errNoEngine) {
			t.Fatalf("%s: FENCELOCK_REQUIRE=all, but the container does not start: %v",
				sp.name, err)
		}
		reasons = append(reasons, fmt.Errorf("as a container: %w", err))
	}
	if o.process {
		err := start(sp, newProcess)
		if err == nil {
			if len(reasons) > 0 {
				t.Logf("%s: not %v", sp.name, reasons[0])
			}
			return
		}
		reasons = append(reasons, fmt.Errorf("as a process: %w", err))
	}
	text := fmt.Sprintf("%s CANNOT BE STARTED: install %s.\n%v", sp.name, sp.install, errors.Join(reasons...))
	if require {
		t.Fatal(text)
	}
	t.Skip(text)
}

// try starts a server in one way.
func try(t testing.TB, sp spec, create create) (*Server, error) {
	t.Helper()
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout+pullTimeout)
	defer cancel()
	s, err := prepare(ctx, sp, create)
	if err != nil {
		return nil, err
	}
	if err := s.Start(ctx); err != nil {
		return nil, errors.Join(err, s.close(ctx))
	}
	s.endWith(t)
	t.Logf("%s, in %v", s, time.Since(start).Round(time.Millisecond))
	return s, nil
}

// prepare makes a server without starting it. The caller must call close.
func prepare(ctx context.Context, sp spec, create create) (*Server, error) {
	n, way, err := create(ctx, sp)
	if err != nil {
		return nil, err
	}
	s := &Server{spec: sp, way: way, node: n, proxies: map[*fault.Proxy]struct{}{}}
	if s.main, err = s.newProxy(); err != nil {
		return nil, errors.Join(err, s.close(ctx))
	}
	return s, nil
}

// endWith closes the server at the end of the test. If the test failed, it prints the end of the server's log to
// standard error, since the test's log should end with the failure.
func (s *Server) endWith(t testing.TB) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		if t.Failed() {
			fmt.Fprintf(os.Stderr, "%s: the end of the log of %s:\n%s\n", t.Name(), s, lastLines(s.Logs(ctx)))
		}
		if err := s.close(ctx); err != nil {
			t.Errorf("%s: clean up: %v", s, err)
		}
	})
}

// The shown part of a server's log.
const (
	logLines = 60
	logWidth = 300 // bytes of a line
)

// lastLines returns the end of a log, with long lines cut.
func lastLines(log string) string {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	lines = lines[max(0, len(lines)-logLines):]
	for i, line := range lines {
		lines[i] = line[:min(len(line), logWidth)]
	}
	return strings.Join(lines, "\n")
}

// String returns the name of the server and the way it runs.
func (s *Server) String() string { return s.spec.name + " as a " + s.way }

// Addr returns the address of the server, host:port. It never changes.
func (s *Server) Addr() string { return s.main.Addr() }

// NewLink returns a new address of the server, for one client, and the link between the two, which a test can break.
// The link ends with the test t.
func (s *Server) NewLink(t testing.TB) (addr string, link fault.Link) {
	t.Helper()
	p, err := s.newProxy()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.mu.Lock()
		delete(s.proxies, p)
		s.mu.Unlock()
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p.Addr(), p
}

func (s *Server) newProxy() (*fault.Proxy, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, err := fault.NewProxy(s.addr)
	if err == nil {
		s.proxies[p] = struct{}{}
	}
	return p, err
}

// setAddr sets the server's address in all proxies. Without an address they refuse connections, as the server's
// machine would.
func (s *Server) setAddr(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addr = addr
	for p := range s.proxies {
		p.SetUpstream(addr)
	}
}

// Start starts the server after Stop, with its files, and returns when it answers.
func (s *Server) Start(ctx context.Context) error {
	s.control.Lock()
	defer s.control.Unlock()
	return s.start(ctx)
}

func (s *Server) start(ctx context.Context) error {
	if s.running() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	addr, err := s.node.start(ctx)
	if err != nil {
		return fmt.Errorf("%s: start: %w", s, err)
	}
	for !s.spec.ready(ctx, addr) {
		if err := s.node.ended(ctx); err != nil {
			return fmt.Errorf("%s: start: %w\n%s", s, err, s.node.logs(ctx))
		}
		select {
		case <-time.After(10 * time.Millisecond): // no notification when a server is ready
		case <-ctx.Done():
			return fmt.Errorf("%s: start: no answer: %w\n%s", s, ctx.Err(), s.node.logs(context.WithoutCancel(ctx)))
		}
	}
	s.setAddr(addr)
	return nil
}

func (s *Server) running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr != ""
}

// Stop kills the server (SIGKILL), which has no time to write or to notify clients. Until Start, connections are
// refused.
func (s *Server) Stop(ctx context.Context) error {
	s.control.Lock()
	defer s.control.Unlock()
	return s.stop(ctx)
}

func (s *Server) stop(ctx context.Context) error {
	if !s.running() {
		return nil
	}
	if err := s.node.kill(ctx); err != nil { // even if paused
		return fmt.Errorf("%s: stop: %w", s, err)
	}
	s.paused = false
	s.setAddr("")
	return nil
}

// Restart is Stop and Start.
func (s *Server) Restart(ctx context.Context) error {
	s.control.Lock()
	defer s.control.Unlock()
	if err := s.stop(ctx); err != nil {
		return err
	}
	return s.start(ctx)
}

// Pause freezes the server: its connections stay open, new connections are accepted, and the server does not answer
// until Resume.
func (s *Server) Pause(ctx context.Context) error {
	s.control.Lock()
	defer s.control.Unlock()
	if s.paused {
		return nil
	}
	if err := s.node.pause(ctx); err != nil {
		return fmt.Errorf("%s: pause: %w", s, err)
	}
	s.paused = true
	return nil
}

// Resume ends a Pause.
func (s *Server) Resume(ctx context.Context) error {
	s.control.Lock()
	defer s.control.Unlock()
	return s.resume(ctx)
}

func (s *Server) resume(ctx context.Context) error {
	if !s.paused {
		return nil
	}
	if err := s.node.resume(ctx); err != nil {
		return fmt.Errorf("%s: resume: %w", s, err)
	}
	s.paused = false
	return nil
}

// RestartWith is Restart of a server that was started with AsProcess, with further arguments from then on. In most
// servers the last one of two arguments for one setting takes effect.
func (s *Server) RestartWith(ctx context.Context, args ...string) error {
	s.control.Lock()
	defer s.control.Unlock()
	p, ok := s.node.(*process)
	if !ok {
		return fmt.Errorf("%s: restart: the server does not run as a process", s)
	}
	if err := s.stop(ctx); err != nil {
		return err
	}
	p.spec.args = slices.Concat(p.spec.args, args)
	return s.start(ctx)
}

// Folder returns the folder with the files of a server that was started with AsProcess. A test may replace them while
// the server is stopped. It fails the test t for another server.
func (s *Server) Folder(t testing.TB) string {
	t.Helper()
	s.control.Lock()
	defer s.control.Unlock()
	p, ok := s.node.(*process)
	if !ok {
		t.Fatalf("%s: the server does not run as a process", s)
	}
	return p.dir
}

// Logs returns the server's log.
func (s *Server) Logs(ctx context.Context) string {
	s.control.Lock()
	defer s.control.Unlock()
	return s.node.logs(ctx)
}

// close ends the server and all of its proxies.
func (s *Server) close(ctx context.Context) error {
	s.control.Lock()
	defer s.control.Unlock()
	errs := []error{s.node.close(ctx)}
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.proxies {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
