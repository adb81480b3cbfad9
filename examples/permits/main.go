// Command permits lets at most eight tasks of all processes use a resource at the same time.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"sync"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/redis"          // redis://: the driver of your lock service
)

const limit = 8 // the same in every process

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as redis://127.0.0.1:6379")
	flag.Parse()
	ctx := context.Background()
	locks, err := fencelock.Open(ctx, *url, fencelock.Efficiency, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	var all sync.WaitGroup
	for task := range 20 {
		all.Go(func() {
			if err := render(ctx, locks, task); err != nil {
				log.Print(err)
			}
		})
	}
	all.Wait()
}

// render waits for one of the permits and renders. A process that dies returns its permits after their TTL.
func render(ctx context.Context, locks *fencelock.Client, task int) error {
	return locks.Do(ctx, "gpu-pool", func(ctx context.Context, _ *fencelock.Lease) error {
		fmt.Println("rendering", task)
		return ctx.Err() // ctx ends if the permit is lost
	}, fencelock.Permits(1, limit))
}
