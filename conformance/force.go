package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// forceClauses cover the conditions of backend.ForceRequest.
var forceClauses = []Clause{
	{
		ID: "P17", Group: "capabilities", Slug: "force-release-names-one-hold", caps: backend.CapForceRelease,
		run: forceReleaseNamesOneHold,
		Rule: "with a nonce, ForceRelease ends the hold with that nonce and no other, and likewise with a token where the " +
			"driver fences; a request that matches no hold returns ErrNotHeld and changes nothing",
	},
	{
		ID: "P18", Group: "capabilities", Slug: "force-release-spares-the-successor", caps: backend.CapForceRelease,
		run: forceReleaseSparesTheSuccessor,
		Rule: "a ForceRelease that names a hold never ends the next hold, " +
			"even if the hold is released at the same moment or the ForceRelease is repeated",
	},
	{
		ID: "P21", Group: "capabilities", Slug: "force-release-tells-the-victim", caps: backend.CapForceRelease,
		run: forceReleaseTellsTheVictim,
		Rule: "after a ForceRelease the former holder receives the reason force-released, " +
			"the text and the author of the ForceRelease: with its renewal, and through Request.Lost where losses are pushed",
	},
}

// forced asks for a force-release.
func (t *trial) forced(d backend.Driver, r backend.ForceRequest) error {
	force, _ := backend.As[backend.ForceReleaser](d)
	r.Reason = "conformance"
	return force.ForceRelease(t.within(ample), r)
}

func forceReleaseNamesOneHold(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	r.TTL = t.long()
	g := t.take(a, r, "of a free name")
	wrong := []backend.ForceRequest{{Nonce: fencing.NewNonce()}}
	right := backend.ForceRequest{Name: r.Name, Nonce: g.Nonce}
	if t.desc.Capabilities.Has(backend.CapFencing) {
		wrong = append(wrong, backend.ForceRequest{Token: g.Token + 1}, backend.ForceRequest{Nonce: g.Nonce, Token: g.Token + 1})
		right.Token = g.Token
	} else if err := t.forced(b, backend.ForceRequest{Name: r.Name, Token: 1}); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("ForceRelease of a token by a driver that has none = %v, want ErrUnsupported", err)
	}
	for _, f := range wrong {
		f.Name = r.Name
		if err := t.forced(b, f); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("ForceRelease of nonce %v and token %v, which no hold has = %v, want ErrNotHeld", f.Nonce, f.Token, err)
		}
	}
	if renewal := t.renew(a, g); renewal.Err != nil {
		t.Errorf("renewal by a holder that no ForceRelease named = %v, want nil", renewal.Err)
	}
	if err := t.forced(b, right); err != nil {
		t.Errorf("ForceRelease of the hold's nonce and token = %v, want nil", err)
	}
	if renewal := t.renew(a, g); !errors.Is(renewal.Err, backend.ErrNotHeld) {
		t.Errorf("renewal by the victim = %v, want ErrNotHeld", renewal.Err)
	}
	if t.desc.Capabilities.Has(backend.CapFencing) {
		g := t.take(a, t.request(r.Name), "of the name that was force-released")
		if err := t.forced(b, backend.ForceRequest{Name: r.Name, Token: g.Token}); err != nil {
			t.Errorf("ForceRelease of the hold's token = %v, want nil", err)
		}
	}
	t.mustBeFree(b, r.Name, "after its holder was force-released")
	for _, kind := range []struct {
		cap  backend.Capabilities
		with func(string) backend.Request
	}{
		{backend.CapShared, t.reader},
		{backend.CapPermits, func(name string) backend.Request { return t.permits(name, 1, 3) }},
	} {
		if t.desc.Capabilities.Has(kind.cap) {
			t.endsOneOfThree(a, b, kind.with, kind.cap)
		}
	}
}

// endsOneOfThree force-releases the second of three holds of one name.
func (t *trial) endsOneOfThree(a, b backend.Driver, with func(string) backend.Request, what backend.Capabilities) {
	name := t.name()
	var grants []backend.Grant
	for i := range 3 {
		r := with(name)
		r.TTL = t.long()
		grants = append(grants, t.take(a, r, fmt.Sprintf("%d of three, %v", i+1, what)))
	}
	if err := t.forced(b, backend.ForceRequest{Name: name, Nonce: grants[1].Nonce}); err != nil {
		t.Errorf("%v: ForceRelease of the second of three holds = %v, want nil", what, err)
	}
	for i, g := range grants {
		renewal := t.renew(a, g)
		switch {
		case i == 1 && !errors.Is(renewal.Err, backend.ErrNotHeld):
			t.Errorf("%v: renewal of the hold that was force-released = %v, want ErrNotHeld", what, renewal.Err)
		case i != 1 && renewal.Err != nil:
			t.Errorf("%v: renewal of hold %d of three, which was not named = %v, want nil", what, i+1, renewal.Err)
		case i != 1:
			t.release(a, g, "beside one that was force-released")
		}
	}
}

func forceReleaseTellsTheVictim(t *trial) {
	a, b := t.client(), t.client()
	want := backend.Loss{
		Reason: backend.ReasonForceReleased, Text: "conformance", By: "Ann", Principal: "certificate CN=ops",
	}
	claimed := want.Principal
	want.Principal = cmp.Or(t.h.Principal, claimed)
	told := make(chan backend.Loss, 8)
	r := t.request(t.name())
	r.Lost = func(loss backend.Loss) {
		select {
		case told <- loss:
		default:
		}
	}
	g := t.take(a, r, "of a free name")
	if err := t.forced(b, backend.ForceRequest{Name: r.Name, By: want.By, Principal: claimed}); err != nil {
		t.Fatalf("ForceRelease = %v", err)
	}
	if t.desc.Capabilities.Has(backend.CapPushLoss) {
		select {
		case loss := <-told:
			if loss != want {
				t.Errorf("Request.Lost got %+v, want %+v", loss, want)
			}
		case <-t.within(slack).Done():
			t.Latef("Request.Lost was not called within %v", slack)
		}
		return // the driver may forget a reported loss
	}
	var gone *backend.NotHeldError
	renewal := t.renew(a, g)
	if !errors.As(renewal.Err, &gone) ||
		want != (backend.Loss{Reason: gone.Reason, Text: gone.Text, By: gone.By, Principal: gone.Principal}) {
		t.Errorf("renewal by the victim = %+v, want a *NotHeldError with %+v", renewal.Err, want)
	}
}

// spareRounds is small, since a real service is slow. The release and the ForceRelease race with other timing in each
// round.
const spareRounds = 12

func forceReleaseSparesTheSuccessor(t *trial) {
	a, b, c := t.client(), t.client(), t.client()
	name := t.name()
	for range spareRounds {
		r := t.request(name)
		r.TTL = t.long()
		first := t.take(a, r, "of a free name")
		successor := t.request(name)
		successor.TTL = t.long()
		w := t.wait(t.within(ample), b, successor)
		t.queued(a, name, 1)
		named := backend.ForceRequest{Name: name, Nonce: first.Nonce}
		var both sync.WaitGroup
		var released, forced error
		both.Go(func() { released = a.Release(t.within(ample), first) })
		both.Go(func() { forced = t.forced(c, named) })
		both.Wait()
		for what, err := range map[string]error{"release": released, "ForceRelease": forced} {
			if err != nil && !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("%s of one hold beside the other = %v, want nil or ErrNotHeld", what, err)
			}
		}
		next := t.got(w, ample, "after the release")
		if err := t.forced(c, named); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("ForceRelease of a hold that is over = %v, want ErrNotHeld", err)
		}
		if renewal := t.renew(b, next); renewal.Err != nil {
			t.Violatedf("a ForceRelease that named the hold before ended the next: %v", renewal.Err)
			return
		}
		t.release(b, next, "by the successor")
	}
}
