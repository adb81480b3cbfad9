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
//		return err // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now
//	}
//
//	// the service
//	mux.Handle("/accounts/", httpguard.Middleware(guard, httpguard.Segments(2))(handler))
//
// The claims are in the header Fencing-Claim. What a guard refuses is answered with 409 and a problem document (RFC
// 9457) that tells both tokens:
//
//	{"type":"https://github.com/fencelock/fencelock/blob/main/docs/FENCING.md#stale-token",
//	 "title":"Stale fencing token","status":409,"detail":"…","resource":"/accounts/42","token":"33","highest":"34"}
//
// The headers are no secret and no proof: whoever may call the service may send any token.
//
// # Where the check belongs
//
// A check in the middleware is over before the handler writes, and in between another holder may write: it catches
// holders who are late, not those who are overtaken just then. Where that matters, give the middleware no guard. It
// then only puts the claim into the request's context, and the handler checks it in the transaction in which it writes:
//
//	claims, _ := fencing.FromIncomingContext(r.Context()) // none: the guard refuses
//	err := guard.Tx(ctx, claims, func(ctx context.Context, tx *sql.Tx) error { … })
//	if httpguard.Refuse(w, err) {
//		return
//	}
package httpguard
