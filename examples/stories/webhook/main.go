// Command webhook books a payment once, although its provider delivers the news of it twice, to two replicas, at one
// time.
//
//	go run ./examples/stories/webhook
//	go run ./examples/stories/webhook -unsafe
//
// Tier: correctness. Money booked twice is wrong. Providers deliver at least once: a replica that answers late
// gets a second request, or another replica does. A replica looks whether the payment is booked, asks the provider for
// the amount, and books. The lock keeps the other delivery out meanwhile. It does not wait: the answer 503 makes the
// provider come back, and by then the payment is booked. Look and booking check the token (package sqlguard), so that a
// replica that was paused for longer than its lease cannot book after another. A table with one row for each payment
// does not need this: its unique key is a guard, and the lock only spares work (efficiency). A ledger has several rows
// for each.
//
// With -unsafe there is no lock. Both replicas find no booking, and both book.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

const payment = "pay-77"

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	p := &provider{story: s, client: s.HTTPClient()}
	db, err := open(ctx, s, p)
	if err != nil {
		return err
	}
	s.Tell("ann pays 50; the provider tells replica 0")
	if err := p.deliver(ctx, 0); err != nil { // and, since the answer takes its time, replica 1
		return err
	}
	if err := p.deliver(ctx, 1); err != nil {
		return err
	}
	var booked int
	if err := db.QueryRowContext(
		ctx, `SELECT sum(amount) FROM ledger WHERE account = 'ann'`,
	).Scan(&booked); err != nil {
		return err
	}
	if s.Unsafe {
		s.Tell("ann has %d: both replicas found nothing booked, and both booked", booked)
	} else {
		s.Tell("ann has %d", booked)
	}
	if (booked == 50) == s.Unsafe {
		return fmt.Errorf("ann has %d with -unsafe=%t", booked, s.Unsafe)
	}
	return nil
}

// replica is one of the servers of the webhook.
type replica struct {
	locks    *fencelock.Client
	db       *sql.DB
	guard    *sqlguard.Guard // nil: nobody checks
	provider *provider
}

// ServeHTTP answers 200 only for a booked payment. After any other answer the provider retries.
func (r *replica) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	answer, err := r.handle(req.Context(), req.PostFormValue("payment"))
	switch {
	case errors.Is(err, fencelock.ErrHeld):
		w.Header().Set("Retry-After", "1")
		http.Error(w, "another replica is on it", http.StatusServiceUnavailable)
	case errors.Is(err, fencelock.ErrInvalidName):
		http.Error(w, "no such payment", http.StatusBadRequest)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		fmt.Fprintln(w, answer)
	}
}

func (r *replica) handle(ctx context.Context, payment string) (answer string, err error) {
	if r.guard == nil {
		return r.book(ctx, payment, fencing.Claim{})
	}
	lease, err := r.locks.TryAcquire(ctx, "payments/"+payment)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, lease.Release(ctx)) }()
	return r.book(lease.Context(), payment, lease.Claim("payments/"+payment))
}

// book enters a payment in the ledger, in two rows, unless it is there.
func (r *replica) book(ctx context.Context, payment string, claim fencing.Claim) (answer string, err error) {
	var booked bool
	err = story.Guarded(ctx, r.db, r.guard, claim, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, `SELECT count(*) > 0 FROM ledger WHERE payment = ?`, payment).Scan(&booked)
	})
	if err != nil || booked {
		return "was booked before", err
	}
	amount, err := r.provider.amount(ctx)
	if err != nil {
		return "", err
	}
	return "booked", story.Guarded(ctx, r.db, r.guard, claim, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO ledger VALUES ($1, 'ann', $2), ($1, 'provider', -$2)`,
			payment, amount)
		return err
	})
}

// provider has taken the payment, and wants the shop to know.
type provider struct {
	story  *story.Story
	client *http.Client
	hooks  []string // the URLs of the replicas
	asked  atomic.Int32
}
