package fencing_test

import (
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

func TestNonceText(t *testing.T) {
	n := fencing.NewNonce()
	if got, err := fencing.ParseNonce(n.String()); err != nil || got != n {
		t.Errorf("ParseNonce(%q) = %v, %v, want the same nonce", n, got, err)
	}
	if got, err := fencing.ParseNonce(fencing.Nonce{}.String()); err != nil || got != (fencing.Nonce{}) {
		t.Errorf("ParseNonce of the zero nonce's text = %v, %v, want the zero nonce", got, err)
	}
	for _, s := range []string{
		"0", strings.Repeat("0", 32), strings.Repeat("a", 31), strings.Repeat("a", 33), strings.Repeat("A", 32),
		strings.Repeat("g", 32), " " + n.String(),
	} {
		if got, err := fencing.ParseNonce(s); err == nil {
			t.Errorf("ParseNonce(%q) = %v, want an error", s, got)
		}
	}
}

func TestGenerationText(t *testing.T) {
	for _, g := range []fencing.Generation{{}, {Number: 1, ID: fencing.NewNonce()}, {Number: 1<<63 - 1, ID: fencing.NewNonce()}} {
		if got, err := fencing.ParseGeneration(g.String()); err != nil || got != g {
			t.Errorf("ParseGeneration(%q) = %v, %v, want the same generation", g, got, err)
		}
	}
	id := fencing.NewNonce().String()
	for _, s := range []string{"", "1", "1.", "0." + id, "01." + id, "+1." + id, "-1." + id, "9223372036854775808." + id, "1." + id + "."} {
		if got, err := fencing.ParseGeneration(s); err == nil {
			t.Errorf("ParseGeneration(%q) = %v, want an error", s, got)
		}
	}
}

func TestGenerationCompare(t *testing.T) {
	a, b := fencing.NewNonce(), fencing.NewNonce()
	tests := []struct {
		name    string
		x, y    fencing.Generation
		want    int
		ordered bool
	}{
		{"both zero", fencing.Generation{}, fencing.Generation{}, 0, true},
		{"zero is the earliest", fencing.Generation{}, fencing.Generation{Number: 1, ID: a}, -1, true},
		{"greater number", fencing.Generation{Number: 2, ID: a}, fencing.Generation{Number: 1, ID: b}, 1, true},
		{"same restore", fencing.Generation{Number: 2, ID: a}, fencing.Generation{Number: 2, ID: a}, 0, true},
		{"two restores", fencing.Generation{Number: 2, ID: a}, fencing.Generation{Number: 2, ID: b}, 0, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got, ordered := test.x.Compare(test.y); got != test.want || ordered != test.ordered {
				t.Errorf("Compare = %d, %v, want %d, %v", got, ordered, test.want, test.ordered)
			}
		})
	}
}
