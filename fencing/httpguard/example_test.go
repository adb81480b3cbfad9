package httpguard_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
)

// A service refuses the request of a holder that was overtaken; the holder gets a typed error.
func Example() {
	debit := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	service := httptest.NewServer(httpguard.Middleware(new(fencing.Memory), httpguard.Segments(2))(debit))
	defer service.Close()

	client := &http.Client{Transport: &httpguard.Transport{Base: &http.Transport{}}}
	defer client.CloseIdleConnections()
	post := func(token fencing.Token) error {
		ctx := fencing.NewOutgoingContext(context.Background(), fencing.Claim{Token: token}) // lease.Token()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, service.URL+"/accounts/42/debit", nil)
		if err != nil {
			log.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return httpguard.ErrorFrom(resp)
	}
	fmt.Println(post(33)) // holder A writes
	fmt.Println(post(34)) // A was paused, B holds the lock now
	fmt.Println(post(33)) // A wakes up
	// Output:
	// <nil>
	// <nil>
	// fencing: token 33 for "/accounts/42" is stale: 34 was admitted before
}
