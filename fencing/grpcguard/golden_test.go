package grpcguard_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/grpcguard"
	"github.com/fencelock/fencelock/fencing/internal/golden"
)

func TestGolden(t *testing.T) {
	var b strings.Builder
	a := fencing.Nonce{15: 0xa}
	first, second := fencing.Generation{Number: 1, ID: a}, fencing.Generation{Number: 2, ID: a}
	fmt.Fprintf(&b, "metadata: %s\n", grpcguard.Key)
	for _, err := range []error{
		&fencing.StaleError{Resource: "accounts/42", Token: 33, Highest: 34},
		&fencing.NoTokenError{Resource: "accounts/42", Highest: 34},
		&fencing.NotExclusiveError{Resource: "accounts/42", Token: fencing.Token(9).NotExclusive(), Highest: 34},
		&fencing.SpaceError{Resource: "accounts/42", Token: 33, Highest: 34, Space: "etcd-2", Want: "etcd-1"},
		&fencing.SequenceError{Resource: "accounts/42", Token: 33, Sequence: 7, Last: 7},
		&fencing.SequenceError{Resource: "accounts/42", Token: 33, Sequence: 6, Last: 7},
		&fencing.SequenceError{Resource: "a", Token: 33, Sequence: 7, Last: 7, Mixed: []string{"a,b", "c"}},
		&fencing.StaleError{Resource: "accounts/42", Token: 35, Highest: 34, Generation: first, HighestGeneration: second},
		&fencing.HoldError{Resource: "accounts/42", Token: 34, Nonce: a},
	} {
		s := status.Convert(grpcguard.Status(err))
		info, _ := s.Details()[0].(*errdetails.ErrorInfo)
		fmt.Fprintf(&b, "\n%v %s %s", s.Code(), info.GetDomain(), info.GetReason())
		for _, key := range []string{"resource", "token", "highest", "space", "want", "sequence", "last", "generation",
			"highest_generation", "nonce", "want_nonce", "mixed"} {
			if value, ok := info.GetMetadata()[key]; ok {
				fmt.Fprintf(&b, " %s=%s", key, value)
			}
		}
	}
	golden.Compare(t, "grpc.txt", b.String()+"\n")
}
