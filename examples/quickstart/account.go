package main

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/fencing"
)

// account is the data under the lock: data that two writers at once would damage. In earnest it is a row of a database.
type account struct {
	guard fencing.Guard // nil: this store does not ask for tokens

	mu      sync.Mutex // protects the following field, and makes check and write one step
	balance int
}

func (a *account) read() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.balance
}

// write sets the balance, unless the guard knows a later holder of the lock than the one who wrote token on the
// request.
func (a *account) write(ctx context.Context, token fencing.Token, balance int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.guard != nil {
		if err := a.guard.Check(ctx, fencing.Claim{Resource: accountName, Token: token}); err != nil {
			return err
		}
	}
	a.balance = balance
	return nil
}
