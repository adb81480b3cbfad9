package httpguard_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
	"github.com/fencelock/fencelock/fencing/internal/golden"
)

func TestGolden(t *testing.T) {
	var out strings.Builder
	a, b := fencing.Nonce{15: 0xa}, fencing.Nonce{15: 0xb}
	first, second := fencing.Generation{Number: 1, ID: a}, fencing.Generation{Number: 2, ID: a}
	h := http.Header{}
	httpguard.SetHeader(h, fencing.Set{
		{Token: 33},
		{Resource: "/accounts/42", Token: 33, Space: "etcd-d1cfaf99", Sequence: 7},
		{Resource: "a,b;c é", Token: fencing.Token(9).NotExclusive(), Space: "a=b%"},
		{Resource: "/accounts/42", Token: 34, Generation: second, Nonce: b},
	})
	for _, value := range h.Values(httpguard.Header) {
		fmt.Fprintf(&out, "%s: %s\n", httpguard.Header, value)
	}
	for _, err := range []error{
		&fencing.StaleError{Resource: "/accounts/42", Token: 33, Highest: 34},
		&fencing.NoTokenError{Resource: "/accounts/42", Highest: 34},
		&fencing.NotExclusiveError{Resource: "/accounts/42", Token: fencing.Token(9).NotExclusive(), Highest: 34},
		&fencing.SpaceError{Resource: "/accounts/42", Token: 33, Highest: 34, Space: "etcd-2", Want: "etcd-1"},
		&fencing.SequenceError{Resource: "/accounts/42", Token: 33, Sequence: 7, Last: 7},
		&fencing.SequenceError{Resource: "/accounts/42", Token: 33, Sequence: 6, Last: 7},
		&fencing.SequenceError{Resource: "a", Token: 33, Sequence: 7, Last: 7, Mixed: []string{"a", "c"}},
		&fencing.StaleError{
			Resource: "/accounts/42", Token: 35, Highest: 34, Generation: first, HighestGeneration: second,
		},
		&fencing.SpaceError{
			Resource: "/accounts/42", Token: 33, Highest: 34, Space: "etcd-1", Want: "etcd-1",
			Generation: first, WantGeneration: fencing.Generation{Number: 1, ID: b},
		},
		&fencing.HoldError{Resource: "/accounts/42", Token: 34, Nonce: a, Want: b},
	} {
		w := httptest.NewRecorder()
		if !httpguard.Refuse(w, err) {
			t.Errorf("%v is no refusal", err)
		}
		if got := httpguard.ErrorFrom(w.Result()); fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", err) {
			t.Errorf("%#v is read as %#v", err, got)
		}
		fmt.Fprintf(&out, "\n%d %s\n%s\n", w.Code, w.Header().Get("Content-Type"), w.Body)
	}
	golden.Compare(t, "http.txt", out.String())
}
