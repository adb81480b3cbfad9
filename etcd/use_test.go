package etcd

import (
	"testing"

	"github.com/fencelock/fencelock/backend"
)

func exclusively() use              { return use{Kind: backend.KindExclusive} }
func sharing() use                  { return use{Kind: backend.KindShared} }
func taking(permits, limit int) use { return use{backend.KindPermits, permits, limit} }

func TestClaimIsReadBackFromItsKey(t *testing.T) {
	t.Parallel()
	for _, c := range []use{exclusively(), sharing(), taking(1, 1), taking(2, 8), taking(8, 8), taking(1, 1<<40)} {
		if got := useOf(c.part()); got != c {
			t.Errorf("%+v became %+v", c, got)
		}
	}
	// Any other text is read as the exclusive use, which excludes all others.
	for _, part := range []string{
		"+permits/8/9/", "+permits/8/0/", "+permits/08/1/", "+permits/8/+1/", "+permits/8/",
		"+permits//1/", "+permits/8/1/2/", "+permits/99999999999999999999/1/", "+shared/x/", "+later/", "x/",
	} {
		if got := useOf(part); got != exclusively() {
			t.Errorf("%q is read as %+v", part, got)
		}
	}
}
