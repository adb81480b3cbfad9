package containers

import (
	"context"
	"testing"
)

// Lifecycle has the operations of each server and each cluster of this package.
type Lifecycle interface {
	Start(context.Context) error
	Stop(context.Context) error
	Restart(context.Context) error
	Pause(context.Context) error
	Resume(context.Context) error
}

// Within returns an operation of a Lifecycle as a function of conformance.Server. The operation has two minutes, long
// enough on a busy machine.
func Within(act func(context.Context) error) func(testing.TB) {
	return func(t testing.TB) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		if err := act(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// Refusal returns a refusal for conformance.Server, which begin begins and end ends.
func Refusal(begin, end func(context.Context) error) func(testing.TB, string) (allow func()) {
	return func(t testing.TB, _ string) func() {
		t.Helper()
		Within(begin)(t)
		return func() { Within(end)(t) }
	}
}
