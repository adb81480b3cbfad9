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
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/rules"
)

// look returns the state of a name.
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
	Known  string `header:"If-None-Match" doc:"The ETag of a known state: the answer is 304 if the state has not changed"`
	Prefer string `header:"Prefer" doc:"wait=30: with If-None-Match, wait up to 30 seconds for another state; 50 at most"`
}

// wait returns the wait in Prefer. It ignores other preferences, as RFC 7240 requires.
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

// lookPause is the interval at which the gateway polls a backend without notifications.
const lookPause = 500 * time.Millisecond

// lookBeyond returns the state of a name. If the query asks for a wait, it waits while the state is the one that the
// client already knows.
func (g *Gateway) lookBeyond(ctx context.Context, q *lookQuery) (backend.State, error) {
	s, err := g.look(ctx, q.name())
	wait := q.wait()
	if err != nil || etag(&s) != q.Known || wait == 0 {
		return s, err
	}
	out, err := g.admit(&g.waits, principalOf(requestOf(ctx)))
	if err != nil {
		return s, err
	}
	defer out()
	incomingOf(ctx).leaveWork()
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

// awaitChange waits for a change of a lock. Without a watch it waits for lookPause.
func (g *Gateway) awaitChange(ctx context.Context, s *backend.State) {
	if d, ok := backend.As[backend.Watcher](g.driver); ok && g.can(backend.CapWatchReplay) && s.Revision != 0 {
		for _, err := range g.follow(ctx, d, s.Name, s.Revision, s.Revision, func() {}) {
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

// etag returns the ETag of the state of a lock: its revision if the backend has one, or else the ids of its holds.
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

// StateOf returns the public state of a lock.
func StateOf(s *backend.State) State {
	out := State{Locked: s.Held, LockKey: s.Name, Waiters: s.Waiters, Revision: s.Revision}
	for _, h := range s.Holders {
		one := Holder{
			OwnerID: h.Owner, HoldID: h.HoldID, Nonce: h.Nonce.String(), Kind: h.Kind.String(), Permits: h.Permits,
			Since: unixMillis(h.Since), ExpiresInMillis: h.ExpiresIn.Milliseconds(), Metadata: h.Metadata,
		}
		if h.Token.Exclusive() {
			one.FencingToken = h.Token.Order()
		}
		out.Holders = append(out.Holders, one)
	}
	if free, limit, ok := s.Remaining(); ok {
		out.Remaining, out.Limit = &free, limit
	}
	for _, w := range s.Queue {
		out.Queue = append(out.Queue, Waiter{
			OwnerID: w.Owner, HoldID: w.HoldID, Kind: w.Kind.String(), Permits: w.Permits, Since: unixMillis(w.Since),
		})
	}
	if len(out.Holders) > 0 {
		first := &out.Holders[0]
		out.OwnerID, out.FencingToken, out.Since = first.OwnerID, first.FencingToken, first.Since
		if left := s.Holders[0].ExpiresIn; left > 0 {
			out.ExpiresAt = time.Now().Add(left).UnixMilli()
		}
	}
	return out
}

// unixMillis returns a time in milliseconds since 1970; 0 if unknown.
func unixMillis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

type listQuery struct {
	Prefix    string `query:"prefix" doc:"List names with this prefix only"`
	Namespace string `query:"namespace" doc:"List the names of this namespace only: those that start with it and a colon or a slash"`
	After     string `query:"after" doc:"List names that sort after this name only"`
	Limit     int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"The maximum number of names in the answer"`
	Name      string `query:"name" doc:"List this name only"`
}

// list returns one page of the held locks that the sender of the request may read. If the backend does not list names
// in order, each page reads all of them.
func (g *Gateway) list(ctx context.Context, q *listQuery) (*List, error) {
	d, ok := backend.As[backend.Lister](g.driver)
	if !ok || !g.can(backend.CapList) {
		return nil, g.lacks(backend.CapList)
	}
	reads, err := g.reads(ctx)
	if err != nil {
		return nil, err
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
	all, ordered := d.List(ctx, prefix), false
	if pager, ok := backend.As[backend.Pager](g.driver); ok {
		all, ordered = pager.ListAfter(ctx, prefix, q.After), true
	}
	for s, err := range all {
		if err != nil {
			return nil, err
		}
		if !in(s.Name) || !reads(s.Name) {
			continue
		}
		found = append(found, s)
		if ordered && len(found) > q.Limit {
			break
		}
		if len(found) > 4*q.Limit { // so that a page does not need memory for all names
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
		page.Locks = append(page.Locks, StateOf(&found[i]))
	}
	return page, nil
}

// forceRelease ends the holds of a lock. With a condition it looks at the lock and ends only the holds that match. The
// driver compares each hold again in the step that ends it, so a newer hold never ends. If-Match: * only requires that
// somebody holds the lock.
func (g *Gateway) forceRelease(ctx context.Context, name, ifMatch string, b *forceBody) error {
	if err := g.may(ctx, rules.Force, name); err != nil {
		return err
	}
	d, ok := backend.As[backend.ForceReleaser](g.driver)
	if !ok || !g.can(backend.CapForceRelease) {
		return g.lacks(backend.CapForceRelease)
	}
	r := backend.ForceRequest{Name: name, Reason: b.Reason, Principal: scopeOf(requestOf(ctx))}
	meant := []backend.ForceRequest{r}
	if ifMatch != "" && ifMatch != "*" || b.FencingToken != 0 {
		var err error
		if meant, err = g.condition(ctx, ifMatch, b.FencingToken, r); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptTime)
	defer cancel()
	err := d.ForceRelease(ctx, meant[0])
	for _, more := range meant[1:] { // some of the holds may have ended in the meantime
		next := d.ForceRelease(ctx, more)
		if errors.Is(err, backend.ErrNotHeld) || err == nil && !errors.Is(next, backend.ErrNotHeld) {
			err = next
		}
	}
	switch {
	case errors.Is(err, backend.ErrNotHeld) && (meant[0].Conditional() || ifMatch != ""):
		return problem(codeChanged, changed)
	case errors.Is(err, backend.ErrNotHeld):
		return problem(codeNotLocked, "the lock is not held")
	case err == nil:
		g.audit(requestOf(ctx), audit.Event{
			Event: "force-release", Outcome: audit.Done, Name: name, Token: b.FencingToken, Reason: b.Reason,
		})
		g.o.Log.InfoContext(ctx, "a lock was force-released", logID(ctx), "lock", name, "reason", b.Reason,
			"client", principalOf(requestOf(ctx)))
	}
	return err
}

// changed is the detail of codeChanged.
const changed = "somebody else holds the lock by now, or nobody"

// condition looks at the name, and returns one request for each hold that matches. The service compares the hold again
// in the step that ends it.
func (g *Gateway) condition(ctx context.Context, ifMatch string, token uint64, r backend.ForceRequest) (
	meant []backend.ForceRequest, err error,
) {
	s, err := g.look(ctx, r.Name)
	if err != nil {
		return nil, err
	}
	if ifMatch != "" && ifMatch != "*" && ifMatch != etag(&s) {
		return nil, problem(codeChanged, changed)
	}
	for _, h := range s.Holders {
		if token != 0 && h.Token.Order() != token {
			continue
		}
		if r.Nonce, r.Token = h.Nonce, h.Token; !r.Conditional() {
			return nil, problem(codeUnsupported, "the backend cannot distinguish this hold from a later one; "+
				"If-Match: * ends whichever there is")
		}
		meant = append(meant, r)
	}
	if len(meant) == 0 {
		return nil, problem(codeChanged, changed)
	}
	return meant, nil
}
