package main

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock"
)

// node is one replica.
type node struct {
	name  string
	locks *fencelock.Client

	cancel context.CancelFunc
	left   chan struct{} // closed when the node stands no more
	err    error         // why, once left is closed
}

// term belongs to a leader: a context that ends before another can lead, and the lease, with a token that is the term.
type term struct {
	ctx   context.Context
	lease *fencelock.Lease
}

// stand stands for election, and returns when the node leads. It leads, and stands anew after a loss, until leave.
func (n *node) stand(ctx context.Context, opts ...fencelock.AcquireOption) (*term, error) {
	ctx, n.cancel = context.WithCancel(ctx)
	n.left = make(chan struct{})
	leads := make(chan *term)
	go func() {
		defer close(n.left)
		n.err = n.locks.Lead(ctx, scheduler, func(leading context.Context, lease *fencelock.Lease) error {
			select {
			case leads <- &term{leading, lease}:
				<-ctx.Done() // a leader that hangs does not look at leading
			case <-ctx.Done():
			}
			return nil
		}, opts...)
	}()
	select {
	case t := <-leads:
		return t, nil
	case <-n.left:
		return nil, fmt.Errorf("%s: %w", n.name, n.err)
	}
}

// leave resigns, and returns when the lock is released. It may be called repeatedly, and by a node that never stood.
func (n *node) leave() {
	if n.cancel != nil {
		n.cancel()
		<-n.left
	}
}
