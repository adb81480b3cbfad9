package soak

import (
	"strings"
	"testing"
)

// The checker finds each kind of violation, and nothing in a history without any.
func TestVerdict(t *testing.T) {
	t.Parallel()
	const right = "10 want a x\n20 got a x 3\n25 want b x\n30 end a x 3\n35 want a y\n40 got b x 5\n42 got a y 4\n" +
		"50 end a y 4\n60 dead b\n70 want a x\n80 got a x 7\n"
	for _, c := range []struct{ events, register, want string }{
		{right, "3 1\n5 2\n5 3\n7 4\n", ""},
		{strings.Replace(right, "30 end", "45 end", 1), "", "x: tokens 3 and 5 were held at one time, for 5 ns"},
		{strings.Replace(right, "60 dead b\n", "", 1), "", "x: tokens 5 and 7 were held at one time, for"},
		{strings.Replace(right, "x 7", "x 5", 1), "", "token 5 was issued for x and for x"},
		{strings.Replace(right, "x 7", "x 2", 1), "", "x: token 2 came after token 5"},
		{right, "3 1\n5 3\n", "x: token 5 wrote 3 after 1"},
		{right, "3 1\n5 1\n", "x: token 5 wrote 1 after 1"},
		{right, "5 1\n3 2\n", "x: token 3 wrote after token 5"},
		{right, "4 1\n", "x: token 4 wrote, and nobody got it"},
		{right, "three 1\n", `"three 1"`},
		{"10 got a x 3\n", "", "makes no sense"},
		{"10 want a x\n20 got a x 3\n30 end a x 4\n", "", "makes no sense"},
	} {
		var h history
		var found []string
		err := h.read(strings.NewReader(c.events))
		if err == nil {
			found = h.violations()
			var more []string
			more, err = h.register("x", strings.NewReader(c.register))
			found = append(found, more...)
		}
		if err != nil {
			found = append(found, err.Error())
		}
		if got := strings.Join(found, "; "); c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("found %q, want %q in\n%s%s", got, c.want, c.events, c.register)
		}
	}
}
