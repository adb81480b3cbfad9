package gateway

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

// The gateway refuses requests that two programs could understand differently.
func TestMisreadableRequests(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		for _, body := range []string{
			`{"ownerId":"a","ttlMillis":30000,"ownerId":"b"}`, `{"OWNERID":"a","ttlMillis":30000}`,
			`{"ownerId":"a","ttlMillis":30000,"metadata":{"k":"1","k":"2"}}`, `{"ownerId":"a","ttlMillis":"30000"}`,
			`{"ownerId":"a\ud800","ttlMillis":30000}`, "{\"ownerId\":\"a\xff\",\"ttlMillis\":30000}",
			`{"ownerId":"a","ttlMillis":5e3}`, `{"ownerId":"a","ttlMillis":30000}{}`, `[]`, `{`,
		} {
			p := d.refuses(d.post(acquireX, body), 400, codeRequest)
			if detail := fmt.Sprint(p["detail"]); strings.Contains(detail, "Go ") || strings.Contains(detail, "Body") {
				t.Errorf("%s is answered in the words of the program: %s", body, detail)
			}
		}
		all := `{"ownerId":"a","ttlMillis":30000,"requests":[{"lockKey":"y"},{"lockKey":"z","metadata":{"lockKey":"y"}}]}`
		if got := d.post("/v1/locks:acquireAll", all); got.status != 200 {
			t.Errorf("keys of different objects: %d %s", got.status, got.text)
		}
		many := strings.Builder{}
		for i := range 1000 {
			fmt.Fprintf(&many, `,"unknown%d":1`, i)
		}
		if got := d.post(acquireX, acquireOf("a", many.String())); got.status != 400 || len(got.text) > 2000 {
			t.Errorf("a thousand faults: %d, %d bytes", got.status, len(got.text))
		}
		header := func(name, value string) func(*http.Request) {
			return func(r *http.Request) { r.Header.Set(name, value) }
		}
		for value, status := range map[string]int{
			"text/plain": 415, "application/x-www-form-urlencoded": 415, "application/json; charset=latin1": 415,
			"application/json; charset=UTF-8": 200, "nothing at all": 415,
		} {
			got := d.send(t.Context(), http.MethodPost, acquireX, acquireOf("a", `,"requestId":"r"`), header("Content-Type", value))
			if got.status != status {
				t.Errorf("%s: %d %s", value, got.status, got.text)
			}
		}
		d.refuses(d.send(t.Context(), http.MethodPost, acquireX, acquireOf("a", ""), header("Content-Encoding", "gzip")),
			415, codeMedia)
		for _, path := range []string{"//v1/locks/x", "/v1//locks/x", "/v1/locks/../x", "/v1/locks/./acquire", "/v1/locks/"} {
			d.refuses(d.get(path), 400, codeName)
		}
	})
}

// The answer to a known path with another method names the methods of the path.
func TestMethods(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		for _, x := range []struct{ method, path, allow string }{
			{http.MethodGet, acquireX, "POST"}, {http.MethodOptions, acquireX, "POST"}, {http.MethodPut, acquireX, "POST"},
			{http.MethodDelete, atX, "GET, HEAD"}, {http.MethodPost, "/v1/locks", "GET, HEAD"},
			{http.MethodGet, atX + "/waits/r", "DELETE"}, {http.MethodPost, "/docs", "GET, HEAD"},
		} {
			got := d.send(t.Context(), x.method, x.path, "")
			d.refuses(got, 405, codeMethod)
			if got.header.Get("Allow") != x.allow {
				t.Errorf("%s %s: Allow %q, want %q", x.method, x.path, got.header.Get("Allow"), x.allow)
			}
		}
		d.refuses(d.get("/v2/locks"), 404, codeNotFound)
	})
}

// paged counts the states that the service reads for a page.
type paged struct {
	backend.Driver
	names []string
	read  int
}

func (p *paged) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return p.ListAfter(ctx, prefix, "")
}

func (p *paged) ListAfter(_ context.Context, prefix, after string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		for _, name := range p.names {
			if name <= after || !strings.HasPrefix(name, prefix) {
				continue
			}
			p.read++
			if !yield(backend.State{Name: name, Held: true}, nil) {
				return
			}
		}
	}
}

func (p *paged) Unwrap() backend.Driver { return p.Driver }

// With a service that lists names in order, a page reads no more names than it shows.
func TestPagesAreRead(t *testing.T) {
	simulated(t, func(t *testing.T, plain *door) {
		p := &paged{Driver: plain.g.driver}
		for i := range 10_000 {
			p.names = append(p.names, fmt.Sprintf("n/%05d", i))
		}
		d := newDoor(t, p)
		defer d.g.Close(t.Context())
		got := d.get("/v1/locks?namespace=n&limit=10&after=n/00499")
		names := slices.Collect(func(yield func(string) bool) {
			for _, part := range strings.Split(got.text, `"lockKey":"`)[1:] {
				yield(part[:7])
			}
		})
		if !slices.Equal(names, p.names[500:510]) || !strings.Contains(got.text, `"nextAfter":"n/00509"`) {
			t.Errorf("page: %s", got.text)
		}
		if p.read > 11 {
			t.Errorf("the service was asked for %d names", p.read)
		}
	})
}
