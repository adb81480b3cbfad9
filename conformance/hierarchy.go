package conformance

import (
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
)

var hierarchyClauses = []Clause{
	{
		ID: "H1", Group: "hierarchy", Slug: "excludes-above-and-below", caps: backend.CapHierarchy,
		run:  excludesAboveAndBelow,
		Rule: "an exclusive hold of a path excludes holds of the path, its ancestors and its descendants, and no others",
	},
	{
		ID: "H2", Group: "hierarchy", Slug: "shared-paths", caps: backend.CapHierarchy | backend.CapShared,
		run:  sharedPaths,
		Rule: "shared holds of a path, its ancestors and its descendants coexist, and exclude exclusive holds of these paths",
	},
	{
		ID: "H3", Group: "hierarchy", Slug: "uses-do-not-mix", caps: backend.CapHierarchy, run: hierarchyDoesNotMix,
		Rule: "while a name is in use as a path, a request for it as a plain name returns ErrLimitMismatch, and vice versa",
	},
	{
		ID: "H4", Group: "hierarchy", Slug: "waits-for-all-below", caps: backend.CapHierarchy | backend.CapFair,
		run:  waitsForAllBelow,
		Rule: "a waiter for a path acquires it when the last hold below is released, and later requests below stay behind it",
	},
}

// path returns a fresh request for a hierarchical name.
func (t *trial) path(name string) backend.Request {
	r := t.request(name)
	r.Hierarchical = true
	return r
}

func (t *trial) sharedPath(name string) backend.Request {
	r := t.path(name)
	r.Kind = backend.KindShared
	return r
}

func excludesAboveAndBelow(t *trial) {
	a, b := t.client(), t.client()
	root := t.name()
	g := t.take(a, t.path(root+"/b"), "of a free path")
	for name, want := range map[string]error{
		"": backend.ErrHeld, "/b": backend.ErrHeld, "/b/c": backend.ErrHeld, "/b/c/d": backend.ErrHeld,
		"/c": nil, "/bc": nil, "/c/b": nil, "x": nil,
	} {
		got, err := t.try(b, t.path(root+name))
		if !errors.Is(err, want) {
			t.Errorf("beside %q, %q = %v, want %v", "/b", name, err, want)
		}
		if err == nil {
			t.release(b, got, "by the other")
		}
	}
	t.release(a, g, "by the holder")
	for _, name := range []string{"", "/b", "/b/c"} {
		t.release(b, t.take(b, t.path(root+name), "after the release"), "by the other")
	}
}

func sharedPaths(t *trial) {
	a, b := t.client(), t.client()
	root := t.name()
	below := t.take(a, t.sharedPath(root+"/a/b"), "of a free path")
	above := t.take(b, t.sharedPath(root), "above a shared hold")
	for _, name := range []string{"", "/a", "/a/b", "/a/b/c", "/x"} {
		if _, err := t.try(b, t.path(root+name)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("exclusive attempt at %q above, below or beside readers = %v, want ErrHeld", name, err)
		}
	}
	t.release(b, above, "by the reader above")
	beside := t.take(b, t.path(root+"/x"), "beside a shared hold")
	if _, err := t.try(b, t.sharedPath(root)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("shared attempt above an exclusive hold = %v, want ErrHeld", err)
	}
	t.release(b, beside, "by the writer")
	t.release(a, below, "by the reader below")
}

func hierarchyDoesNotMix(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.path(name+"/x"), "of a free path")
	for _, used := range []string{name, name + "/x"} {
		if _, err := t.try(b, t.request(used)); !errors.Is(err, backend.ErrLimitMismatch) {
			t.Errorf("%q as a plain name = %v, want ErrLimitMismatch", used, err)
		}
	}
	t.release(a, g, "by the holder")
	g = t.take(a, t.request(name), "of a free name")
	for _, used := range []string{name, name + "/x"} {
		if _, err := t.try(b, t.path(used)); !errors.Is(err, backend.ErrLimitMismatch) {
			t.Errorf("%q as a path = %v, want ErrLimitMismatch", used, err)
		}
	}
	t.release(a, g, "by the holder")
}

func waitsForAllBelow(t *trial) {
	a, b := t.client(), t.client()
	root := t.name()
	one := t.take(a, t.path(root+"/1"), "of a free path")
	two := t.take(a, t.path(root+"/2"), "of a free path")
	w := t.wait(t.within(10*slack), b, t.path(root))
	t.queued(a, root, 1)
	if _, err := t.try(a, t.path(root+"/3")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("attempt below a path with a waiter = %v, want ErrHeld", err)
	}
	t.release(a, one, "of one below")
	if w.ended(200 * time.Millisecond) {
		t.Errorf("the wait for the path returned %v while a path below was held", w.err)
	}
	t.release(a, two, "of the last below")
	t.release(b, t.got(w, t.ttl+slack, "after the last below"), "of the path")
}
