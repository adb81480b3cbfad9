// Package grpcguard carries tokens over gRPC: client interceptors put a hold's token into the metadata of each call,
// and server interceptors show it to a guard before the handler runs.
//
//	// the holder
//	conn, err := grpc.NewClient(target,
//		grpc.WithUnaryInterceptor(grpcguard.UnaryClient()), grpc.WithStreamInterceptor(grpcguard.StreamClient()), …)
//	ctx = fencing.NewOutgoingContext(ctx, lease.Claim("accounts/42"))
//	_, err = accounts.Debit(ctx, request) // errors.Is(err, fencing.ErrStale): another client holds the lock
//
//	// the service
//	server := grpc.NewServer(
//		grpc.ChainUnaryInterceptor(grpcguard.UnaryServer(guard, resource)),
//		grpc.ChainStreamInterceptor(grpcguard.StreamServer(guard, resource)))
//
// The claims are in fencing-claim, in the form of the header of package httpguard. The status of a refusal is
// FailedPrecondition, with an ErrorInfo of the domain "fencelock" that contains both tokens. The metadata are no secret
// and no proof: a client that may call the service may send any token.
//
// A check in the interceptor ends before the handler writes, and in between another holder may write. A stream is
// checked only at its start. Where that matters, give the interceptors no guard. They then only put the claim into
// the call's context, the handler checks it in the transaction in which it writes, and answers with Status:
//
//	claims, _ := fencing.FromIncomingContext(ctx) // none: the guard refuses
//	if err := guard.Tx(ctx, claims, write); err != nil {
//		return nil, grpcguard.Status(err)
//	}
package grpcguard
