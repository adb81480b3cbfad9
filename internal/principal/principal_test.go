package principal

import "testing"

func TestMayUse(t *testing.T) {
	ann, bob := Certificate("ann"), Certificate("bob")
	for _, x := range []struct {
		p, owner Principal
		may      bool
	}{
		{ann, ann, true}, {ann, bob, false}, {bob, ann, false}, {Nobody, ann, false},
		{ann, Nobody, true}, {Nobody, Nobody, true},
		{Process, ann, true}, {ann, Process, true}, {Nobody, Process, true}, {Process, Nobody, true},
		{Certificate(""), ann, false}, {"token:ann", ann, false},
	} {
		if got := x.p.MayUse(x.owner); got != x.may {
			t.Errorf("%q uses what is %q's: %v", x.p, x.owner, got)
		}
	}
	for p, want := range map[Principal]string{ann: "cert", Process: "process", Nobody: "", Certificate("a:b"): "cert"} {
		if got := p.Kind(); got != want {
			t.Errorf("%q is of kind %q", p, got)
		}
	}
}
