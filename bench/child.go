package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// childEnv makes a process of this program a child: a part, separated by newlines.
const childEnv = "FENCELOCK_BENCH_CHILD"

// part is what a child plays: system, peer, addresses, TTL, lock name, and how many waiters it is: none is a holder.
type part [6]string

// child is a process that holds or waits until it is killed.
type child struct {
	cmd *exec.Cmd
	in  io.Closer // its end tells the child that this process has gone
}

// startChild returns when the child holds, or waits.
func startChild(p part) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(p[:], "\n"))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	c := &child{cmd, in}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		c.end()
		return nil, fmt.Errorf("the child is not ready: %q, %w", line, err)
	}
	return c, nil
}

// end kills the child. It may be called again.
func (c *child) end() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	_ = c.in.Close()
}

// beChild is the life of a child: it acquires or waits, says so, and goes on until it is killed or its parent has gone.
func beChild(text string) error {
	fields := strings.Split(text, "\n")
	if len(fields) != len(part{}) {
		return fmt.Errorf("%s is %q", childEnv, text)
	}
	var s system = &redisSystem{}
	switch fields[0] {
	case "redis-cluster":
		c := &redisCluster{}
		for addr := range strings.SplitSeq(fields[2], ",") {
			c.redisSystems = append(c.redisSystems, &redisSystem{address: addr})
		}
		s = c
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
	waiters, err := strconv.Atoi(fields[5])
	if err != nil {
		return err
	}
	for _, p := range s.peers() {
		if p.name == fields[1] {
			return play(p, clientOptions{addr: fields[2], ttl: ttl}, fields[4], waiters)
		}
	}
	return fmt.Errorf("no peer %q", fields[1])
}

func play(p peer, o clientOptions, name string, waiters int) error {
	c, err := p.open(o)
	if err != nil {
		return err
	}
	if waiters == 0 {
		_, err = c.lock(context.Background(), name)
	}
	for range waiters {
		go func() { _, _ = c.lock(context.Background(), name) }() // it is killed before
	}
	if err != nil {
		return err
	}
	if waiters > 0 {
		time.Sleep(time.Second) // until all stand in the queue
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
