package conformance

import (
	"errors"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

var tierClauses = []Clause{
	{
		ID: "T1", Group: "tier", Slug: "correctness-needs-fencing", run: correctnessNeedsFencing,
		Rule: "the correctness tier accepts a driver that fences and returns its tokens; " +
			"any other driver fails with ErrTier and the driver's name",
	},
	{
		ID: "T2", Group: "tier", Slug: "efficiency-carries-no-token", run: efficiencyCarriesNoToken,
		Rule: "a lease of the efficiency tier carries the zero token, even if the driver can fence",
	},
	{
		ID: "T3", Group: "tier", Slug: "promise-is-not-inherited", run: promiseIsNotInherited,
		Rule: "a wrapper that does not itself promise fencing fails with ErrTier, whatever it wraps or embeds",
	},
}

func correctnessNeedsFencing(t *trial) {
	d := t.client()
	t.warm(d)
	c, err := fencelock.New(d, fencelock.Correctness, &fencelock.Options{TTL: t.ttl})
	if !t.desc.Capabilities.Has(backend.CapFencing) {
		var tier *fencelock.CapabilityError
		if !errors.Is(err, fencelock.ErrTier) || !errors.As(err, &tier) {
			t.Fatalf("Open for correctness of a driver that does not fence = %v, want ErrTier with a *CapabilityError",
				err)
		}
		if tier.Driver != t.desc.Name || tier.Lacks == "" {
			t.Errorf("CapabilityError = %+v, want driver %q and the missing capabilities", tier, t.desc.Name)
		}
		return
	}
	if err != nil {
		t.Fatalf("Open for correctness of a driver that fences = %v", err)
	}
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	if !lease.Token().Exclusive() {
		t.Errorf("token %v of the correctness tier is not exclusive", lease.Token())
	}
	if lease.TokenSpace() == "" {
		t.Errorf("TokenSpace is empty")
	}
	if err := lease.Release(t.within(slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
	if err := c.Close(t.within(slack)); err != nil {
		t.Errorf("Close = %v", err)
	}
}

func efficiencyCarriesNoToken(t *trial) {
	c := t.core(t.client(), nil)
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	if lease.Token() != 0 || lease.TokenSpace() != "" {
		t.Errorf("token %v of space %q in the efficiency tier, want none", lease.Token(), lease.TokenSpace())
	}
	if err := lease.Release(t.within(slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// silentWrapper keeps the wrapped driver reachable but makes no promise.
type silentWrapper struct{ backend.Driver }

func (w silentWrapper) Unwrap() backend.Driver { return w.Driver }

func promiseIsNotInherited(t *trial) {
	d := t.client()
	wrappers := map[string]backend.Driver{"that does not promise": silentWrapper{d}}
	if promise, promises := d.(backend.FencingDriver); promises {
		if promise.IssuesFencingTokens() != d {
			t.Errorf("IssuesFencingTokens is the promise of %T, want that of the driver itself, %T",
				promise.IssuesFencingTokens(), d)
		}
		wrappers["that embeds a driver and its promise"] = embedding{promise}
		wrappers["that embeds a driver and its promise, by its address"] = &embedding{promise}
		wrappers["that embeds one that embeds"] = struct{ *embedding }{&embedding{promise}}
	}
	for what, wrapper := range wrappers {
		if _, err := fencelock.New(wrapper, fencelock.Correctness, nil); !errors.Is(err, fencelock.ErrTier) {
			t.Errorf("Open for correctness of a wrapper %s = %v, want ErrTier", what, err)
		}
	}
}

// embedding has every method of the embedded driver, the promise included, and could have overridden any of them.
type embedding struct{ backend.FencingDriver }
