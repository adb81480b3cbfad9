package main

import (
	"crypto/rand"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

func TestTheFormerLifeIsRefused(t *testing.T) {
	for name, backend := range map[string]func(*testing.T) string{
		"builtin":   func(*testing.T) string { return "" },
		"memory":    func(*testing.T) string { return "memory://" + rand.Text() },
		"etcd":      func(t *testing.T) string { return "etcd://" + containers.Etcd(t).Addr() },
		"zookeeper": func(t *testing.T) string { return "zk://" + containers.ZooKeeper(t).Addr() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out := storytest.Tell(t, &story.Options{Backend: backend(t)}, tell)
			storytest.ExpectInOrder(t, out, "SameRequest: true", "the total is 10", "is stale", "the total is 10")
		})
	}
}

func TestUnsafeWritesTwice(t *testing.T) {
	t.Parallel()
	out := storytest.Tell(t, &story.Options{Unsafe: true}, tell)
	storytest.ExpectInOrder(t, out, "the total is 10", "the total is 20")
}
