// Package httpguard carries tokens over HTTP: a transport puts a hold's token into each request, and a middleware shows
// it to a guard before the handler runs.
//
//	// the holder
//	client := &http.Client{Transport: &httpguard.Transport{}}
//	ctx = fencing.NewOutgoingContext(ctx, lease.Claim("/accounts/42"))
//	req, _ := http.NewRequestWithContext(ctx, http.MethodPut, "https://accounts/42", body)
//	resp, err := client.Do(req)
//	…
//	if err := httpguard.ErrorFrom(resp); err != nil {
//		return err // errors.Is(err, fencing.ErrStale): another client holds the lock
//	}
//
//	// the service
//	mux.Handle("/accounts/", httpguard.Middleware(guard, httpguard.Segments(2))(handler))
//
// The claims are in the header Fencing-Claim. The answer to a refused request is 409 and a problem document (RFC 9457)
// with both tokens:
//
//	{"type":"https://github.com/fencelock/fencelock/blob/main/docs/FENCING.md#stale-token",
//	 "title":"Stale fencing token","status":409,"detail":"…","resource":"/accounts/42","token":"33","highest":"34"}
//
// The headers are no secret and no proof: a client that may call the service may send any token.
//
// # Where the check belongs
//
// A check in the middleware ends before the handler writes, and in between another holder may write: it refuses late
// holders, but not a holder overtaken in that moment. Where that matters, give the middleware no guard. It
// then only puts the claim into the request's context, and the handler checks it in the transaction in which it writes:
//
//	claims, _ := fencing.FromIncomingContext(r.Context()) // none: the guard refuses
//	err := guard.Tx(ctx, claims, func(ctx context.Context, tx *sql.Tx) error { … })
//	if httpguard.Refuse(w, err) {
//		return
//	}
package httpguard
