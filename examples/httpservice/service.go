package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"

	"github.com/fencelock/fencelock/examples/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// most is how long a document may be.
const most = 1 << 20

// service keeps a document in a database.
type service struct {
	db    *sql.DB
	guard *sqlguard.Guard // nil: requests are not checked
}

// serve starts the service, and returns its URL.
func serve(ctx context.Context, s *story.Story) (url string, err error) {
	h := &service{}
	if h.db, err = s.Database(ctx); err != nil {
		return "", err
	}
	if !s.Unsafe {
		if h.guard, err = story.Guard(ctx, h.db, sqlguard.SQLite); err != nil {
			return "", err
		}
	}
	_, err = h.db.ExecContext(ctx, `CREATE TABLE document (text TEXT); INSERT INTO document VALUES ('milk')`)
	if err != nil {
		return "", err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /"+document, h.get)
	mux.HandleFunc("PUT /"+document, h.put)
	if s.Unsafe {
		return s.Serve(mux)
	}
	return s.Serve(httpguard.Middleware(nil, resource)(mux)) // without a guard: the check is in the transaction
}

// resource is httpguard.Path, and tells more: a holder's reads are checked, too. From that check on nobody who had the lock
// earlier writes any more, and what was read stays as it is. Those who only read send no token.
func resource(r *http.Request) (string, error) {
	if r.Header.Get(httpguard.TokenHeader) != "" {
		return r.URL.Path, nil
	}
	return httpguard.Path(r)
}

func (h *service) get(w http.ResponseWriter, r *http.Request) {
	var text string
	err := h.inTx(r, func(tx *sql.Tx) error {
		return tx.QueryRowContext(r.Context(), `SELECT text FROM document`).Scan(&text)
	})
	answer(w, text, err)
}

func (h *service) put(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	err = h.inTx(r, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(r.Context(), `UPDATE document SET text = ?`, string(text))
		return err
	})
	answer(w, "", err)
}

// inTx runs f in a transaction, after the check of the request's claim. All requests that write have one.
func (h *service) inTx(r *http.Request, f func(*sql.Tx) error) error {
	return story.InTx(r.Context(), h.db, func(tx *sql.Tx) error {
		if claim, ok := fencing.FromContext(r.Context()); ok && h.guard != nil {
			if err := fencing.Check(r.Context(), h.guard.In(tx), claim); err != nil {
				return err
			}
		}
		return f(tx)
	})
}

func answer(w http.ResponseWriter, text string, err error) {
	switch {
	case httpguard.Refuse(w, err):
	case err != nil:
		http.Error(w, "the database does not answer", http.StatusInternalServerError)
	default:
		fmt.Fprint(w, text)
	}
}
