package conformance

import (
	"errors"
	"slices"
	"strings"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

var nameClauses = []Clause{
	{
		ID: "N1", Group: "names", Slug: "no-two-names-meet", run: noTwoNamesMeet,
		Rule: "every valid name is accepted, and different names never exclude each other, however similar they are",
	},
	{
		ID: "N2", Group: "names", Slug: "odd-names-work-bare", run: oddNamesWorkBare,
		Rule: "names with a meaning elsewhere (.., *, {}, a space) are ordinary names",
	},
	{
		ID: "N3", Group: "names", Slug: "invalid-names-are-refused", run: invalidNamesAreRefused,
		Rule: "a name that is empty, longer than 512 bytes, not UTF-8 or with control characters fails with ErrInvalidName",
	},
	{
		ID: "N4", Group: "names", Slug: "foreign-entries-do-no-harm", needs: needIntrude,
		run:  foreignEntriesDoNoHarm,
		Rule: "foreign entries beside the driver's entries in the service do no harm",
	},
}

func noTwoNamesMeet(t *trial) {
	d, rival := t.client(), t.client()
	base := t.name()
	var names []string
	for _, tail := range []string{
		"", "/", "//", "/a", "a", "A", ":", ":a", "/a:b", "/a/b", "/a%2Fb", "/a%2fb", "/a%b", "/a_b", "/a.b", "/a-b",
		"/a+b", "/a b",
		"{a}", "{a}b", "a{b}c", "{a", "a}", "{}", "{}a", "{{a}}", " ", "  ", "\u00a0", "é", "e\u0301", "世界", "🔒",
		"..", "/..", "/../x", ".", "/.", "/./x", "*", "?", "[a]", "\\", "\\a", "\"", "'", "`", "$", "#", "@",
		"&", "=", "|", ";", ",",
		"%", "%25", "%%", "~", "^", "!", "<", ">", ":queue", ":waiters", ":token", ":notify", ":lock", ":fence",
		":meta",
		"/_", "/0", "0", "-0000000001", "\u202e", "\ufeff", "\u2028",
	} {
		names = append(names, base+tail)
	}
	longest := base + strings.Repeat("x", backend.MaxNameBytes-len(base)-1)
	names = append(names, longest, longest+"y", longest+"z")
	var grants []backend.Grant
	for _, name := range names {
		if err := backend.ValidateName(name); err != nil {
			t.Logf("%q is no valid name: %v", name, err)
			continue
		}
		g, err := t.try(d, t.request(name))
		if err != nil {
			t.Errorf("acquire of %q beside names that look like it = %v", name, err)
			continue
		}
		grants = append(grants, g)
	}
	for _, g := range grants {
		if !t.mustBeHeld(rival, g.Name, g.Name) {
			break
		}
	}
	for _, g := range grants {
		t.release(d, g, "of "+g.Name)
	}
	for _, g := range grants[:min(len(grants), 8)] {
		t.mustBeFree(rival, g.Name, g.Name)
	}
}

func oddNamesWorkBare(t *trial) {
	d := t.client()
	for _, name := range []string{
		"..", ".", "/", "//", "*", "?", " ", "{}", "{", "}", "{a}", "}{", "%", "\\", "\"", "~", "-", "_", "$", ":", "0",
	} {
		r := t.brief(name)
		r.Wait = true // other runs may use these names too
		g, err := d.Acquire(t.within(3*slack), r)
		if err != nil {
			t.Errorf("acquire of %q = %v", name, err)
			continue
		}
		if _, err := t.try(d, t.brief(name)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("second acquire of %q = %v, want ErrHeld", name, err)
		}
		t.release(d, g, "of "+name)
	}
}

func invalidNamesAreRefused(t *trial) {
	c := t.core(t.client(), nil)
	for what, name := range map[string]string{
		"empty":               "",
		"too long":            strings.Repeat("x", backend.MaxNameBytes+1),
		"invalid UTF-8":       "a\xffb",
		"a line break":        "a\nb",
		"a NUL":               "a\x00b",
		"an escape":           "a\x1bb",
		"a C1 control":        "a\u0085b",
		"truncated rune":      "世"[:2],
		"a delete":            "a\x7f",
		"a lone carriage ret": "\r",
	} {
		if _, err := c.TryAcquire(t.within(ample), name); !errors.Is(err, fencelock.ErrInvalidName) {
			t.Errorf("acquire of a name with %s = %v, want ErrInvalidName", what, err)
		}
	}
}

func foreignEntriesDoNoHarm(t *trial) {
	d, rival := t.client(), t.client()
	name := t.name()
	t.h.Intrude(t, name)
	g := t.take(d, t.request(name), "beside foreign entries")
	w := t.wait(t.within(10*slack), rival, t.request(name))
	t.queued(d, name, 1)
	t.h.Intrude(t, name)
	if r := t.renew(d, g); r.Err != nil {
		t.Errorf("renewal beside foreign entries = %v", r.Err)
	}
	if lister, ok := backend.As[backend.Lister](d); ok && t.desc.Capabilities.Has(backend.CapList) {
		var listed []string
		for info, err := range lister.List(t.within(slack), name) {
			if err != nil {
				t.Errorf("List beside foreign entries = %v", err)
				break
			}
			listed = append(listed, info.Name)
		}
		if !slices.Contains(listed, name) || len(listed) != 1 {
			t.Errorf("List beside foreign entries = %q, want %q alone", listed, name)
		}
	}
	t.release(d, g, "beside foreign entries")
	next := t.got(w, t.ttl+slack, "beside foreign entries")
	t.release(rival, next, "by the waiter")
}
