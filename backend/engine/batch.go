package engine

import (
	"slices"
	"sync"
	"time"
)

// Batch sends steps together that a service carries out in one exchange, each with its own answer. Two exchanges may
// be in progress before steps wait, so that one or two callers never wait for each other, and more if the service
// allows fewer steps in an exchange. Waiting steps are sent when both are answered, or after batchPatience, in order,
// with one step of each name: services judge all steps of an exchange before they carry out any, so that two steps of
// one name would both find it free.
type Batch[S, A any] struct {
	most int
	send func(steps []S) []A

	mu      sync.Mutex // protects the following fields
	sending int        // exchanges that others wait for
	waiting []*batched[S, A]
	fewer   int // the service's limit, if it is below most
}

type batched[S, A any] struct {
	name   string
	step   S
	answer chan A // has room for one
}

const (
	// batchExchanges bounds the exchanges of the service's most steps that are in progress before steps wait.
	batchExchanges = 2
	// batchPatience is the maximum time that steps wait for an exchange: one endpoint that does not answer delays no
	// step that would go to another one.
	batchPatience = 100 * time.Millisecond
)

// NewBatch returns a batch that calls send with up to most steps. send returns one answer for each, in order, and
// bounds its own time; it may be called by several goroutines.
func NewBatch[S, A any](most int, send func(steps []S) []A) *Batch[S, A] {
	return &Batch[S, A]{most: most, fewer: most, send: send}
}

// Send sends a step, and the answer to the channel that it returns.
func (b *Batch[S, A]) Send(name string, step S) <-chan A {
	own := &batched[S, A]{name: name, step: step, answer: make(chan A, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) == 0 && b.sending < batchExchanges*b.abreast() {
		b.sending++
		go b.exchange([]*batched[S, A]{own})
	} else {
		b.waiting = append(b.waiting, own)
	}
	return own.answer
}

// Limit lowers the number of steps that go together.
func (b *Batch[S, A]) Limit(most int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fewer = max(1, min(b.fewer, most))
}

// exchange sends steps, and lets others go when they are answered or batchPatience has passed.
func (b *Batch[S, A]) exchange(together []*batched[S, A]) {
	arrived := sync.OnceFunc(b.arrived)
	defer time.AfterFunc(batchPatience, arrived).Stop()
	steps := make([]S, len(together))
	for i, one := range together {
		steps[i] = one.step
	}
	answers := b.send(steps)
	for i, one := range together {
		one.answer <- answers[i]
	}
	arrived()
}

// abreast is the number of exchanges that carry the steps which one exchange carries without the service's limit.
// Batch.mu is held.
func (b *Batch[S, A]) abreast() int { return max(1, b.most/b.fewer) }

// arrived sends steps that have waited for the last exchange: the first step of each name.
func (b *Batch[S, A]) arrived() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.sending--; b.sending < b.abreast() && len(b.waiting) > 0; b.sending++ {
		names := map[string]bool{}
		var together []*batched[S, A]
		b.waiting = slices.DeleteFunc(b.waiting, func(one *batched[S, A]) bool {
			if names[one.name] || len(together) == b.fewer {
				return false
			}
			names[one.name] = true
			together = append(together, one)
			return true
		})
		go b.exchange(together)
	}
}
