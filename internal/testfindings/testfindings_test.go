package testfindings

import (
	"reflect"
	"testing"
	"time"
)

type attrs struct {
	testing.TB
	key, value string
}

func (a *attrs) Attr(key, value string) { a.key, a.value = key, value }

func TestFactsAreReadAsWritten(t *testing.T) {
	margin := 1500 * time.Microsecond
	for _, fact := range []any{
		Clauses{Passed: 1, Failed: 2, Inconclusive: 3, Skipped: 4, NotApplicable: 5},
		ClusterFault{Slug: "leader-kill", Rounds: 3, Margin: &margin, MedianRecovery: time.Second},
		Soak{
			Driver: "redis", Seed: 1<<64 - 1,
			Kinds: []SoakKind{{Slug: "delete", Count: 2}}, Found: []Count{{"overlap", 1}},
		},
		Mutant{What: "two lines\nof it", Killers: "X1"}, Simulation{Hours: 0.5}, Rate{Times: 1, Rounds: 2},
	} {
		a := &attrs{TB: t}
		Write(a, fact)
		if got, err := Read(a.key, a.value); err != nil || !reflect.DeepEqual(got, fact) {
			t.Errorf("%s %s is read as %+v, %v", a.key, a.value, got, err)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	if fact, err := Read("else.Clauses", "{}"); fact != nil || err != nil {
		t.Errorf("an attribute of somebody else: %v, %v", fact, err)
	}
	for key, value := range map[string]string{
		"fencelock.Clause": "{}", "fencelock.Clauses": `{"Passd":1}`, "fencelock.Rate": "1",
	} {
		if fact, err := Read(key, value); err == nil {
			t.Errorf("%s %s is read as %+v", key, value, fact)
		}
	}
}
