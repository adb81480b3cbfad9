package freeport

import (
	"context"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
)

func TestPortListensAgainAndAgain(t *testing.T) {
	p, err := Reserve()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for range 3 {
		l, err := p.Listen()
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", p.Addr())
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		l.Close()
	}
	p.Close()
	p.Close()
	l, err := net.Listen("tcp", p.Addr())
	if err != nil {
		t.Fatalf("the port was not released: %v", err)
	}
	l.Close()
}

// Also while the process starts others, which have copies of all descriptors until their programs begin.
func TestPortListensAgainBesideChildren(t *testing.T) {
	p, err := Reserve()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var starting sync.WaitGroup
	defer starting.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 4 {
		starting.Go(func() {
			for ctx.Err() == nil {
				_ = exec.CommandContext(ctx, os.Args[0], "-test.run=^$").Run() // at the end it is killed
			}
		})
	}
	for i := range 2000 {
		l, err := p.Listen()
		if err != nil {
			t.Fatalf("after %d times: %v", i, err)
		}
		l.Close()
	}
}

func TestPortsDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 200 {
		p, err := Reserve()
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if seen[p.Addr()] {
			t.Fatalf("%s was reserved twice", p.Addr())
		}
		seen[p.Addr()] = true
	}
}
