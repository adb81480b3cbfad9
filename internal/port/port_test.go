package port

import (
	"net"
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
		t.Fatalf("the port was not given back: %v", err)
	}
	l.Close()
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
