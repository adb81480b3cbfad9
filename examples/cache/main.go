// Command cache rebuilds a page that has left the cache on one of all readers. Without the lock service each reader
// rebuilds it.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/redis"          // redis://: the driver of your lock service
)

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as redis://127.0.0.1:6379")
	flag.Parse()
	ctx := context.Background()
	locks, err := fencelock.Open(ctx, *url, fencelock.Efficiency, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	var readers sync.WaitGroup
	for range 5 {
		readers.Go(func() { fmt.Println(page(ctx, locks, "front")) })
	}
	readers.Wait()
}

var cached sync.Map // stands for the cache that all replicas share

// page returns a page from the cache, or builds it.
func page(ctx context.Context, locks *fencelock.Client, name string) string {
	if text, ok := cached.Load(name); ok {
		return text.(string)
	}
	var text string
	err := locks.Do(ctx, "pages/"+name, func(context.Context, *fencelock.Lease) error {
		if built, ok := cached.Load(name); ok { // by the holder before
			text = built.(string)
			return nil
		}
		text = build(name)
		return nil
	}, fencelock.WaitAtMost(10*time.Second)) // longer than a build takes
	if err != nil && text == "" { // the lock saves work and decides nothing
		text = build(name)
	}
	return text
}

func build(name string) string {
	text := "page " + name + ", built at " + time.Now().Format(time.StampMicro)
	cached.Store(name, text)
	return text
}
