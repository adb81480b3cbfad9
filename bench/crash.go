package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"
)

// crash kills the holder's process while another process waits.
func crash() scenario {
	soon := []target{atMost("beyond-ms", 300, "ms beyond one TTL after the kill, worst")}
	return scenario{
		name:    "crash",
		about:   "the holder's process is killed (SIGKILL) while it holds, TTL 3 s: seconds to the next grant",
		columns: columns("grant-s=grant s, min<; grant-s=median; grant-s=max>; beyond-ms=beyond TTL ms, worst>"),
		targets: map[string][]target{"redis": soon, "etcd": soon, "builtin": soon},
		rounds:  5, quickRounds: 2,
		suits: func(s system, p peer) bool { return p.contends() && s.addr() != "" },
		all:   together(runCrash),
	}
}

// holderEnv makes a process of this program a holder: system, peer, address, TTL and lock name, separated by newlines.
const holderEnv = "FENCELOCK_BENCH_HOLDER"

func runCrash(ctx context.Context, l *lab, p peer) (sample, error) {
	name, ttl := l.fresh("crash"), l.ttl()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	holder := exec.Command(self)
	holder.Env = append(os.Environ(), holderEnv+"="+strings.Join([]string{l.system.name(), p.name, l.at(p).addr(), ttl.String(), name}, "\n"))
	holder.Stderr = os.Stderr
	in, err := holder.StdinPipe() // its end tells the holder that this process has gone
	if err != nil {
		return nil, err
	}
	defer in.Close()
	out, err := holder.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := holder.Start(); err != nil {
		return nil, err
	}
	defer holder.Wait()
	defer holder.Process.Kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "held\n" {
		return nil, fmt.Errorf("the holder did not hold: %q, %w", line, err)
	}

	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: ttl})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	granted := granting(ctx, clients[0], name)
	sleep(ctx, ttl/6+rand.N(ttl/2))
	killed := time.Now()
	if err := holder.Process.Kill(); err != nil {
		return nil, err
	}
	g := <-granted
	if g.err != nil {
		return nil, g.err
	}
	took := g.at.Sub(killed)
	return sample{"grant-s": took.Seconds(), "beyond-ms": float64((took - ttl).Microseconds()) / 1000}, nil
}

// beHolder is the life of a holder process: it acquires, says so, and holds until it is killed or its parent has gone.
func beHolder(role string) error {
	fields := strings.Split(role, "\n")
	if len(fields) != 5 {
		return fmt.Errorf("%s is %q", holderEnv, role)
	}
	var s system = &redisSystem{}
	switch fields[0] {
	case "etcd":
		s = &etcdSystem{}
	case "zookeeper":
		s = &zooKeeperSystem{}
	case "builtin":
		s = newBuiltin()
	}
	ttl, err := time.ParseDuration(fields[3])
	if err != nil {
		return err
	}
	for _, p := range s.peers() {
		if p.name != fields[1] {
			continue
		}
		c, err := p.open(clientOptions{addr: fields[2], ttl: ttl})
		if err != nil {
			return err
		}
		if _, err := c.lock(context.Background(), fields[4]); err != nil {
			return err
		}
		fmt.Println("held")
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	}
	return fmt.Errorf("no peer %q", fields[1])
}
