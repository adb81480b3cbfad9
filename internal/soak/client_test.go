package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance/fault"
)

const (
	clientRole = "client"
	soakTTL    = 3 * time.Second
	soakNames  = 4
	soakLines  = 4 // of one client
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{clientRole: client})
	os.Exit(m.Run())
}

// now is the time by the clock that all processes share.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return t.Nano()
}

// client has soakLines goroutines acquire names, until it gets the order to stop. Its arguments are the URL, its
// number, the folder of the registers and the file of its history.
func client(in <-chan string, args []string) int {
	url, number, registers, file := args[0], args[1], args[2], args[3]
	out, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() { <-in; stop() }()
	var locks *fencelock.Client
	for locks == nil && ctx.Err() == nil { // nobody may lead just now
		locks, _ = fencelock.Open(ctx, url, fencelock.Correctness, &fencelock.Options{TTL: soakTTL})
	}
	if ctx.Err() != nil {
		return 0
	}
	fmt.Println("working")
	var lines sync.WaitGroup
	for i := range soakLines {
		lines.Go(func() {
			l := &line{fmt.Sprintf("%s.%d", number, i), registers, out}
			for ctx.Err() == nil {
				if err := l.section(ctx, locks); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		})
	}
	lines.Wait()
	bounded, cancel := context.WithTimeout(context.Background(), soakTTL)
	defer cancel()
	if err := locks.Close(bounded); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return 0
}

// line is one goroutine of a client.
type line struct {
	id, registers string
	out           *os.File
}

func (l *line) note(at int64, format string, args ...any) {
	fmt.Fprintf(l.out, "%d %s\n", at, fmt.Sprintf(format, args...))
}

// section acquires a name, and adds one to its register. The register is read when the section begins and written when
// it ends, so two sections at one time lose a write.
func (l *line) section(ctx context.Context, locks *fencelock.Client) error {
	name := fmt.Sprintf("name-%d", rand.IntN(soakNames))
	asking, cancel := context.WithTimeout(ctx, 5*soakTTL)
	defer cancel()
	l.note(now(), "want %s %s", l.id, name)
	lease, err := locks.Acquire(asking, name)
	if err != nil {
		return err
	}
	token := uint64(lease.Token())
	l.note(now(), "got %s %s %d", l.id, name, token)
	end := sync.OnceFunc(func() {
		at := now()
		if lease.Context().Err() != nil {
			at = min(at, at+int64(time.Until(lease.Deadline())))
		}
		l.note(at, "end %s %s %d", l.id, name, token)
	})
	defer context.AfterFunc(lease.Context(), end)()
	file := filepath.Join(l.registers, name)
	_, value, err := readRegister(file)
	time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
	if err == nil {
		err = writeRegister(file, token, value+1)
	}
	end()
	if errors.Is(err, errStale) {
		err = nil
	}
	return errors.Join(err, lease.Release(context.WithoutCancel(ctx)))
}

var errStale = errors.New("a greater token has written")

func readRegister(file string) (token, value uint64, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, 0, err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if lines[len(lines)-1] != "" {
		_, err = fmt.Sscan(lines[len(lines)-1], &token, &value)
	}
	return token, value, err
}

// writeRegister writes unless a greater token has.
func writeRegister(file string, token, value uint64) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	last, _, err := readRegister(file)
	switch {
	case err != nil:
		return err
	case last > token:
		return errStale
	}
	_, err = fmt.Fprintf(f, "%d %d\n", token, value)
	return err
}
