package grpcguard

import (
	"errors"
	"strconv"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/refusal"
)

// Domain is the one of every ErrorInfo. The reasons are STALE_TOKEN, NO_TOKEN, NOT_EXCLUSIVE, ANOTHER_SPACE,
// REPEATED_WRITE and REORDERED_WRITE.
const Domain = "fencelock"

var reasons = map[refusal.Kind]string{
	refusal.Stale:        "STALE_TOKEN",
	refusal.NoToken:      "NO_TOKEN",
	refusal.NotExclusive: "NOT_EXCLUSIVE",
	refusal.Space:        "ANOTHER_SPACE",
	refusal.Repeated:     "REPEATED_WRITE",
	refusal.Reordered:    "REORDERED_WRITE",
}

// Status returns the status to answer with if err is a guard's: FailedPrecondition for a refusal, InvalidArgument for a
// claim that cannot be understood. Any other error it returns as it is.
func Status(err error) error {
	if errors.Is(err, fencing.ErrInvalid) {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	r, ok := refusal.Of(err)
	if !ok {
		return err
	}
	s, failed := status.New(codes.FailedPrecondition, r.Err().Error()).WithDetails(&errdetails.ErrorInfo{
		Reason: reasons[r.Kind], Domain: Domain, Metadata: map[string]string{
			"resource": r.Resource, "token": r.Token.String(), "highest": r.Highest.String(), "space": r.Space,
			"want":     r.Want,
			"sequence": strconv.FormatUint(r.Sequence, 10), "last": strconv.FormatUint(r.Last, 10),
		},
	})
	if failed != nil { // text that is not UTF-8: a claim that was not validated
		return status.Error(codes.FailedPrecondition, "fencing: refused")
	}
	return s.Err()
}

// refused is a refusal that came as a status. It is both.
type refused struct {
	error  // of package fencing
	status *status.Status
}

func (r *refused) Unwrap() error              { return r.error }
func (r *refused) GRPCStatus() *status.Status { return r.status }

// errorFrom returns err with the refusal that it carries in its chain, or err itself.
func errorFrom(err error) error {
	s, ok := status.FromError(err)
	if err == nil || !ok || s.Code() != codes.FailedPrecondition {
		return err
	}
	for _, detail := range s.Details() {
		info, ok := detail.(*errdetails.ErrorInfo)
		if !ok || info.GetDomain() != Domain {
			continue
		}
		md := info.GetMetadata()
		token, bad := fencing.ParseToken(md["token"])
		highest, badToo := fencing.ParseToken(md["highest"])
		if bad != nil || badToo != nil {
			continue
		}
		sequence, _ := strconv.ParseUint(md["sequence"], 10, 64) // zero if it is not told
		last, _ := strconv.ParseUint(md["last"], 10, 64)
		for kind, reason := range reasons {
			if reason == info.GetReason() {
				return &refused{refusal.Refusal{
					Kind: kind, Resource: md["resource"], Token: token, Highest: highest, Space: md["space"],
					Want:     md["want"],
					Sequence: sequence, Last: last,
				}.Err(), s}
			}
		}
	}
	return err
}
