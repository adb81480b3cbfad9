package guardtest

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
)

var crashClauses = []Clause{
	{
		ID: "C1", Group: "crash", Slug: "between-check-and-write", needs: needWrite | needDurable | needChild,
		run:  crashBetween,
		Rule: "if a process is killed between check and write, both take effect or neither, and nothing blocks other writers",
	},
	{
		ID: "C2", Group: "crash", Slug: "at-any-time", needs: needWrite | needDurable | needChild, run: crashAnyTime,
		Rule: "if a writing process is killed at any time, the value belongs to the token that the guard remembers, " +
			"and is not older than the last acknowledged write",
	},
}

var durableClauses = []Clause{
	{
		ID: "D1", Group: "durable", Slug: "across-restart", needs: needDurable | needRestart, run: acrossRestart,
		Rule: "after all clients have ended and the resource has crashed, the guard remembers the admitted tokens",
	},
}

// role is the name of this package's child for fault.StartRole.
const role = "guardtest"

var children struct {
	sync.Mutex
	opens map[string]Open
}

// RunChild turns the process into a writer that will be killed, if a clause started it for that, and never returns
// then. A test binary calls it first thing in TestMain, with the functions that harnesses name.
func RunChild(opens map[string]Open) {
	fault.RunRole(map[string]fault.Role{role: func(in <-chan string, args []string) int {
		if err := write(in, opens, args); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}})
	children.Lock()
	defer children.Unlock()
	children.opens = opens
}

func childReady(name string) bool {
	children.Lock()
	defer children.Unlock()
	return children.opens[name] != nil
}

// The behaviours of a child.
const (
	stopBetween = "between" // it writes once, and stops between check and write
	writeOn     = "on"      // it writes with one token after the other
)

// write is the child's program: it reports each write that was answered.
func write(in <-chan string, opens map[string]Open, args []string) error {
	if len(args) != 6 {
		return fmt.Errorf("guardtest: child: %d arguments, want 6", len(args))
	}
	name, address, resource, space, mode := args[0], args[1], args[2], args[3], args[4]
	first, err := fencing.ParseToken(args[5])
	if err != nil {
		return err
	}
	open := opens[name]
	if open == nil {
		return fmt.Errorf("guardtest: child: RunChild was not called with %q", name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	c, err := open(ctx, address)
	if err != nil {
		return err
	}
	between := func() {}
	if mode == stopBetween {
		between = func() {
			fmt.Println("between")
			<-in // blocks until the kill
		}
	}
	for token := first; ; token++ {
		if err := c.Write(ctx, fencing.Claim{Resource: resource, Token: token, Space: space}, token.String(),
			between); err != nil {
			return err
		}
		fmt.Println("wrote", token)
		if mode == stopBetween {
			<-in
		}
	}
}

// child starts a writer, which the clause's end kills.
func (t *trial) child(resource, mode string, first fencing.Token) *fault.Child {
	c := fault.StartRole(t.tb, role, t.h.Name, t.h.Address, resource, t.h.Space, mode, first.String())
	t.atEnd(c.Close)
	return c
}

// line waits for a line of the child, or ends the clause.
func (t *trial) line(c *fault.Child) string {
	ctx, cancel := context.WithTimeout(t.ctx, patience)
	defer cancel()
	line, err := c.Line(ctx)
	if err != nil {
		t.fatalf("the writing process: %v\n%s", err, c.Stderr())
	}
	return line
}

func crashBetween(t *trial) {
	c, name := t.client(), t.resource()
	if err := t.write(c, t.claim(name, 2), "2"); err != nil {
		t.fatalf("write = %v", err)
	}
	child := t.child(name, stopBetween, 3)
	said := t.line(child) // "between", or "wrote 3" where there is no between
	if err := child.Kill(); err != nil {
		t.fatalf("%v", err)
	}
	highest := t.agree(c, name, "after a crash in state "+strconv.Quote(said))
	want := fencing.Token(2)
	if said == "wrote 3" {
		want = 3
		t.notef("check and write are one step: the process was killed after it")
	}
	if highest != want {
		t.errorf("killed in state %q: the guard remembers %v, want %v", said, highest, want)
	}
	for _, token := range []fencing.Token{3, 4} {
		if err := t.write(c, t.claim(name, token), token.String()); err != nil {
			t.errorf("write with token %v after the crash = %v, want it admitted", token, err)
		}
	}
	t.agree(c, name, "after a write that followed the crash")
}

func crashAnyTime(t *trial) {
	const kills, writes = 3, 15
	c, name := t.client(), t.resource()
	last := fencing.Token(1)
	for kill := range kills {
		child := t.child(name, writeOn, last+1)
		for range writes + kill {
			t.wrote(t.line(child), &last)
		}
		if err := child.Kill(); err != nil {
			t.fatalf("%v", err)
		}
		for { // the lines not read yet
			line, err := child.Line(t.ctx)
			if err != nil {
				break
			}
			t.wrote(line, &last)
		}
		highest := t.agree(c, name, fmt.Sprintf("after kill %d", kill+1))
		if highest < last || highest > last+1 {
			t.errorf("after kill %d the guard remembers %v; the last write that was answered had %v", kill+1, highest,
				last)
		}
		last = highest
	}
	t.notef("killed %d times while it wrote, up to token %v", kills, last)
}

// wrote reads a line of a writing child.
func (t *trial) wrote(line string, last *fencing.Token) {
	var text string
	if _, err := fmt.Sscanf(line, "wrote %s", &text); err != nil {
		t.fatalf("the writing process said %q", line)
	}
	token, err := fencing.ParseToken(text)
	if err != nil {
		t.fatalf("the writing process said %q: %v", line, err)
	}
	*last = token
}

func acrossRestart(t *trial) {
	c, name, other := t.open(), t.resource(), t.resource()
	t.admit(c, name, 33)
	t.admit(c, name, 34)
	t.admit(c, other, 7)
	if c.Write != nil {
		if err := t.write(c, t.claim(name, 35), "35"); err != nil {
			t.errorf("write = %v", err)
		}
	} else {
		t.admit(c, name, 35)
	}
	t.close(c)
	t.h.Restart(t.tb)
	c = t.client()
	t.refuse(c, t.claim(name, 34), fencing.ErrStale, "after the restart")
	if highest := t.highest(c, name); highest != 35 {
		t.errorf("after the restart the guard remembers %v, want 35", highest)
	}
	if highest := t.highest(c, other); highest != 7 {
		t.errorf("after the restart the guard remembers %v for the other resource, want 7", highest)
	}
	if c.Read != nil {
		if value := t.read(c, name); value != "35" {
			t.errorf("after the restart the value is %q, want 35", value)
		}
	}
	t.admit(c, name, 35)
}
