package check

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

func TestReadHistory(t *testing.T) {
	whole := `{"type":"call","at":1,"client":"a","id":1,"op":"try","name":"n"}` + "\n"
	for text, want := range map[string]int{
		strings.Replace(whole, `"n"`, `"n","deadlin":5`, 1): -1,
		"": 0, whole: 1, whole + "\n" + whole: 2, whole + `{"type":"ret`: 1, whole + whole[:len(whole)-1]: 2,
		whole + "x\n" + whole: -1,
	} {
		h, err := ReadHistory(strings.NewReader(text))
		if (err != nil) != (want < 0) || err == nil && len(h.Events) != want {
			t.Errorf("%q: %d events, %v, want %d", text, len(h.Events), err, want)
		}
	}
}

// Other programs write tokens as numbers.
func TestTokensMayBeNumbers(t *testing.T) {
	const text = `{"type":"return","at":9,"client":"a","id":1,"op":"ask","outcome":"ok","token":%s,"seen":[%s,"8"]}`
	for token, want := range map[string]fencing.Token{
		`7`: 7, `"7"`: 7, `"7s"`: fencing.Token(7).NotExclusive(), `9223372036854775807`: 1<<63 - 1,
		`-7`: 0, `7.5`: 0, `1e3`: 0, `9223372036854775808`: 0, `true`: 0, `{}`: 0, `"x"`: 0,
	} {
		h, err := ReadHistory(strings.NewReader(fmt.Sprintf(text, token, token) + "\n"))
		if want == 0 {
			if err == nil {
				t.Errorf("the token %s was read as %v", token, h.Events[0].Token)
			}
			continue
		}
		if err != nil {
			t.Errorf("the token %s = %v", token, err)
		} else if e := h.Events[0]; e.Token != want || !slices.Equal(e.Seen, []fencing.Token{want, 8}) {
			t.Errorf("the token %s was read as %v, seen as %v", token, e.Token, e.Seen)
		}
	}
}

// A machine's clock began long before the history. Times in reports count from its first event.
func TestTimesCountFromTheStart(t *testing.T) {
	s := tell()
	a := s.grab("a", 5, 9, 1, 1000)
	s.grab("b", 10, 25, 2, 1000)
	s.renewed("a", a, 30, 35, 1030)
	s.call("c", OpAcquire, 40, 50, Event{Outcome: Refused, Until: ms(41)})
	const boot = 1000 * time.Hour
	for i := range s.events {
		for _, at := range []*backend.Instant{
			&s.events[i].At, &s.events[i].SentAt, &s.events[i].Deadline, &s.events[i].Until,
		} {
			if *at != 0 {
				*at = at.Add(boot)
			}
		}
	}
	p := Verify(t.Context(), s.history(), Rules{Fencing: true, Patience: time.Nanosecond, Recovery: time.Nanosecond})
	var report strings.Builder
	if err := p.tell(&report); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"believed in from 4ms", "granted at 20ms", "from 35ms, returned 9ms after", "20ms b ", "until 1.025s",
	} {
		if !strings.Contains(report.String(), want) {
			t.Errorf("the report does not say %q", want)
		}
	}
	if boot := fmt.Sprint(int64(boot) / int64(time.Hour)); strings.Contains(report.String(), boot) || t.Failed() {
		t.Errorf("the report:\n%s", report.String())
	}
}
