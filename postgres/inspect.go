package postgres

// The calls of observers and operators. Look and List read the view held, which shows only holds on sessions that live
// by the database's clock. Watch follows the table of changes, which the database writes for a name only while there
// are readers: a log of everything would cost every grant a row, although most names never have readers.
//
// Calls that are not repeated (see once) first ping their connection, so that they do not fail on a pooled connection
// that has ended.

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
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

// Look is engine.Inspector's. From then on the database keeps the changes of the name, for ten minutes, so that Watch
// can follow State.Revision without a gap. Several statements read the state: a change between two of them shows in the
// later one, and Watch repeats it.
func (s *service) Look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	ctx = context.WithValue(ctx, once{}, true)
	st := backend.State{Name: name}
	// The revision first: Watch repeats a change between the two statements, and does not miss it.
	err := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&st.Revision, &st.Waiters) }, s.sql.look, name)
	if err == nil {
		err = s.query(ctx, func(rows pgx.Rows) error {
			_, h, err := heldRow(rows)
			st.Holders = append(st.Holders, h)
			return err
		}, s.sql.holders, name)
	}
	if err == nil && st.Waiters > 0 {
		err = s.query(ctx, func(rows pgx.Rows) error {
			w, err := waiterRow(rows)
			st.Queue = append(st.Queue, w)
			return err
		}, s.sql.queue, name, backend.MaxQueue)
	}
	st.Held = len(st.Holders) > 0
	return st, named(name, err)
}

// listPage is the number of holds per page, so that no answer is long.
const listPage = 500

// Names is engine.Inspector's: a page in the order of the names' bytes, which begins behind a name. A last name that
// may have more holds than fitted is left to the next page, unless it is the only one.
func (s *service) Names(
	ctx context.Context, prefix, after string,
) (page []backend.State, next string, err error) {
	ctx = context.WithValue(ctx, once{}, true)
	n := 0 // rows: a name may have many holders
	err = s.query(ctx, func(rows pgx.Rows) error {
		waiters := 0
		name, h, err := heldRow(rows, &waiters)
		if n++; len(page) == 0 || page[len(page)-1].Name != name {
			page = append(page, backend.State{Name: name, Held: true, Waiters: waiters})
		}
		last := &page[len(page)-1]
		last.Holders = append(last.Holders, h)
		return err
	}, s.sql.list, after, prefix, listPage)
	if n < listPage {
		return page, "", err
	}
	if len(page) > 1 {
		page = page[:len(page)-1]
	}
	return page, page[len(page)-1].Name, err
}

// Feed is engine.Feeds's.
func (s *service) Feed(name string, _ func()) engine.Feed { return &feed{s: s, name: name} }

// feed is the table of changes of one name.
type feed struct {
	s     *service
	name  string
	begun atomic.Int64 // the revision from which it reads on, without a revision of the caller's
}

// Every is engine.Polled's: only waiters and holders are notified.
func (f *feed) Every() time.Duration { return watchEvery }

// Stop is engine.Feed's.
func (f *feed) Stop() {}

// Read is engine.Feed's.
func (f *feed) Read(ctx context.Context, since uint64) ([]backend.Change, error) {
	if err := backend.ValidateName(f.name); err != nil {
		return nil, err
	}
	at := int64(since)
	if since == 0 {
		at = f.begun.Load()
	}
	changes, revision, compacted, err := f.s.changes(ctx, f.name, at)
	f.s.flush(ctx)
	switch {
	case err != nil:
		return nil, named(f.name, err)
	case at == 0: // from now on
		f.begun.Store(revision)
		return nil, nil
	case compacted:
		return nil, fmt.Errorf("%w: revision %d of %d", backend.ErrCompacted, at, revision)
	}
	return changes, nil
}

// watchEvery is the average pause of a watch.
const watchEvery = 220 * time.Millisecond

// changes reads the changes of a name since a revision, and wakes the waiters that reading found due. The columns
// come as arrays, one row in all, since news is an array of a composite type that pgx does not know.
func (s *service) changes(ctx context.Context, name string, since int64) (
	out []backend.Change, revision int64, compacted bool, err error,
) {
	var types, owners, reasons, wake []string
	var kinds []int
	var tokens, revisions []int64
	err = s.query(ctx, func(rows pgx.Rows) error {
		return rows.Scan(&compacted, &revision, &wake, &types, &owners, &kinds, &tokens, &reasons, &revisions)
	}, s.sql.changes, name, since, s.clockKnown())
	if err != nil {
		return nil, 0, false, err
	}
	// The statement settles the name, and may have granted to its queue.
	s.wake(wake)
	for i := range types {
		out = append(out, backend.Change{
			Type: backend.ChangeType(types[i]), Name: name, Owner: owners[i], Reason: reasons[i],
			Token: tokenOf(backend.Kind(kinds[i]), tokens[i]), Revision: uint64(revisions[i]),
		})
	}
	return out, revision, compacted, s.addAuthors(ctx, name, out)
}

// addAuthors adds the callers of the forced releases among changes. It is a separate statement: the statement of the
// changes may have waited for a forced release, and its snapshot is older than the results of its function.
func (s *service) addAuthors(ctx context.Context, name string, changes []backend.Change) error {
	var forced []int64
	for _, c := range changes {
		if c.Type == backend.ChangeForceReleased {
			forced = append(forced, int64(c.Token.Order()))
		}
	}
	if len(forced) == 0 {
		return nil
	}
	return s.query(ctx, func(rows pgx.Rows) error {
		var token int64
		var by, principal string
		err := rows.Scan(&token, &by, &principal)
		for i := range changes {
			if c := &changes[i]; c.Type == backend.ChangeForceReleased && int64(c.Token.Order()) == token {
				c.By, c.Principal = by, principal
			}
		}
		return err
	}, s.sql.authors, name, forced)
}

// Force is engine.Forcer's: the transaction that compares the holds and ends them grants to the head of the queue. The
// victims get ReasonForceReleased by a notification, or at their next renewal; the database keeps the reason for an
// hour.
func (s *service) Force(ctx context.Context, r backend.ForceRequest) (int, error) {
	a, err := s.ask(context.WithValue(ctx, once{}, true), s.sql.force, r.Name, r.Reason, r.By, r.Principal,
		r.Nonce.String(), int64(r.Token.Order()), s.clockKnown())
	s.flush(ctx)
	if err != nil || a.state != "ended" {
		return 0, named(r.Name, err)
	}
	return 1, nil
}
