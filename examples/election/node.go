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

// term is what a leader has: a context that ends before another can lead, and the lease whose token is the term.
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

// leave resigns, and returns when the lock is given back. It may be called again, and by a node that never stood.
func (n *node) leave() {
	if n.cancel != nil {
		n.cancel()
		<-n.left
	}
}
