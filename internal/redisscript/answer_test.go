package redisscript

import (
	"reflect"
	"testing"
	"time"
)

func TestAnswers(t *testing.T) {
	h := Hold{PX: time.Second, Client: "c", Nonce: "1", Request: "r", ID: "id-_9", Owner: "o"}
	reader, permits := h, h
	reader.Shared = true
	permits.Permits, permits.Limit = 2, 3
	for _, c := range []struct {
		answer any
		want   State
		ok     bool
	}{
		{
			[]any{h.Value(), int64(1500)},
			State{Value: h.Value(), Hold: h, Held: true, ExpiresIn: 1500 * time.Millisecond}, true,
		},
		{[]any{"-", int64(10), int64(2)}, State{Value: "-", ExpiresIn: 10 * time.Millisecond, Waiters: 2}, true},
		{[]any{"", int64(-2), int64(0)}, State{}, true},
		{
			[]any{"", int64(900), int64(1), reader.Value(), int64(700), permits.Value(), int64(800)},
			State{ExpiresIn: 900 * time.Millisecond, Waiters: 1, Shares: []State{
				{Value: reader.Value(), Hold: reader, Held: true, ExpiresIn: 700 * time.Millisecond},
				{Value: permits.Value(), Hold: permits, Held: true, ExpiresIn: 800 * time.Millisecond},
			}}, true,
		},
		{int64(1), State{}, false},
		{[]any{"-"}, State{}, false},
		{[]any{"", int64(900), int64(1), reader.Value()}, State{}, false},
	} {
		if got, ok := ParseState(c.answer); ok != c.ok || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v was read as %+v, %v", c.answer, got, ok)
		}
	}
	got, ok := ParseLooked([]any{int64(-2), int64(3), int64(1), int64(0), int64(1), int64(2)}, 3)
	want := Looked{
		ExpiresIn: -2 * time.Millisecond, Length: 3, Shared: true, Places: []Place{PlaceGone, PlaceQueued, PlaceHolds},
	}
	if !ok || !reflect.DeepEqual(got, want) {
		t.Errorf("a look was read as %+v, %v", got, ok)
	}
	if _, ok := ParseLooked([]any{int64(1), int64(0), int64(0)}, 1); ok {
		t.Error("an answer for no waiter passes for one")
	}
}

func TestRefusedSets(t *testing.T) {
	h := Hold{PX: time.Second, Client: "c", Nonce: "1", Request: "r", ID: "id-_9", Owner: "o"}
	for _, c := range []struct {
		answer any
		want   Refused
		ok     bool
	}{
		{[]any{int64(1)}, Refused{Mismatch: true}, true},
		{
			[]any{int64(3), h.Value(), int64(500)},
			Refused{Index: 2, State: State{Value: h.Value(), Hold: h, Held: true, ExpiresIn: 500 * time.Millisecond}},
			true,
		},
		{[]any{int64(4)}, Refused{}, false},
		{[]any{int64(0)}, Refused{}, false},
		{[]any{int64(1), "x"}, Refused{}, false},
		{int64(1), Refused{}, false},
	} {
		if got, ok := ParseRefused(c.answer, 3); ok != c.ok || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v was read as %+v, %v", c.answer, got, ok)
		}
	}
}

func TestSettlements(t *testing.T) {
	for range 100 {
		if d := SettleIn(time.Second); d <= time.Second || d > 1100*time.Millisecond {
			t.Fatalf("a hold that ends in 1s is settled after %v", d)
		}
	}
}

func TestPeeks(t *testing.T) {
	if got, ok := ParsePeeked([]any{int64(1), int64(3)}, 3); !ok || !reflect.DeepEqual(got, []int{0, 2}) {
		t.Errorf("a peek was read as %v, %v", got, ok)
	}
	if got, ok := ParsePeeked([]any{}, 3); !ok || got != nil {
		t.Errorf("a peek at names that others hold was read as %v, %v", got, ok)
	}
	for _, answer := range []any{nil, int64(1), []any{int64(0)}, []any{int64(4)}, []any{"x"}} {
		if _, ok := ParsePeeked(answer, 3); ok {
			t.Errorf("%v passes for a peek at three names", answer)
		}
	}
}
