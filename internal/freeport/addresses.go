package freeport

import "testing"

// Addresses returns n addresses of the loopback interface that stay reserved until the test ends, for servers that the
// test starts, stops and starts again.
func Addresses(t testing.TB, n int) []string {
	t.Helper()
	all := make([]string, n)
	for i := range all {
		p, err := Reserve()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		p.Lend()
		all[i] = p.Addr()
	}
	return all
}
