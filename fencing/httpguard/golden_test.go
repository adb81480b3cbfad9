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
	var b strings.Builder
	h := http.Header{}
	httpguard.SetHeader(h, fencing.Set{
		{Token: 33},
		{Resource: "/accounts/42", Token: 33, Space: "etcd-d1cfaf99", Sequence: 7},
		{Resource: "a,b;c é", Token: fencing.Token(9).NotExclusive(), Space: "a=b%"},
	})
	for _, value := range h.Values(httpguard.Header) {
		fmt.Fprintf(&b, "%s: %s\n", httpguard.Header, value)
	}
	for _, err := range []error{
		&fencing.StaleError{Resource: "/accounts/42", Token: 33, Highest: 34},
		&fencing.NoTokenError{Resource: "/accounts/42", Highest: 34},
		&fencing.NotExclusiveError{Resource: "/accounts/42", Token: fencing.Token(9).NotExclusive(), Highest: 34},
		&fencing.SpaceError{Resource: "/accounts/42", Token: 33, Highest: 34, Space: "etcd-2", Want: "etcd-1"},
		&fencing.SequenceError{Resource: "/accounts/42", Token: 33, Sequence: 7, Last: 7},
		&fencing.SequenceError{Resource: "/accounts/42", Token: 33, Sequence: 6, Last: 7},
	} {
		w := httptest.NewRecorder()
		if !httpguard.Refuse(w, err) {
			t.Errorf("%v is no refusal", err)
		}
		fmt.Fprintf(&b, "\n%d %s\n%s\n", w.Code, w.Header().Get("Content-Type"), w.Body)
	}
	golden.Compare(t, "http.txt", b.String())
}
