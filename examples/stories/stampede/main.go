// Command stampede lets one reader rebuild a page that has left the cache, while all readers want it.
//
//	go run ./examples/stories/stampede
//	go run ./examples/stories/stampede -unsafe
//
// Tier: efficiency. A page built twice is the same page, and wastes work. So any driver will do, and the lock
// decides nothing: the reader that gets it rechecks the cache, and if it cannot be acquired, because its service
// is down or its holder takes too long, the reader builds the page itself. An outage of the lock service is then a slow
// hour and not an outage.
//
// With -unsafe there is no lock: all readers find the cache empty, and all of them run the query that it is there to
// spare.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

const (
	front   = "pages/front" // the page, and the lock on building it
	readers = 6
)

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	db, err := open(ctx, s)
	if err != nil {
		return err
	}
	var all []*reader
	for i := range readers {
		locks, err := s.Open(ctx, fencelock.Efficiency, fmt.Sprintf("reader-%d", i))
		if err != nil {
			return err
		}
		all = append(all, &reader{story: s, number: i, locks: locks, db: db})
	}
	s.Tell("the front page has left the cache, and %d readers want it at once", readers)
	err = story.Together(len(all), func(i int, meet func()) error {
		page, err := all[i].page(ctx, meet)
		if err == nil && page != content {
			err = fmt.Errorf("reader %d got the page %q", i, page)
		}
		return err
	})
	if err != nil {
		return err
	}

	var builds int
	if err := db.QueryRowContext(ctx, `SELECT count(*) FROM builds`).Scan(&builds); err != nil {
		return err
	}
	if s.Unsafe {
		s.Tell("all have it; it was built %d times, %d of them for nothing", builds, builds-1)
	} else {
		s.Tell("all have it; it was built once")
	}
	if (builds == 1) == s.Unsafe {
		return fmt.Errorf("it was built %d times with -unsafe=%t", builds, s.Unsafe)
	}
	return nil
}

// reader is one request in one replica of the site.
type reader struct {
	story  *story.Story
	number int
	locks  *fencelock.Client
	db     *sql.DB // the cache, and the source of the page
}

// page returns the page from the cache, or builds it. The readers meet after a look into the empty cache.
func (r *reader) page(ctx context.Context, meet func()) (page string, err error) {
	page, err = r.cached(ctx)
	meet()
	if err != nil || page != "" {
		return page, err
	}
	if r.story.Unsafe {
		return r.build(ctx)
	}
	err = r.locks.Do(ctx, front, func(ctx context.Context, _ *fencelock.Lease) error {
		page, err = r.cached(ctx) // recheck: while this reader waited, another may have built it
		if err != nil || page != "" {
			return err
		}
		page, err = r.build(ctx)
		return err
	}, fencelock.WaitAtMost(30*time.Second)) // longer than a build takes
	if err != nil && ctx.Err() == nil {
		r.story.Tell("reader %d goes without the lock: %v", r.number, err)
		return r.build(ctx)
	}
	return page, err
}

// cached returns the page from the cache, empty if it is not there.
func (r *reader) cached(ctx context.Context) (page string, err error) {
	err = r.db.QueryRowContext(ctx, `SELECT page FROM cache WHERE name = ?`, front).Scan(&page)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return page, err
}

const content = "what took a minute to compute"

// build is the work to be spared. It keeps count.
func (r *reader) build(ctx context.Context) (page string, err error) {
	r.story.Tell("reader %d builds the page", r.number)
	if _, err := r.db.ExecContext(ctx, `INSERT INTO builds VALUES (?)`, r.number); err != nil {
		return "", err
	}
	_, err = r.db.ExecContext(ctx, `INSERT OR REPLACE INTO cache VALUES (?, ?)`, front, content)
	return content, err
}

func open(ctx context.Context, s *story.Story) (*sql.DB, error) {
	db, err := s.Database(ctx)
	if err != nil {
		return nil, err
	}
	_, err = db.ExecContext(ctx,
		`CREATE TABLE cache (name TEXT PRIMARY KEY, page TEXT); CREATE TABLE builds (reader INTEGER)`)
	return db, err
}
