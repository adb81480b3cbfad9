// This file has the calls of observers and operators: holders, changes, and ForceRelease. Look and List read the view
// held, which shows only holds on sessions that live by the database's clock. Watch follows the table of changes,
// which the database writes for a name only while there are readers: a log of everything would cost every grant a row,
// although most names never have readers.
//
// Calls that are not repeated (see once) first ping their connection, so that they do not fail on a pooled connection
// that has ended.

package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// heldColumns selects the first columns of heldRow.
const heldColumns = `select name, owner, hold_id, kind::int, permits,
	coalesce((select limit_n from fencelock.holds o where o.name = h.name and o.token = h.token limit 1), 0),
	token, since, coalesce(expires_in_ms, 0), coalesce(metadata, '{}')::text, ` + nonceField

// heldRow reads a row of heldColumns and the columns behind them: the name, and one of its holders. The token is
// marked like the grant's token, so that both compare as equal.
func heldRow(rows pgx.Rows, more ...any) (name string, h backend.Holder, err error) {
	var kind int
	var token, left int64
	var metadata, nonce string
	err = rows.Scan(append([]any{
		&name, &h.Owner, &h.HoldID, &kind, &h.Permits, &h.Limit, &token, &h.Since, &left, &metadata, &nonce,
	}, more...)...)
	if err != nil {
		return "", h, err
	}
	h.Kind = backend.Kind(kind)
	h.Token, h.Nonce = tokenOf(h.Kind, token), nonceOf(nonce)
	h.ExpiresIn = time.Duration(left) * time.Millisecond
	if metadata != "{}" {
		err = json.Unmarshal([]byte(metadata), &h.Metadata)
	}
	return name, h, err
}

// waiterRow reads a place in a queue.
func waiterRow(rows pgx.Rows) (w backend.Waiter, err error) {
	var kind int
	err = rows.Scan(&w.Owner, &w.HoldID, &kind, &w.Permits, &w.Limit)
	w.Kind = backend.Kind(kind)
	return w, err
}

// Look returns the holders of a name and the number of waiters. From then on the database keeps the changes of the
// name, for ten minutes, so that Watch can follow State.Revision without a gap. ExpiresIn is the time until the hold
// expires by the database's clock, unless it is renewed. A free name is no error. Several statements read the state:
// a change between two of them shows in the later one, and Watch repeats it. Errors wrap
// backend.ErrUnavailable, ErrMisconfigured, ErrHistoryLost, ErrClosed, or ctx's error.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	if err := d.enterFor(ctx, name); err != nil {
		return backend.State{}, callError("look", name, err)
	}
	defer d.gate.Leave()
	// An unrepeated call first pings its connection.
	ctx = context.WithValue(ctx, once{}, true)
	st := backend.State{Name: name}
	// The revision first: Watch repeats a change between the two statements, and does not miss it.
	err := d.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&st.Revision, &st.Waiters) }, d.sql.look, name)
	if err == nil {
		err = d.query(ctx, func(rows pgx.Rows) error {
			_, h, err := heldRow(rows)
			st.Holders = append(st.Holders, h)
			return err
		}, d.sql.holders, name)
	}
	if err == nil && st.Waiters > 0 {
		err = d.query(ctx, func(rows pgx.Rows) error {
			w, err := waiterRow(rows)
			st.Queue = append(st.Queue, w)
			return err
		}, d.sql.queue, name, backend.MaxQueue)
	}
	st.Held = len(st.Holders) > 0
	if err != nil {
		return backend.State{}, callError("look", name, err)
	}
	return st, nil
}

// listPage is the number of holds per page of List, so that no answer is long.
const listPage = 500

// List yields the names that begin with prefix and are held, in the order of their bytes, a page of 500 holds at a
// time; each page is read when it is needed, so that the names are not all of one instant. Revision is zero.
// The loop may stop at any time. An error ends it and is yielded last.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return d.ListAfter(ctx, prefix, "")
}

// ListAfter implements backend.Pager.
func (d *Driver) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		if err := d.enter(ctx); err != nil {
			yield(backend.State{}, callError("list", prefix, err))
			return
		}
		defer d.gate.Leave()
		ctx := context.WithValue(ctx, once{}, true)
		after := after // of this loop over it
		// Each page begins behind the last name of the one before, so that a page costs the same wherever it is.
		for {
			page, err := d.page(ctx, prefix, after)
			if err != nil {
				yield(backend.State{}, callError("list", prefix, err))
				return
			}
			for _, st := range page {
				if !yield(st, nil) {
					return
				}
				after = st.Name
			}
			if len(page) == 0 {
				return
			}
		}
	}
}

// page returns the states of some names after one, each with all of its holds: a last name that may have more than
// fitted is left to the next page, unless it is the only one.
func (d *Driver) page(ctx context.Context, prefix, after string) (page []backend.State, err error) {
	// n counts rows and not names: a name may have many holders.
	n := 0
	err = d.query(ctx, func(rows pgx.Rows) error {
		waiters := 0
		name, h, err := heldRow(rows, &waiters)
		if n++; len(page) == 0 || page[len(page)-1].Name != name {
			page = append(page, backend.State{Name: name, Held: true, Waiters: waiters})
		}
		last := &page[len(page)-1]
		last.Holders = append(last.Holders, h)
		return err
	}, d.sql.list, after, prefix, listPage)
	if n == listPage && len(page) > 1 {
		page = page[:len(page)-1] // the last name may have more holds than fitted
	}
	return page, err
}

// Watch yields the changes of a name from now on, or since a revision that Look returned at most ten minutes ago, in
// order and without a gap. It asks the database four to five times a second, each time for all new changes; only
// waiters and holders are notified.
//
// An expired revision is backend.ErrCompacted; the caller calls Look and watches from there. A broken connection does
// not end the loop. The loop ends with an error when ctx ends, or with Close, and without one when the caller stops
// it.
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		fail := func(err error) { yield(backend.Change{}, callError("watch", name, err)) }
		if err := d.enterFor(ctx, name); err != nil {
			fail(err)
			return
		}
		defer d.gate.Leave()
		// at is the revision of the last change that was yielded; 0 means from now on.
		at := int64(since)
		for first := true; ; first = false {
			changes, revision, compacted, err := d.changes(ctx, name, at)
			switch {
			case first && since == 0 && err == nil:
				// The first answer only sets the current revision.
				at = revision
			case err == nil && compacted:
				fail(fmt.Errorf("%w: revision %d of %d", backend.ErrCompacted, at, revision))
				return
			case err != nil && (ctx.Err() != nil || !passing(err)):
				fail(err)
				return
			case err == nil:
				for _, c := range changes {
					if !yield(c, nil) {
						return
					}
					// at advances after the loop's body: a caller that stops there can continue from this change.
					at = int64(c.Revision)
				}
			}
			// Ends early with ctx and with Close.
			if !d.pause(ctx, watchEvery*3/4+rand.N(watchEvery/2)) {
				if d.gate.Closed() {
					fail(backend.ErrClosed)
				} else {
					fail(ctx.Err())
				}
				return
			}
		}
	}
}

// watchEvery is the average pause of a watch; each pause is drawn between three and five quarters of it, so that
// watches do not coincide.
const watchEvery = 220 * time.Millisecond

// passing reports whether a watch continues after err.
func passing(err error) bool {
	return again(err) || unsent(err) || rolledBack(err)
}

// changes reads the changes of a name since a revision, and wakes the waiters that reading found due. The columns
// come as arrays, one row in all, since news is an array of a composite type that pgx does not know.
func (d *Driver) changes(ctx context.Context, name string, since int64) (
	out []backend.Change, revision int64, compacted bool, err error,
) {
	var types, owners, reasons, wake []string
	var kinds []int
	var tokens, revisions []int64
	err = d.query(ctx, func(rows pgx.Rows) error {
		return rows.Scan(&compacted, &revision, &wake, &types, &owners, &kinds, &tokens, &reasons, &revisions)
	}, d.sql.changes, name, since, d.clockKnown())
	if err != nil {
		return nil, 0, false, err
	}
	// The statement settles the name, and may have granted to its queue.
	d.wake(wake)
	for i := range types {
		out = append(out, backend.Change{
			Type: backend.ChangeType(types[i]), Name: name, Owner: owners[i], Reason: reasons[i],
			Token: tokenOf(backend.Kind(kinds[i]), tokens[i]), Revision: uint64(revisions[i]),
		})
	}
	return out, revision, compacted, d.addAuthors(ctx, name, out)
}

// addAuthors adds the callers of the forced releases among changes. It is a separate statement: the statement of the
// changes may have waited for a forced release, and its snapshot is older than the results of its function.
func (d *Driver) addAuthors(ctx context.Context, name string, changes []backend.Change) error {
	var forced []int64
	for _, c := range changes {
		if c.Type == backend.ChangeForceReleased {
			forced = append(forced, int64(c.Token.Order()))
		}
	}
	if len(forced) == 0 {
		return nil
	}
	return d.query(ctx, func(rows pgx.Rows) error {
		var token int64
		var by, principal string
		err := rows.Scan(&token, &by, &principal)
		for i := range changes {
			if c := &changes[i]; c.Type == backend.ChangeForceReleased && int64(c.Token.Order()) == token {
				c.By, c.Principal = by, principal
			}
		}
		return err
	}, d.sql.authors, name, forced)
}

// ForceRelease ends the holds that r names, in the transaction that compares them and grants to the head of the queue.
// The victims get ReasonForceReleased by a notification, or at their next renewal; the database keeps the reason for
// an hour. If no hold of the name matches, the error is backend.ErrNotHeld. A call without an answer is ErrUnknown
// and is not repeated by the driver: without a condition, a second try could take the lock from the next holder.
func (d *Driver) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	err := kit.ValidateForce(d.Describe(), &r)
	if err == nil {
		err = d.enter(ctx)
	}
	if err != nil {
		return callError("force-release", r.Name, err)
	}
	defer d.gate.Leave()
	a, err := d.ask(context.WithValue(ctx, once{}, true), d.sql.force, r.Name, r.Reason, r.By, r.Principal,
		r.Nonce.String(), int64(r.Token.Order()), d.clockKnown())
	if err == nil && a.state != "ended" {
		err = &backend.NotHeldError{Name: r.Name}
	}
	return callError("force-release", r.Name, err)
}
