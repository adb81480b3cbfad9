// Command webhook books a payment once, although its provider may deliver the news to several replicas at a time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"sync"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/builtin"        // fencelock://: the driver of your lock service
	"github.com/fencelock/fencelock/fencing"
)

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as fencelock://127.0.0.1:7480")
	flag.Parse()
	ctx := context.Background()
	locks, err := fencelock.Open(ctx, *url, fencelock.Correctness, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	service := httptest.NewServer(&hook{locks: locks, booked: map[string]bool{}}) // your http.Server
	defer service.Close()
	for range 2 { // the provider repeats itself
		resp, err := http.Post(service.URL+"?payment=77", "", nil)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(resp.Status)
		resp.Body.Close()
	}
}

type hook struct {
	locks  *fencelock.Client
	guard  fencing.Memory // stands for the guard of the ledger's database, such as sqlguard.Guard
	mu     sync.Mutex
	booked map[string]bool // stands for the ledger
}

// ServeHTTP answers 200 for a booked payment. After any other answer the provider retries.
func (h *hook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	payment := "payments/" + r.FormValue("payment")
	lease, err := h.locks.TryAcquire(r.Context(), payment)
	if err == nil {
		err = errors.Join(h.book(lease.Context(), lease.Claim(payment)), lease.Release(r.Context()))
	}
	switch {
	case errors.Is(err, fencelock.ErrHeld): // another replica books it now
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// book checks and books in one step, which a holder that was paused for too long cannot make.
func (h *hook) book(ctx context.Context, claim fencing.Claim) error {
	return h.guard.Do(ctx, claim, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if !h.booked[claim.Resource] {
			h.booked[claim.Resource] = true
			fmt.Println("booked", claim.Resource)
		}
		return nil
	})
}
