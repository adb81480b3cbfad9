package grpcguard

import (
	"errors"
	"net/url"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/refusal"
)

// Domain is the one of every ErrorInfo. The reasons are STALE_TOKEN, NO_TOKEN, NOT_EXCLUSIVE, ANOTHER_SPACE,
// ANOTHER_HOLD, REPEATED_WRITE and REORDERED_WRITE.
const Domain = "fencelock"

var reasons = map[refusal.Kind]string{
	refusal.Stale:        "STALE_TOKEN",
	refusal.NoToken:      "NO_TOKEN",
	refusal.NotExclusive: "NOT_EXCLUSIVE",
	refusal.Space:        "ANOTHER_SPACE",
	refusal.Hold:         "ANOTHER_HOLD",
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
	told := map[string]string{
		"resource": r.Resource, "token": r.Token.String(), "highest": r.Highest.String(), "space": r.Space,
		"want": r.Want, "sequence": strconv.FormatUint(r.Sequence, 10), "last": strconv.FormatUint(r.Last, 10),
		"generation": r.Generation.String(), "highest_generation": r.HighestGeneration.String(),
		"nonce": r.Nonce.String(), "want_nonce": r.WantNonce.String(), "mixed": mixedText(r.Mixed),
	}
	s, failed := status.New(codes.FailedPrecondition, r.Err().Error()).WithDetails(
		&errdetails.ErrorInfo{Reason: reasons[r.Kind], Domain: Domain, Metadata: told})
	if failed != nil { // text that is not UTF-8: a claim that was not validated
		return status.Error(codes.FailedPrecondition, "fencing: refused")
	}
	return s.Err()
}

// mixedText joins resources by commas, percent-encoded.
func mixedText(resources []string) string {
	encoded := make([]string, len(resources))
	for i, each := range resources {
		encoded[i] = url.PathEscape(each)
	}
	return strings.Join(encoded, ",")
}

// parseMixed reads the text of mixedText. A text that cannot be read counts as one name: an empty list would mean that
// the write is repeated.
func parseMixed(text string) []string {
	if text == "" {
		return nil
	}
	resources := strings.Split(text, ",")
	for i, each := range resources {
		if plain, err := url.PathUnescape(each); err == nil {
			resources[i] = plain
		}
	}
	return resources
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
		sequence, _ := strconv.ParseUint(md["sequence"], 10, 64) // zero if the status has none
		last, _ := strconv.ParseUint(md["last"], 10, 64)
		for kind, reason := range reasons {
			if reason == info.GetReason() {
				r := refusal.Refusal{
					Kind: kind, Resource: md["resource"], Token: token, Highest: highest, Space: md["space"],
					Want: md["want"], Sequence: sequence, Last: last, Mixed: parseMixed(md["mixed"]),
				}
				r.ReadHold(md["generation"], md["highest_generation"], md["nonce"], md["want_nonce"])
				return &refused{r.Err(), s}
			}
		}
	}
	return err
}
