package main

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/httpguard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func expectDocument(t *testing.T, o *story.Options, want string) {
	t.Helper()
	if storytest.Query(t, o, `SELECT count(*) FROM document WHERE text = '`+want+`'`) != 1 {
		t.Errorf("the document is not %q", want)
	}
}

func TestStaleClientIsRefused(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
				"ann takes the lock", "bob gets the lock", "ann wakes up", "is stale", "ann gets the lock")
			expectDocument(t, o, "milk, eggs, bread")
		})
	}
}

func TestUnsafeLosesAWrite(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	storytest.ExpectInOrder(t, storytest.Tell(t, o, tell), "bob gets the lock",
		"ann wakes up", "nothing stops this write")
	expectDocument(t, o, "milk, bread")
}

// TestWritesNeedAToken: without one there is no write, and a read is not refused.
func TestWritesNeedAToken(t *testing.T) {
	t.Parallel()
	o := &story.Options{Backend: "memory://" + rand.Text()}
	storytest.Tell(t, o, func(ctx context.Context, s *story.Story) error {
		url, err := serve(ctx, s)
		if err != nil {
			return err
		}
		client := s.HTTPClient()
		for method, want := range map[string]error{http.MethodGet: nil, http.MethodPut: fencing.ErrNoToken} {
			req, err := http.NewRequestWithContext(ctx, method, url+"/"+document, strings.NewReader("nothing"))
			if err != nil {
				return err
			}
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			if err := httpguard.ErrorFrom(resp); !errors.Is(err, want) {
				t.Errorf("%s is answered with %s, %v; want %v", method, resp.Status, err, want)
			}
			resp.Body.Close()
		}
		return nil
	})
	expectDocument(t, o, "milk")
}
