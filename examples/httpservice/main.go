// Command httpservice refuses the HTTP requests of clients that have lost their lock. The service knows no lock
// service: each request carries the fencing token of the client's lease.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/builtin"        // fencelock://: the driver of your lock service
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
)

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as fencelock://127.0.0.1:7480")
	flag.Parse()
	ctx := context.Background()
	// The service: fencing.Memory stands for a guard that survives restarts, such as sqlguard.Guard.
	write := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { fmt.Println("wrote", r.URL.Path) })
	service := httptest.NewServer(httpguard.Middleware(new(fencing.Memory), httpguard.Path)(write))
	defer service.Close()

	// The client.
	locks, err := fencelock.Open(ctx, *url, fencelock.Correctness, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "documents/7", func(ctx context.Context, lease *fencelock.Lease) error {
		return put(ctx, service.URL, lease.Claim("/documents/7"), "milk, eggs")
	})
	if err != nil {
		log.Print(err)
	}
}

var client = &http.Client{Transport: &httpguard.Transport{}} // sends the claim of the request's context

// put writes the document. Its error wraps fencing.ErrStale if a later holder has written.
func put(ctx context.Context, service string, claim fencing.Claim, text string) error {
	ctx = fencing.NewOutgoingContext(ctx, claim)
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, service+claim.Resource, strings.NewReader(text))
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := httpguard.ErrorFrom(resp); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("PUT %s: %s", claim.Resource, resp.Status)
	}
	return nil
}
