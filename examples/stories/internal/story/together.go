package story

import (
	"errors"
	"sync"
)

// Together calls f for 0 to n-1, all at once, and joins their errors. Each may call meet, which returns when all
// have called it or have returned: so they meet in the worst moment, for any scheduling.
func Together(n int, f func(i int, meet func()) error) error {
	var all, start sync.WaitGroup
	start.Add(n)
	errs := make([]error, n)
	for i := range n {
		all.Go(func() {
			arrive := sync.OnceFunc(start.Done)
			defer arrive()
			errs[i] = f(i, func() {
				arrive()
				start.Wait()
			})
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
