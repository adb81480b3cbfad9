package gateway

import (
	"bytes"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

// A lock token stays valid while its key is one of the keys, and request ids stay the same. A removed key opens no
// token.
func TestKeysChange(t *testing.T) {
	t.Parallel()
	first, second := bytes.Repeat([]byte{1}, MinKeyBytes), bytes.Repeat([]byte{2}, MinKeyBytes)
	sealer := func(keys ...[]byte) *Sealer {
		t.Helper()
		s, err := NewSealer(first, keys...)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	opens := func(s *Sealer, token string, want bool) {
		t.Helper()
		if g, _, _, err := s.Open(token); (err == nil) != want || want && g.Name != "x" {
			t.Errorf("opened %+v, %v; want it opened: %v", g, err, want)
		}
	}
	grant := &backend.Grant{Name: "x", Owner: "a", RequestID: "r"}
	old, both, last := sealer(), sealer(second, first), sealer(second)
	before, after := old.Seal(grant, 0, ""), both.Seal(grant, 0, "")
	opens(both, before, true)
	opens(both, after, true)
	opens(old, after, false)
	opens(last, before, false)
	opens(last, after, true)
	if err := old.SetKeys(first, second); err != nil { // the second key only opens, before any replica seals with it
		t.Fatal(err)
	}
	opens(old, after, true)
	if old.Seal(grant, 0, "") != before {
		t.Error("a key that only opens seals")
	}
	if err := old.SetKeys(second, []byte("short")); err == nil {
		t.Error("a short key is accepted")
	}
	opens(old, before, true) // the keys are as they were
	for _, s := range []*Sealer{both, last} {
		if s.requestID("a", "b") != old.requestID("a", "b") {
			t.Error("the id of a request has changed with the key")
		}
	}
}
