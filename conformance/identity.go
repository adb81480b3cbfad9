package conformance

import (
	"errors"
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/backend"
)

func whatIsShownMovesNothing(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	r.HoldID = "job-7_of-" + backend.NewRequestID()[:12]
	var told *watched
	if t.desc.Capabilities.Has(backend.CapWatch) {
		told = t.follow(b, a, r.Name)
	}
	g := t.take(a, r, "of a free name")
	if g.HoldID != r.HoldID {
		t.Errorf("Grant.HoldID = %q, want %q", g.HoldID, r.HoldID)
	}
	shown := map[string]any{}
	_, err := t.try(b, t.request(r.Name))
	var held *backend.HeldError
	if !errors.As(err, &held) {
		t.Fatalf("attempt by another client = %v, want a *HeldError", err)
	}
	if held.HoldID != r.HoldID {
		t.Errorf("HeldError.HoldID = %q, want %q", held.HoldID, r.HoldID)
	}
	shown["the error of an attempt"], shown["HeldError"] = err, *held
	if t.desc.Capabilities.Has(backend.CapInspect) {
		inspector, _ := backend.As[backend.Inspector](b)
		state, err := inspector.Look(t.within(slack), r.Name)
		if err != nil || len(state.Holders) != 1 || state.Holders[0].HoldID != r.HoldID {
			t.Errorf("Look = %+v, %v; want one holder with the HoldID %q", state, err, r.HoldID)
		}
		shown["Look"] = state
	}
	if t.desc.Capabilities.Has(backend.CapList) {
		lister, _ := backend.As[backend.Lister](b)
		for state, err := range lister.List(t.within(slack), r.Name) {
			if err != nil || len(state.Holders) != 1 || state.Holders[0].HoldID != r.HoldID {
				t.Errorf("List = %+v, %v; want one holder with the HoldID %q", state, err, r.HoldID)
			}
			shown["List"] = state
		}
	}
	whole := t.comparesWhole(b, g, "the HoldID for a request id", r.HoldID)
	if whole {
		t.release(a, g, "by the holder")
	}
	err = a.Release(t.within(slack), g)
	shown["the error of a second release"] = err
	shown["the error of a late renewal"] = t.renew(a, g).Err
	if told != nil && whole {
		var changes []backend.Change
		told.await(slack, "the release", func(c backend.Change) bool {
			changes = append(changes, c)
			return c.Token == g.Token && c.Type == backend.ChangeReleased
		})
		shown["Watch"] = changes
	}
	for what, value := range shown {
		if text := fmt.Sprintf("%v %+v", value, value); strings.Contains(text, r.RequestID) {
			t.Errorf("%s shows the request id: %s", what, text)
		}
	}
}
