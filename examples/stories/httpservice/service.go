package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// most is the maximum length of a document.
const most = 1 << 20

// service keeps a document in a database.
type service struct {
	db    *sql.DB
	guard *sqlguard.Guard // nil: requests are not checked
}

// serve starts the service, and returns its URL.
func serve(ctx context.Context, s *story.Story) (url string, err error) {
	h := &service{}
	if h.db, h.guard, err = s.GuardedDatabase(ctx); err != nil {
		return "", err
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
	return s.Serve(httpguard.Middleware(nil, httpguard.Path)(mux)) // without a guard: the check is in the transaction
}

func (h *service) get(w http.ResponseWriter, r *http.Request) {
	var text string
	read := func(tx *sql.Tx) error {
		return tx.QueryRowContext(r.Context(), `SELECT text FROM document`).Scan(&text)
	}
	err := error(nil)
	if _, holder := fencing.FromIncomingContext(r.Context()); holder {
		err = h.inTx(r, read)
	} else { // somebody who only reads
		err = story.Guarded(r.Context(), h.db, nil, nil, read)
	}
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

// inTx runs f in a transaction that shows the request's claims first. Without claims a guard refuses.
func (h *service) inTx(r *http.Request, f func(*sql.Tx) error) error {
	claims, _ := fencing.FromIncomingContext(r.Context())
	return story.Guarded(r.Context(), h.db, h.guard, claims, f)
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
