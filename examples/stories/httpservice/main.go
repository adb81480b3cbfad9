// Command httpservice lets an HTTP service refuse the clients that have lost their lock.
//
//	go run ./examples/stories/httpservice
//	go run ./examples/stories/httpservice -unsafe
//
// Tier: correctness. Clients change a document: they take a lock, read, and write the whole. The write of a client that
// was paused for longer than its lease, or had its request under way for that long, overwrites the changes of others
// since then. The service takes no locks, and need not know the lock service: each request carries the token of the
// client's lease (package httpguard), and the service compares it in the transaction in which it reads or writes. A
// stale client is answered with 409, and learns it as the error fencing.ErrStale.
//
// With -unsafe the lock is of the efficiency tier, and the service does not check: the late write succeeds, and bob's
// is gone.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
)

const document = "documents/shopping" // the lock's name, and the path of its resource

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	url, err := serve(ctx, s)
	if err != nil {
		return err
	}
	tier := fencelock.Correctness
	if s.Unsafe {
		tier = fencelock.Efficiency
	}
	ann, err := newClient(ctx, s, tier, "ann", url)
	if err != nil {
		return err
	}
	bob, err := newClient(ctx, s, tier, "bob", url)
	if err != nil {
		return err
	}

	// A paused process does not renew. NoRenew stands for that part of a pause.
	ttl := story.ShortTTL(ann.locks)
	late, err := ann.locks.Acquire(ctx, document, fencelock.TTL(ttl), fencelock.NoRenew())
	if err != nil {
		return err
	}
	read, err := ann.call(ctx, late, http.MethodGet, "")
	if err != nil {
		return err
	}
	s.Tell("ann takes the lock for %v (token %v), reads %q, wants to add bread, and is paused", ttl, late.Token(), read)
	if err := bob.add(ctx, ", eggs"); err != nil { // waits until ann's lease has run out
		return err
	}

	s.Tell("ann wakes up and puts %q (token %v)", read+", bread", late.Token()) // she looks at neither clock nor lease
	_, err = ann.call(ctx, late, http.MethodPut, read+", bread")
	if s.Unsafe {
		if err != nil {
			return err
		}
		s.Tell("nothing stops this write: no token, no check")
		return bob.expect(ctx, "milk, bread", "bob's eggs are gone, and nobody was notified")
	}
	if !errors.Is(err, fencing.ErrStale) {
		return fmt.Errorf("ann's late write: %v; want %v", err, fencing.ErrStale)
	}
	s.Tell("the service refuses it: %v", err)
	if err := ann.add(ctx, ", bread"); err != nil { // anew, with a new lease
		return err
	}
	return bob.expect(ctx, "milk, eggs, bread", "nothing is lost")
}

// client is a process that changes documents.
type client struct {
	story *story.Story
	name  string
	locks *fencelock.Client
	http  *http.Client
	url   string
}

func newClient(ctx context.Context, s *story.Story, tier fencelock.Tier, name, url string) (*client, error) {
	locks, err := s.Open(ctx, tier, name)
	if err != nil {
		return nil, err
	}
	caller := s.HTTPClient()
	caller.Transport = &httpguard.Transport{Base: caller.Transport} // sends the token in a request's context
	return &client{story: s, name: name, locks: locks, http: caller, url: url}, nil
}

// add shows the change of a document: read and write under the lock, and pass the token with both.
func (c *client) add(ctx context.Context, text string) error {
	return c.locks.Do(ctx, document, func(ctx context.Context, lease *fencelock.Lease) error {
		read, err := c.call(ctx, lease, http.MethodGet, "")
		if err != nil {
			return err
		}
		c.story.Tell("%s gets the lock (token %v) and puts %q", c.name, lease.Token(), read+text)
		_, err = c.call(ctx, lease, http.MethodPut, read+text)
		return err
	})
}

// call makes one request, with the token of lease, or without a token if lease is nil.
func (c *client) call(ctx context.Context, lease *fencelock.Lease, method, body string) (string, error) {
	if lease != nil {
		ctx = fencing.NewOutgoingContext(ctx, lease.Claim("/"+document))
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+"/"+document, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if err := httpguard.ErrorFrom(resp); err != nil {
		return "", err
	}
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s /%s: %s: %s", method, document, resp.Status, text)
	}
	return string(text), err
}

// expect looks at the document, which takes no lock.
func (c *client) expect(ctx context.Context, want, comment string) error {
	got, err := c.call(ctx, nil, http.MethodGet, "")
	c.story.Tell("the document is %q: %s", got, comment)
	if err == nil && got != want {
		err = fmt.Errorf("the document is %q; want %q", got, want)
	}
	return err
}
