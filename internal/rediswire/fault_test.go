package rediswire

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

// ran is what a server has carried out for one name: how often, and when it did so last, as the number of a line of
// MONITOR.
type ran struct{ sets, frees, setAt, freeAt int }

// monitor reads what a server carries out.
type monitor struct {
	t     *testing.T
	admin *goredis.Client
	in    *bufio.Reader
	lines int
	names map[string]*ran // by key
}

func newMonitor(t *testing.T, addr string, admin *goredis.Client) *monitor {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	m := &monitor{t: t, admin: admin, in: bufio.NewReader(c), names: map[string]*ran{}}
	if _, err := c.Write([]byte("CLIENT SETNAME stays\r\nMONITOR\r\n")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if line, err := m.in.ReadString('\n'); err != nil || line != "+OK\r\n" {
			t.Fatalf("MONITOR: %q, %v", line, err)
		}
	}
	return m
}

// of returns the steps that the server has carried out for the name with a key.
func (m *monitor) of(key string) *ran {
	if m.names[key] == nil {
		m.names[key] = &ran{}
	}
	return m.names[key]
}

// read reads up to now. The short script asks for the queue once for each step.
func (m *monitor) read() {
	m.t.Helper()
	mark := fmt.Sprint("mark-", rand.Uint64())
	if err := m.admin.Echo(m.t.Context(), mark).Err(); err != nil {
		m.t.Fatal(err)
	}
	for {
		line, err := m.in.ReadString('\n')
		if err != nil {
			m.t.Fatal(err)
		}
		m.lines++
		words := strings.Fields(line) // time, database, client, command, key
		if len(words) < 5 {
			continue
		}
		key := strings.Trim(words[4], `"`)
		switch command := strings.ToLower(strings.Trim(words[3], `"`)); {
		case key == mark:
			return
		case command == "set":
			r := m.of(key)
			r.sets++
			r.setAt = m.lines
		case command == "exists" && words[2] == "lua]":
			r := m.of(strings.TrimSuffix(key, ":q"))
			r.frees++
			r.freeAt = m.lines
		}
	}
}

// sent is a step of a test, and what its caller knows about it.
type sent struct {
	*told
	dropped bool
}

// faults breaks the network of a line and forgets scripts, until ctx ends. A cut may overtake what was sent before it.
func faults(ctx context.Context, t *testing.T, l *Line, link *fault.Proxy, admin *goredis.Client, cuts bool) {
	pause := func(most time.Duration) {
		select {
		case <-time.After(rand.N(most)):
		case <-ctx.Done():
		}
	}
	defer link.Pass()
	for ctx.Err() == nil {
		pause(30 * time.Millisecond)
		direction := []fault.Direction{fault.Requests, fault.Replies, fault.Both}[rand.N(3)]
		switch rand.N(8) {
		case 0, 1:
			link.Hold(direction)
			pause(300 * time.Millisecond)
		case 2:
			link.Delay(direction, rand.N(5*time.Millisecond))
			pause(50 * time.Millisecond)
		case 3:
			if err := admin.ScriptFlush(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		case 4:
			l.Renew()
		case 5:
			l.Doubt()
		default:
			if !cuts {
				continue
			}
			switch rand.N(4) {
			case 0:
				link.Drop(direction)
				pause(50 * time.Millisecond)
			case 1:
				link.Reset()
			case 2:
				link.Refuse()
				pause(20 * time.Millisecond)
			case 3:
				kill(t, admin)
			}
		}
		link.Pass()
	}
}

// kill has the server close a connection of a line.
func kill(t *testing.T, admin *goredis.Client) {
	list, err := admin.ClientList(t.Context()).Result()
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(list) {
		id, rest, _ := strings.Cut(strings.TrimPrefix(line, "id="), " ")
		if !strings.Contains(rest, "name=stays") {
			_ = admin.ClientKillByFilter(t.Context(), "ID", id).Err() // it may have gone
			return
		}
	}
}

// hold sends the steps for one name as callers do, with and without patience.
func hold(l *Line, name string) (all []*sent) {
	take, free := setting(name), freeing(name)
	take.Args[1] = "60000"
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	wait := func(o *sent) {
		select {
		case <-o.done:
		case <-ctx.Done():
			if o.dropped = o.Drop(); !o.dropped && rand.N(4) == 0 {
				l.Doubt()
			}
		}
	}
	most := 80 * time.Millisecond
	if rand.N(3) > 0 {
		most = rand.N(most / 2)
		ctx, cancel = context.WithTimeout(ctx, most)
		defer cancel()
	}
	if rand.N(200) > 0 {
		take.Deadline = time.Now().Add(most)
		free.Deadline = take.Deadline
	}
	first, second := &sent{told: take}, &sent{told: free}
	switch rand.N(3) {
	case 0: // together
		l.Submit(take.Step, free.Step)
		wait(first)
		wait(second)
		return []*sent{first, second}
	case 1: // one behind the other
		l.Submit(take.Step)
		l.Submit(free.Step)
		wait(first)
		wait(second)
		return []*sent{first, second}
	default:
		l.Carry(ctx, take.Step)
		wait(first)
		return []*sent{first}
	}
}

// goroutines returns the stacks of all goroutines if one is a line's.
func goroutines() string {
	stacks := make([]byte, 1<<20)
	text := string(stacks[:runtime.Stack(stacks, true)])
	for _, of := range []string{"rediswire.(*Line)", "rediswire.(*wire)", "rediswire.(*netConn)"} {
		if strings.Contains(text, of) {
			return text
		}
	}
	return ""
}

// Whatever becomes of the connections, each step is carried out at most once and as its end says, in the order of their
// submission on an ordered line; all owners are notified once, and nothing stays behind.
func TestLineUnderFaults(t *testing.T) { // not parallel: it looks for goroutines
	testtier.NotShort(t)
	opts := []containers.Option{}
	if _, err := exec.LookPath("redis-server"); err == nil {
		opts = append(opts, containers.AsProcess())
	}
	server := containers.Redis(t, opts...)
	admin := goredis.NewClient(&goredis.Options{Addr: server.Addr(), ClientName: "stays"})
	defer admin.Close()
	m := newMonitor(t, server.Addr(), admin)
	var all ends
	rounds := testtier.Rounds(4, 120)
	for i := 0; i < rounds || i < 10*rounds && !all.every(); i++ { // until each end has occurred
		ordered, cuts := i%2 == 0, i/2%2 == 0
		t.Run(fmt.Sprintf("%d, ordered %v, cuts %v", i, ordered, cuts), func(t *testing.T) {
			m.t = t
			all.add(underFaults(t, m, server.Addr(), ordered, cuts))
		})
	}
	if !all.every() {
		t.Errorf("some faults made no difference: %+v", all)
	}
}

// ends counts how steps have ended.
type ends struct{ answered, unsent, unknown, dropped int }

func (e *ends) every() bool { return e.answered > 0 && e.unsent > 0 && e.unknown > 0 && e.dropped > 0 }

func (e *ends) add(more ends) {
	e.answered += more.answered
	e.unsent += more.unsent
	e.unknown += more.unknown
	e.dropped += more.dropped
}

func underFaults(t *testing.T, m *monitor, addr string, ordered, cuts bool) (all ends) {
	link, err := fault.NewProxy(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	l := NewLine(Options{
		Clock: backend.SystemClock(), Channels: "p:push:", Ordered: ordered, Report: func(*redisconn.Failure) {},
		Connect: func() (*Conn, error) {
			return Connect(goredis.Options{Network: "tcp", Addr: link.Addr(), Dialer: new(net.Dialer).DialContext})
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var work sync.WaitGroup
	work.Go(func() { faults(ctx, t, l, link, m.admin, cuts) })
	calls := make([][]*sent, 24)
	for i := range calls {
		work.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				calls[i] = append(calls[i], hold(l, fmt.Sprint(i, "-", n))...)
				if rand.N(20) == 0 {
					time.Sleep(rand.N(20 * time.Millisecond)) // so that connections rest
				}
			}
		})
	}
	work.Wait()
	select {
	case <-l.Close():
	case <-time.After(time.Minute):
		t.Fatal("the line does not end")
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		stays := goroutines()
		if link.Conns() == 0 && stays == "" {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%d connections stay, and goroutines:\n%s", link.Conns(), stays)
		}
	}
	m.read()
	for _, of := range calls {
		for _, o := range of {
			r := m.of(o.Keys.Lock)
			n := r.sets
			if o.Code == redisscript.Free {
				n = r.frees
			}
			least, most := 0, 1
			switch {
			case o.dropped:
				all.dropped++
				most = 0
			case o.times.Load() == 0:
				t.Errorf("the owner of %s %s is never notified", o.Code, o.Keys.Lock)
				continue
			case o.Err == nil:
				all.answered++
				least = 1
				if o.Code == redisscript.Set && o.Answer != redisscript.TakeGranted {
					t.Errorf("%s was answered %v", o.Keys.Lock, o.Answer)
				}
			case !o.Err.Sent:
				all.unsent++
				most = 0
			default:
				all.unknown++
			}
			if n < least || n > most {
				t.Errorf("%s %s ended with %v, %+v, dropped %v, and was carried out %d times", o.Code, o.Keys.Lock,
					o.Answer, o.Err, o.dropped, n)
			}
			if times := o.times.Load(); times > 1 || o.dropped && times > 0 {
				t.Errorf("the owner of %s %s, dropped %v, is notified %d times", o.Code, o.Keys.Lock, o.dropped, times)
			}
			if ordered && !cuts && r.frees > 0 && r.setAt > r.freeAt {
				t.Errorf("%s was set behind its release", o.Keys.Lock)
			}
		}
	}
	t.Logf("%+v", all)
	clear(m.names)
	if err := m.admin.FlushAll(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	return all
}
