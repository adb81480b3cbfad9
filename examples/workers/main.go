// Command workers converts the files of a list, each on one of several workers that share the list.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"

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
	if err := work(ctx, locks, []string{"a.raw", "b.raw", "c.raw"}); err != nil {
		log.Print(err)
	}
}

// work converts every file: free ones first, then the files that other workers had, in case a worker died.
func work(ctx context.Context, locks *fencelock.Client, files []string) error {
	var later []string
	for _, file := range files {
		lease, err := locks.TryAcquire(ctx, "files/"+file)
		if errors.Is(err, fencelock.ErrHeld) {
			later = append(later, file)
			continue
		}
		if err != nil {
			return err
		}
		if err := errors.Join(convert(lease.Context(), file), lease.Release(ctx)); err != nil {
			return err
		}
	}
	for _, file := range later {
		err := locks.Do(ctx, "files/"+file, func(ctx context.Context, _ *fencelock.Lease) error {
			return convert(ctx, file)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// convert returns at once if the result is there: the last holder of the lock may have written it.
func convert(ctx context.Context, file string) error {
	fmt.Println("converted", file)
	return ctx.Err()
}
