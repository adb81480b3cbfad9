package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// requestClauses are about request ids.
var requestClauses = []Clause{
	{
		ID: "O13", Group: "ownership", Slug: "a-repeat-proves-anew", run: aRepeatProvesAnew,
		Rule: "an acquire with the request id of a live hold extends it to a full TTL and returns a later SentAt",
	},
}

func aRepeatProvesAnew(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	r.TTL = t.times(2)
	first := t.take(a, r, "of a free name")
	pause(t.Context(), r.TTL/2)
	again := t.take(a, r, "with the id of a living hold")
	if again.SentAt <= first.SentAt {
		t.Errorf("SentAt of a repeat, half of a TTL of %v later, is %v before that of the first grant", r.TTL,
			first.SentAt.Sub(again.SentAt))
	}
	pause(t.Context(), first.SentAt.Add(first.TTL).Sub(t.now())+t.ttl/10)
	if left := again.SentAt.Add(t.desc.Validity(again.TTL)).Sub(t.now()); left > 0 {
		t.mustBeHeld(b, r.Name, "after the end of the first grant, within that of the repeat")
		_ = t.releaseSettled(a, again)
	}
}

// listClauses are about lists of many names.
var listClauses = []Clause{
	{
		ID: "P19", Group: "capabilities", Slug: "list-is-literal-and-whole", caps: backend.CapList, crowd: true,
		run: listIsLiteralAndWhole,
		Rule: "List compares the prefix as bytes, special characters (_ % * ? [ \\) included, " +
			"and yields all of hundreds of names",
	},
	{
		ID: "P20", Group: "capabilities", Slug: "ping-tells", needs: needLink, run: pingTells,
		Rule: "Ping returns ErrUnavailable while the service cannot be reached, and nil when it can be reached again",
	},
}

func listIsLiteralAndWhole(t *trial) {
	d := t.client()
	lister, _ := backend.As[backend.Lister](d)
	base := t.name()
	const n = 230
	names := map[string][]string{base + "/many/": nil} // by the prefix that lists them
	for i := range n {
		names[base+"/many/"] = append(names[base+"/many/"], fmt.Sprintf("%s/many/%03d", base, i))
	}
	for i, c := range []string{"_", "%", "*", "?", "[ab]", "\\", "\\%", ".", ".*", "{a,b}", "$", "^"} {
		prefix := fmt.Sprintf("%s/%d/a%s", base, i, c)
		names[prefix] = []string{prefix + "b"}
		// Names that the prefix would match as a pattern.
		names["-"+prefix] = []string{
			fmt.Sprintf("%s/%d/axb", base, i), fmt.Sprintf("%s/%d/axxb", base, i), fmt.Sprintf("%s/%d/aab", base, i),
			fmt.Sprintf("%s/%d/ab", base, i),
		}
	}
	all := slices.Concat(slices.Collect(maps.Values(names))...)
	grants := make([]backend.Grant, len(all))
	many(len(all), func(i int) {
		var err error
		if grants[i], err = t.try(d, t.request(all[i])); err != nil {
			t.Errorf("acquire of %q, one of %d names = %v", all[i], len(all), err)
		}
	})
	for prefix, want := range names {
		if prefix[0] == '-' || t.Failed() {
			continue
		}
		var got []string
		for state, err := range lister.List(t.within(ample), prefix) {
			if err != nil {
				t.Errorf("List of %q = %v", prefix, err)
				break
			}
			got = append(got, state.Name)
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("List of %q yields %d names, %.8q, want %d, %.8q", prefix, len(got), got, len(want), want)
		}
	}
	many(len(all), func(i int) {
		if grants[i].Name != "" {
			t.release(d, grants[i], "of one of many names")
		}
	})
}

func pingTells(t *trial) {
	d, link := t.linked()
	ping, ok := backend.As[backend.Pinger](d)
	if !ok {
		t.inapplicable("the driver has no Ping")
	}
	t.warm(d)
	if err := t.settled(ping.Ping); err != nil {
		t.Errorf("Ping = %v", err)
	}
	link.Refuse()
	if err := ping.Ping(t.within(slack)); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("Ping of a service that cannot be reached = %v, want ErrUnavailable", err)
	}
	link.Pass()
	if err := t.settled(ping.Ping); err != nil {
		t.Errorf("Ping of a service that can be reached again = %v", err)
	}
}

// greatClauses are about tokens that a service takes years to reach.
var greatClauses = []Clause{
	{
		ID: "F8", Group: "fencing", Slug: "great-tokens", caps: backend.CapFencing, serial: true, run: greatTokens,
		Rule: "tokens beyond 2^32 and 2^53 increase by one and are reported exactly",
	},
}

func greatTokens(t *trial) {
	if t.h.Ahead == nil {
		t.inapplicable("Harness.Ahead is nil: nothing advances the service's token counter")
	}
	for _, least := range []fencing.Token{1 << 32, 1 << 53} {
		t.h.Ahead(t, least)
		d := t.client()
		inspector, shows := backend.As[backend.Inspector](d)
		k := tokens{t: t, last: least}
		name := t.name()
		var kept []backend.Grant // one more each round, so that tokens are even and odd
		for range 4 {
			g := t.take(d, t.request(name), "after the count was set ahead")
			k.next(g, "a count set ahead")
			if shows && t.desc.Capabilities.Has(backend.CapInspect) {
				_, _ = inspector.Look(t.within(slack), name) // the ledger checks the result
			}
			t.release(d, g, "with a great token")
			kept = append(kept, t.take(d, t.request(t.name()), "of another name"))
		}
		t.releaseAll(d, kept, "of other names")
	}
}

// startClauses are about the beginning of a service.
var startClauses = []Clause{
	{
		ID: "S8", Group: "outages", Slug: "first-calls-at-once", needs: needWipe, serial: true, run: firstCallsAtOnce,
		Rule: "concurrent first calls of several new clients on an empty service are all granted",
	},
}

func firstCallsAtOnce(t *trial) {
	const rounds, clients, calls = 3, 3, 6
	for range rounds {
		t.h.Server.Wipe(t)
		var all sync.WaitGroup
		for range clients {
			d := t.client()
			for range calls {
				all.Go(func() {
					r := t.request(t.name())
					var g backend.Grant
					switch err := t.settled(func(ctx context.Context) (err error) {
						g, err = d.Acquire(ctx, r)
						return err
					}); {
					case errors.Is(err, backend.ErrHistoryLost):
						t.Violatedf("one of the first calls on an empty service = %v", err)
					case err != nil:
						t.Errorf("one of the first calls on an empty service = %v", err)
					default:
						t.release(d, g, "of one of the first holds")
					}
				})
			}
		}
		all.Wait()
	}
}

// crowdClauses are about many permits.
var crowdClauses = []Clause{
	{
		ID: "Q9", Group: "permits", Slug: "hundreds-at-once", caps: backend.CapPermits, crowd: true,
		run:  hundredsOfPermitsAtOnce,
		Rule: "hundreds of concurrent attempts for permits are all granted if there are enough permits",
	},
}

func hundredsOfPermitsAtOnce(t *trial) {
	const n, clients = 200, 4
	name := t.name()
	drivers, grants := make([]backend.Driver, clients), make([]backend.Grant, n)
	for i := range drivers {
		drivers[i] = t.client()
		t.warm(drivers[i])
	}
	many(n, func(i int) {
		g, err := t.try(drivers[i%clients], t.permits(name, 1, n))
		if err != nil {
			t.Errorf("attempt %d of %d for one of %d permits = %v, want a grant", i, n, n, err)
		}
		grants[i] = g
	})
	many(n, func(i int) {
		if grants[i].Name != "" {
			t.release(drivers[i%clients], grants[i], "of one of many permits")
		}
	})
}
