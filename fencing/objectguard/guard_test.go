package objectguard_test

import (
	"bytes"
	"context"
	"crypto/md5"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/objectguard"
)

const space = "cluster 1"

func TestMain(m *testing.M) {
	guardtest.RunChild(map[string]guardtest.Open{"object": open})
	goleak.VerifyTestMain(m)
}

// bucket is a server with the conditional writes of S3: the ETag is the MD5 of the content and of nothing else. Objects
// are files, so that they outlive it.
type bucket struct {
	dir    string
	ignore bool          // the conditions
	torn   chan struct{} // if it is there, two writes meet in it between the look at their conditions and the writing

	mu      sync.Mutex
	swallow int // so many answers to PUTs get lost after they were carried out
}

func (b *bucket) file(key string) string {
	return filepath.Join(b.dir, fmt.Sprintf("%x", md5.Sum([]byte(key))))
}

func (b *bucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	file := b.file(r.URL.EscapedPath())
	old, err := os.ReadFile(file)
	exists := err == nil
	etag := func(content []byte) string { return fmt.Sprintf(`"%x"`, md5.Sum(content)) }
	switch r.Method {
	case http.MethodGet:
		if !exists {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("ETag", etag(old))
		w.Write(old)
	case http.MethodPut:
		match := r.Header.Get("If-Match")
		switch {
		case b.ignore:
		case match != "" && !exists:
			w.WriteHeader(http.StatusNotFound)
			return
		case match != "" && match != etag(old), r.Header.Get("If-None-Match") == "*" && exists:
			w.WriteHeader(http.StatusPreconditionFailed)
			return
		}
		if b.torn != nil {
			b.mu.Unlock()
			select {
			case b.torn <- struct{}{}:
			case <-b.torn:
			case <-time.After(20 * time.Millisecond): // nobody else is there
			}
			b.mu.Lock()
		}
		if err := errors.Join(os.WriteFile(file+".new", body, 0o600), os.Rename(file+".new", file)); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		if b.swallow > 0 {
			b.swallow--
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("ETag", etag(body))
	case http.MethodDelete:
		files := []string{file}
		if strings.HasSuffix(r.URL.Path, "/") {
			files, err = filepath.Glob(filepath.Join(b.dir, "*"))
		}
		for _, each := range files {
			err = errors.Join(err, os.Remove(each))
		}
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
	default:
		w.WriteHeader(http.StatusMethodNotAllowed)
	}
}

// open returns a client of the bucket at the URL.
func open(_ context.Context, url string) (*guardtest.Client, error) {
	store, client, err := bucketAt(url)
	if err != nil {
		return nil, err
	}
	guard, err := objectguard.New(store, &objectguard.Options{Prefix: "guarded/"})
	if err != nil {
		return nil, err
	}
	return &guardtest.Client{
		Keeper: guard,
		SetTerms: func(ctx context.Context, text string) error {
			const key = "guarded/fencing-terms"
			if text == "" {
				return remove(ctx, client, url+"/"+key)
			}
			_, tag, err := store.Get(ctx, key)
			if err != nil && !errors.Is(err, objectguard.ErrNotExist) {
				return err
			}
			return store.Put(ctx, key, []byte("fencing-terms "+rand.Text()+" "+text+"\n"), tag)
		},
		Wipe: wipe(client, url),
		Pinned: func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error {
			pinned, err := objectguard.New(store, &objectguard.Options{Prefix: "guarded/", ID: id})
			if err != nil {
				return err
			}
			return pinned.Check(ctx, c)
		},
		Update: func(ctx context.Context, claims fencing.Claims, resource string, f guardtest.Change) error {
			for _, c := range claims.List() {
				if c.Resource != resource { // an object is written under one claim, and the others are shown before
					if err := guard.Check(ctx, c); err != nil {
						return err
					}
				}
			}
			for _, c := range claims.List() {
				if c.Resource == resource {
					return guard.Update(ctx, c, func(old []byte) ([]byte, error) {
						value, err := f(ctx, string(old))
						return []byte(value), err
					})
				}
			}
			return errors.New("no claim names the resource")
		},
		Check: func(ctx context.Context, c fencing.Claim) error { return guard.Check(ctx, c) },
		Write: func(ctx context.Context, c fencing.Claim, value string, _ func()) error {
			return guard.Put(ctx, c, []byte(value))
		},
		Read: func(ctx context.Context, resource string) (string, error) {
			content, _, err := guard.Get(ctx, resource)
			if errors.Is(err, objectguard.ErrNotExist) {
				return "", nil
			}
			return string(content), err
		},
		Close: func() error { client.CloseIdleConnections(); return nil },
	}, nil
}

// remove deletes the object at the URL, or all of a test's bucket.
func remove(ctx context.Context, client *http.Client, url string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodDelete, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(r)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func wipe(client *http.Client, url string) func(context.Context) error {
	if os.Getenv(s3) != "" {
		return nil // a real server does not empty a bucket with one request
	}
	return func(ctx context.Context) error { return remove(ctx, client, url+"/") }
}

func create(t *testing.T, g *objectguard.Guard) {
	t.Helper()
	if err := g.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestGuard(t *testing.T) {
	server := httptest.NewServer(&bucket{dir: t.TempDir()})
	defer server.Close()
	store, client, err := bucketAt(server.URL + "/bucket")
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	guard, err := objectguard.New(store, &objectguard.Options{Prefix: "guarded/"})
	if err != nil {
		t.Fatal(err)
	}
	create(t, guard)
	guardtest.Run(t, guardtest.Harness{
		Name: "object", Open: open, Address: server.URL + "/bucket", Space: space, Clients: 4, Checks: 500,
		Apart: true, Ordered: true, Blind: true,
		Restart: func(testing.TB) { server.CloseClientConnections() }, // it keeps nothing but files
	})
}

func newGuard(t *testing.T, b *bucket, o *objectguard.Options) (*objectguard.Guard, *objectguard.HTTP) {
	t.Helper()
	server := httptest.NewServer(b)
	t.Cleanup(server.Close)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	store := &objectguard.HTTP{URL: server.URL + "/bucket/", Client: client}
	g, err := objectguard.New(store, o)
	if err != nil {
		t.Fatal(err)
	}
	if b.torn == nil && !b.ignore {
		create(t, g)
	}
	return g, store
}

// overtaken is a Store in which somebody writes between a holder's look and its write.
type overtaken struct {
	objectguard.Store
	between func()
}

func (s *overtaken) Put(ctx context.Context, key string, content []byte, tag string) error {
	if between := s.between; between != nil {
		s.between = nil
		between()
	}
	return s.Store.Put(ctx, key, content, tag)
}

// The successor writes the very bytes that were there before, so that a hash of them would tell nothing.
func TestTheSameContentIsAnotherObject(t *testing.T) {
	ctx := t.Context()
	guard, store := newGuard(t, &bucket{dir: t.TempDir()}, nil)
	put := func(g *objectguard.Guard, token fencing.Token, content string) error {
		return g.Put(ctx, fencing.Claim{Resource: "a", Token: token}, []byte(content))
	}
	if err := put(guard, 33, "same"); err != nil {
		t.Fatal(err)
	}
	slow, err := objectguard.New(&overtaken{store, func() {
		if err := put(guard, 34, "same"); err != nil {
			t.Error(err)
		}
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := put(slow, 33, "stale"); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("a holder that was overtaken: %v, want ErrStale", err)
	}
	if content, token, err := guard.Get(ctx, "a"); err != nil || string(content) != "same" || token != 34 {
		t.Errorf("the object is %q of %v, %v", content, token, err)
	}
}

func TestCheckKeepsTheContent(t *testing.T) {
	ctx := t.Context()
	guard, _ := newGuard(t, &bucket{dir: t.TempDir()}, nil)
	want := []byte("two\nlines\x00")
	if err := guard.Put(ctx, fencing.Claim{Resource: "a/b c", Token: 5}, want); err != nil {
		t.Fatal(err)
	}
	if err := guard.Check(ctx, fencing.Claim{Resource: "a/b c", Token: 6}); err != nil {
		t.Fatal(err)
	}
	if content, token, err := guard.Get(ctx, "a/b c"); err != nil || !bytes.Equal(content, want) || token != 6 {
		t.Errorf("after a check the object is %q of %v, %v", content, token, err)
	}
	if _, _, err := guard.Get(ctx, "nothing"); !errors.Is(err, objectguard.ErrNotExist) {
		t.Errorf("Get of nothing: %v, want ErrNotExist", err)
	}
}

// A store that repeats a write after a lost answer finds its own object in the way.
func TestLostAnswer(t *testing.T) {
	b := &bucket{dir: t.TempDir(), swallow: 1}
	server := httptest.NewServer(b)
	defer server.Close()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	guard, err := objectguard.New(&repeating{&objectguard.HTTP{URL: server.URL, Client: client}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	create(t, guard) // its answer is lost
	b.mu.Lock()
	b.swallow = 1
	b.mu.Unlock()
	if err := guard.Put(t.Context(), fencing.Claim{Resource: "a", Token: 5}, []byte("x")); err != nil {
		t.Errorf("a write that was carried out twice: %v", err)
	}
	b.mu.Lock()
	b.swallow = 1
	b.mu.Unlock()
	guard, err = objectguard.New(&objectguard.HTTP{URL: server.URL, Client: client}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := guard.Put(t.Context(), fencing.Claim{Resource: "a", Token: 6}, []byte("y")); err == nil ||
		errors.Is(err, fencing.ErrStale) {
		t.Errorf("a write without an answer: %v, want the connection's error", err)
	}
}

type repeating struct{ objectguard.Store }

func (s *repeating) Put(ctx context.Context, key string, content []byte, tag string) error {
	err := s.Store.Put(ctx, key, content, tag)
	if err != nil && !errors.Is(err, objectguard.ErrChanged) {
		err = s.Store.Put(ctx, key, content, tag)
	}
	return err
}

func TestForeignObject(t *testing.T) {
	ctx := t.Context()
	guard, store := newGuard(t, &bucket{dir: t.TempDir()}, nil)
	for i, content := range []string{
		"", "hello", "fencing-token x y z\nhello", "fencing-token 0 5 0 nonce\nhello",
		"fencing-token 0 5 0 nonce half\n", "fencing-token x full 0 0 5 - 0 9\n", "fencing-token x half 0 0 5 - 0\n",
	} {
		name := fmt.Sprint("foreign", i)
		if err := store.Put(ctx, name, []byte(content), ""); err != nil {
			t.Fatal(err)
		}
		if err := guard.Put(
			ctx, fencing.Claim{Resource: name, Token: 9}, nil,
		); !errors.Is(err, objectguard.ErrForeign) {
			t.Errorf("an object %q: %v, want ErrForeign", content, err)
		}
		if err := guard.Check(ctx, fencing.Claim{Resource: name, Token: 0}); !errors.Is(err, fencing.ErrNoToken) {
			t.Errorf("an object %q, and no token: %v, want ErrNoToken", content, err)
		}
	}
}

// stubborn is a Store with a guard's terms that refuses every write, as S3 may where conditional writes meet.
type stubborn struct{ puts int }

func (s *stubborn) Get(_ context.Context, key string) ([]byte, string, error) {
	if key == "fencing-terms" {
		return []byte("fencing-terms x 2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 =\n"), "tag", nil
	}
	return nil, "", objectguard.ErrNotExist
}

func (s *stubborn) Put(context.Context, string, []byte, string) error {
	s.puts++
	return objectguard.ErrChanged
}

func TestStubbornStoreIsNotPressed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stubborn{}
		guard, err := objectguard.New(s, nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := guard.Check(ctx, fencing.Claim{Resource: "a", Token: 5}); !errors.Is(err, objectguard.ErrRefuses) {
			t.Errorf("a store that refuses every write: %v, want ErrRefuses", err)
		}
		if s.puts < 5 || s.puts > 40 {
			t.Errorf("it was asked %d times in 10 s, want 5 to 40", s.puts)
		}
	})
}

func TestProbe(t *testing.T) {
	for _, c := range []struct {
		store *bucket
		want  error
	}{
		{&bucket{}, nil},
		{&bucket{ignore: true}, objectguard.ErrUnconditional},
		{&bucket{torn: make(chan struct{})}, objectguard.ErrNotAtomic},
	} {
		c.store.dir = t.TempDir()
		_, store := newGuard(t, c.store, nil)
		for range 2 { // the second time the object is there
			if err := objectguard.Probe(t.Context(), store, "probe"); !errors.Is(err, c.want) {
				t.Errorf("probe: %v, want %v", err, c.want)
			}
		}
	}
}

func TestHTTPStore(t *testing.T) {
	status, etag := http.StatusForbidden, ""
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Extra") != "sent" {
			t.Error("the extra header is missing")
		}
		w.Header().Set("ETag", etag)
		w.WriteHeader(status)
		io.WriteString(w, strings.Repeat("x", 100))
	}))
	defer server.Close()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	store := &objectguard.HTTP{URL: server.URL, Client: client, Header: http.Header{"x-extra": {"sent"}}, MaxBytes: 100}
	get := func() error { _, _, err := store.Get(t.Context(), "a"); return err }
	put := func(tag string) error { return store.Put(t.Context(), "a", nil, tag) }
	for _, err := range []error{get(), put(""), put(`"x"`)} {
		if err == nil || errors.Is(err, objectguard.ErrChanged) || !strings.Contains(err.Error(), "403") {
			t.Errorf("403 is %v", err)
		}
	}
	status, etag = http.StatusOK, `W/"x"`
	if err := get(); err == nil || !strings.Contains(err.Error(), "weak") {
		t.Errorf("a weak tag: %v", err)
	}
	etag = `"x"`
	if err := get(); err != nil {
		t.Error(err)
	}
	if store.MaxBytes = 99; get() == nil {
		t.Error("an object that is too large was read")
	}
	for _, status = range []int{http.StatusPreconditionFailed, http.StatusConflict, http.StatusNotFound} {
		if err := put(`"x"`); !errors.Is(err, objectguard.ErrChanged) {
			t.Errorf("%d is %v, want ErrChanged", status, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	cancel()
	if _, _, err := store.Get(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}
