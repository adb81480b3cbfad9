package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// look tells who holds a name.
func (g *Gateway) look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	d, ok := backend.As[backend.Inspector](g.driver)
	if !ok || !g.can(backend.CapInspect) {
		return backend.State{}, g.lacks(backend.CapInspect)
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	return d.Look(ctx, name)
}

type lookQuery struct {
	NameOf
	Known  string `header:"If-None-Match" doc:"The ETag of a state that is known: 304 if it still is the state"`
	Prefer string `header:"Prefer" doc:"wait=30: with If-None-Match, wait up to that many seconds, 50 at most, for another state"`
}

// wait is what Prefer asks for. What it asks besides is ignored, as RFC 7240 has it.
func (q *lookQuery) wait() time.Duration {
	for each := range strings.SplitSeq(q.Prefer, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(each), "=")
		if n, err := strconv.ParseUint(strings.Trim(value, `"`), 10, 32); err == nil &&
			strings.EqualFold(name, "wait") {
			return min(time.Duration(n)*time.Second, pollMost)
		}
	}
	return 0
}

// lookPause is how often a backend is asked that does not tell of changes by itself.
const lookPause = 500 * time.Millisecond

// lookBeyond tells who holds a name. It waits, as the query asks, while that is what the client knows.
func (g *Gateway) lookBeyond(ctx context.Context, q *lookQuery) (backend.State, error) {
	s, err := g.look(ctx, q.name())
	wait := q.wait()
	if err != nil || etag(&s) != q.Known || wait == 0 {
		return s, err
	}
	out, err := g.admit(principalOf(requestOf(ctx)))
	if err != nil {
		return s, err
	}
	defer out()
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	defer context.AfterFunc(g.closing, cancel)()
	for etag(&s) == q.Known && waiting.Err() == nil {
		g.awaitChange(waiting, &s)
		if s, err = g.look(ctx, q.name()); err != nil {
			return s, err
		}
	}
	return s, nil
}

// awaitChange waits for a change of a lock, or for the next look at it.
func (g *Gateway) awaitChange(ctx context.Context, s *backend.State) {
	if d, ok := backend.As[backend.Watcher](g.driver); ok && g.can(backend.CapWatchReplay) && s.Revision != 0 {
		for _, err := range d.Watch(ctx, s.Name, s.Revision) {
			if err == nil || ctx.Err() != nil {
				return
			}
			break
		}
	}
	_ = kit.Sleep(ctx, lookPause)
}

func (g *Gateway) can(c backend.Capabilities) bool { return g.driver.Describe().Capabilities.Has(c) }

func (g *Gateway) lacks(c backend.Capabilities) error {
	return fmt.Errorf("the %s driver lacks the capability %v: %w", g.driver.Describe().Name, c, backend.ErrUnsupported)
}

// etag names the state of a lock: its revision, where the backend tells one, or else its holds.
func etag(s *backend.State) string {
	if s.Revision != 0 {
		return `"` + strconv.FormatUint(s.Revision, 10) + `"`
	}
	ids := make([]string, len(s.Holders))
	for i, h := range s.Holders {
		ids[i] = h.HoldID
	}
	slices.Sort(ids)
	return `"` + strings.Join(ids, ",") + `"`
}

func (g *Gateway) stateOf(s *backend.State) State {
	out := State{Locked: s.Held, LockKey: s.Name, Waiters: s.Waiters, Revision: s.Revision}
	for _, h := range s.Holders {
		one := Holder{
			OwnerID: h.Owner, HoldID: h.HoldID, Kind: h.Kind.String(), Permits: h.Permits,
			ExpiresInMillis: h.ExpiresIn.Milliseconds(), Metadata: h.Metadata,
		}
		if h.Token.Exclusive() {
			one.FencingToken = h.Token.Order()
		}
		if !h.Since.IsZero() {
			since := h.Since.UTC()
			one.Since = &since
		}
		out.Holders = append(out.Holders, one)
	}
	if len(out.Holders) > 0 {
		first := &out.Holders[0]
		out.OwnerID, out.FencingToken = first.OwnerID, first.FencingToken
		if left := s.Holders[0].ExpiresIn; left > 0 {
			at := time.Now().Add(left).UTC().Truncate(time.Millisecond)
			out.ExpiresAt = &at
		}
	}
	return out
}

type listQuery struct {
	Prefix    string `query:"prefix" doc:"Names that start with it"`
	Namespace string `query:"namespace" doc:"Names of a namespace, that is those that start with it and a colon or a slash"`
	After     string `query:"after" doc:"Names behind this one"`
	Limit     int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"How many at most"`
	Name      string `query:"name" doc:"This name alone"`
}

// list reads one page. The backend tells names in no order, so each page reads all of them.
func (g *Gateway) list(ctx context.Context, q *listQuery) (*List, error) {
	d, ok := backend.As[backend.Lister](g.driver)
	if !ok || !g.can(backend.CapList) {
		return nil, g.lacks(backend.CapList)
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	prefix := q.Prefix
	if q.Namespace != "" && !strings.HasPrefix(prefix, q.Namespace) {
		prefix = q.Namespace
	}
	in := func(name string) bool {
		rest, ok := strings.CutPrefix(name, q.Namespace)
		return strings.HasPrefix(name, q.Prefix) && name > q.After && (q.Name == "" || q.Name == name) &&
			(q.Namespace == "" || ok && (strings.HasPrefix(rest, ":") || strings.HasPrefix(rest, "/")))
	}
	var found []backend.State
	byName := func(a, b backend.State) int { return cmp.Compare(a.Name, b.Name) }
	for s, err := range d.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		if !in(s.Name) {
			continue
		}
		if found = append(found, s); len(found) > 4*q.Limit { // so that no page needs memory for all
			slices.SortFunc(found, byName)
			found = found[:q.Limit+1]
		}
	}
	slices.SortFunc(found, byName)
	page := &List{Locks: []State{}}
	for i := range found {
		if i == q.Limit {
			page.NextAfter = found[i-1].Name
			break
		}
		page.Locks = append(page.Locks, g.stateOf(&found[i]))
	}
	return page, nil
}

// forceRelease takes a lock away. A condition is looked at just before.
func (g *Gateway) forceRelease(ctx context.Context, name, ifMatch string, b *forceBody) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := g.o.Authorizer.ForceRelease(requestOf(ctx), name); err != nil {
		return problem(codeDenied, err.Error())
	}
	d, ok := backend.As[backend.ForceReleaser](g.driver)
	if !ok || !g.can(backend.CapForceRelease) {
		return g.lacks(backend.CapForceRelease)
	}
	if ifMatch != "" || b.FencingToken != 0 {
		s, err := g.look(ctx, name)
		if err != nil {
			return err
		}
		holds := slices.ContainsFunc(s.Holders, func(h backend.Holder) bool {
			return h.Token.Order() == b.FencingToken
		})
		if ifMatch != "" && ifMatch != "*" && ifMatch != etag(&s) || b.FencingToken != 0 && !holds {
			return problem(codeChanged, "somebody else holds the lock by now, or nobody")
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
	defer cancel()
	err := d.ForceRelease(ctx, name, b.Reason)
	if errors.Is(err, backend.ErrNotHeld) {
		return problem(codeNotLocked, "nobody holds the lock")
	}
	return err
}
