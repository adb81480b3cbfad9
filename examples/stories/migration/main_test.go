package main

import (
	"crypto/rand"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

const migrated = "found version 0, left version 3"

func TestOneReplicaMigrates(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			text := storytest.Tell(t, o, tell)
			if strings.Count(text, migrated) != 1 ||
				strings.Count(text, "found version 3, left version 3") != replicas-1 {
				t.Errorf("not one replica migrated, and the others waited:\n%s", text)
			}
			if price := storytest.Query(t, o, `SELECT price FROM products`); price != 2000 {
				t.Errorf("the price is %d; want 2000", price)
			}
		})
	}
}

func TestUnsafeMigratesOverAndOver(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	if text := storytest.Tell(t, o, tell); strings.Count(text, migrated) != replicas {
		t.Errorf("not every replica migrated:\n%s", text)
	}
	if price := storytest.Query(t, o, `SELECT price FROM products`); price != 20_0000_0000 {
		t.Errorf("the price is %d; want 20 times 100, %d times", price, replicas)
	}
}
