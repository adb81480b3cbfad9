package httpguard_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/httpguard"
)

const space = "cluster é/1" // nothing that a header could carry as it is

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// decoded is the Resource of the tests: names are any text, one segment of the path.
func decoded(r *http.Request) ([]string, error) {
	if r.Method == http.MethodGet {
		return nil, nil
	}
	name, err := url.PathUnescape(strings.TrimPrefix(r.URL.EscapedPath(), "/"))
	return []string{name}, err
}

// open returns a client of the service at the address.
func open(_ context.Context, address string) (*guardtest.Client, error) {
	base := &http.Transport{}
	client := &http.Client{Transport: &httpguard.Transport{Base: base}}
	put := func(ctx context.Context, c fencing.Claim, value string) error {
		ctx = fencing.NewOutgoingContext(ctx, c)
		req, err := http.NewRequestWithContext(ctx, http.MethodPut,
			address+"/"+url.PathEscape(c.Resource), strings.NewReader(value))
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if err := httpguard.ErrorFrom(resp); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusNoContent {
			text, err := io.ReadAll(resp.Body)
			return errors.Join(fmt.Errorf("%s: %s", resp.Status, text), err)
		}
		return nil
	}
	return &guardtest.Client{
		Check: func(ctx context.Context, c fencing.Claim) error { return put(ctx, c, "") },
		Write: func(ctx context.Context, c fencing.Claim, value string, _ func()) error { return put(ctx, c, value) },
		Read: func(ctx context.Context, resource string) (string, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, address+"/"+url.PathEscape(resource), nil)
			if err != nil {
				return "", err
			}
			resp, err := client.Do(req)
			if err != nil {
				return "", err
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			return string(text), err
		},
		Close: func() error { client.CloseIdleConnections(); return nil },
	}, nil
}

// The middleware of a service asks the guard.
func TestMiddleware(t *testing.T) {
	service := httptest.NewServer(httpguard.Middleware(new(fencing.Memory), decoded)(
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, ok := fencing.FromIncomingContext(r.Context()); !ok {
				t.Error("the handler finds no claim")
			}
			w.WriteHeader(http.StatusNoContent)
		})))
	defer service.Close()
	guardtest.Run(t, guardtest.Harness{
		Address: service.URL, Space: space, Volatile: true,
		Open: func(ctx context.Context, address string) (*guardtest.Client, error) {
			c, err := open(ctx, address)
			if c != nil {
				c.Write, c.Read = nil, nil // check and write are two steps
			}
			return c, err
		},
	})
}

// The handler of a service checks the claim in the step that writes.
func TestHandlerChecksInTheStepThatWrites(t *testing.T) {
	guard, values := new(fencing.Memory), make(chan map[string]string, 1)
	values <- map[string]string{}
	service := httptest.NewServer(httpguard.Middleware(nil, decoded)(
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				name, err := url.PathUnescape(strings.TrimPrefix(r.URL.EscapedPath(), "/"))
				v := <-values
				text := v[name]
				values <- v
				if err == nil {
					_, err = io.WriteString(w, text)
				}
				if err != nil {
					t.Error(err)
				}
				return
			}
			text, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			claims, _ := fencing.FromIncomingContext(r.Context())
			claim := claims.List()[0]
			err = guard.Do(r.Context(), claim, func() error {
				v := <-values
				if len(text) > 0 {
					v[claim.Resource] = string(text)
				}
				values <- v
				return nil
			})
			if httpguard.Refuse(w, err) {
				return
			}
			if err != nil {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			w.WriteHeader(http.StatusNoContent)
		})))
	defer service.Close()
	guardtest.Run(t, guardtest.Harness{Address: service.URL, Space: space, Volatile: true, Open: open})
}

func serve(t *testing.T, guard fencing.Guard, method string, header http.Header) *http.Response {
	t.Helper()
	r := httptest.NewRequest(method, "/accounts/42", nil)
	r.Header = header
	w := httptest.NewRecorder()
	httpguard.Middleware(guard, httpguard.Path)(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})).ServeHTTP(w, r)
	return w.Result()
}

func TestProblemDocument(t *testing.T) {
	guard := new(fencing.Memory)
	if err := guard.Check(t.Context(), fencing.Claim{Resource: "/accounts/42", Token: 34}); err != nil {
		t.Fatal(err)
	}
	resp := serve(t, guard, http.MethodPut, http.Header{httpguard.Header: {"33"}})
	want := `{"type":"https://github.com/fencelock/fencelock/blob/main/docs/FENCING.md#stale-token","title":"Stale fencing token",` +
		`"status":409,"detail":"fencing: token 33 for \"/accounts/42\" is stale: 34 was admitted before",` +
		`"resource":"/accounts/42","token":"33","highest":"34"}`
	if err := httpguard.ErrorFrom(resp); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("ErrorFrom = %v", err)
	}
	text, err := io.ReadAll(resp.Body) // also after ErrorFrom
	if err != nil || string(text) != want || resp.StatusCode != http.StatusConflict ||
		resp.Header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("%s %s\n%s\nwant 409 application/problem+json\n%s",
			resp.Status, resp.Header.Get("Content-Type"), text, want)
	}
}

func TestInvalidClaims(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		header http.Header
		want   int
	}{
		"a request that reads":    {http.MethodGet, http.Header{}, http.StatusNoContent},
		"a write without a token": {http.MethodPut, http.Header{}, http.StatusConflict},
		"a token":                 {http.MethodPost, http.Header{httpguard.Header: {"7"}}, http.StatusNoContent},
		"a shared token":          {http.MethodPut, http.Header{httpguard.Header: {"7s"}}, http.StatusConflict},
		"no number":               {http.MethodPut, http.Header{httpguard.Header: {"seven"}}, http.StatusBadRequest},
		"a negative number":       {http.MethodPut, http.Header{httpguard.Header: {"-7"}}, http.StatusBadRequest},
		"a number too large": {
			http.MethodPut, http.Header{httpguard.Header: {"9223372036854775808"}}, http.StatusBadRequest,
		},
		// For which of the two?
		"two tokens": {http.MethodPut, http.Header{httpguard.Header: {"7", "8"}}, http.StatusConflict},
		"two for one resource": {http.MethodPut, http.Header{
			httpguard.Header: {"7; resource=%2Faccounts%2F42, 8; resource=%2Faccounts%2F42"},
		}, http.StatusBadRequest},
		"a set with the resource": {http.MethodPut, http.Header{
			httpguard.Header: {"7; resource=%2Faccounts%2F42, 8; resource=b"},
		}, http.StatusNoContent},
		"a broken space": {http.MethodPut, http.Header{httpguard.Header: {"7; space=%zz"}}, http.StatusBadRequest},
		"a space with a newline": {
			http.MethodPut, http.Header{httpguard.Header: {"7; space=%0a"}}, http.StatusBadRequest,
		},
		"a space twice": {
			http.MethodPut, http.Header{httpguard.Header: {"7; space=a; space=b"}}, http.StatusBadRequest,
		},
		"what nobody knows": {
			http.MethodPut, http.Header{httpguard.Header: {"7; color=red"}}, http.StatusBadRequest,
		},
		"a reader without a claim": {http.MethodGet, http.Header{}, http.StatusNoContent},
		"a reader with a claim":    {http.MethodGet, http.Header{httpguard.Header: {"0"}}, http.StatusConflict},
	} {
		if resp := serve(t, new(fencing.Memory), c.method, c.header); resp.StatusCode != c.want {
			t.Errorf("%s is answered with %s, want %d", name, resp.Status, c.want)
		}
	}
}

// brokenGuard cannot tell.
type brokenGuard struct{}

func (brokenGuard) Check(context.Context, fencing.Claims) error {
	return errors.New("password=hunter2 refused")
}

func TestFailingGuardAdmitsNoWrite(t *testing.T) {
	resp := serve(t, brokenGuard{}, http.MethodPut, http.Header{httpguard.Header: {"7"}})
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusServiceUnavailable || strings.Contains(string(text), "hunter2") {
		t.Errorf("%s %s, %v; want 503 without the cause", resp.Status, text, err)
	}
}

func TestErrorFromLeavesOtherAnswers(t *testing.T) {
	for _, body := range []string{`{"type":"https://example.com/out-of-stock"}`, `no JSON`, ``} {
		resp := &http.Response{
			StatusCode: http.StatusConflict,
			Header:     http.Header{"Content-Type": {"application/problem+json; charset=utf-8"}},
			Body:       io.NopCloser(strings.NewReader(body)),
		}
		if err := httpguard.ErrorFrom(resp); err != nil {
			t.Errorf("%q is taken for %v", body, err)
		}
		if text, err := io.ReadAll(resp.Body); err != nil || string(text) != body {
			t.Errorf("after ErrorFrom the body is %q, %v; want %q", text, err, body)
		}
	}
}

// seen is a RoundTripper that keeps the request.
type seen struct{ r *http.Request }

func (s *seen) RoundTrip(r *http.Request) (*http.Response, error) {
	s.r = r
	return &http.Response{StatusCode: http.StatusNoContent, Body: http.NoBody}, nil
}

func TestTransportLeavesTheRequestAsItIs(t *testing.T) {
	var last seen
	transport := &httpguard.Transport{Base: &last}
	r := httptest.NewRequest(http.MethodPut, "/", nil)
	r.Header.Set(httpguard.Header, "by hand")
	if _, err := transport.RoundTrip(r); err != nil || last.r != r {
		t.Errorf("a request without a claim was changed (%v)", err)
	}
	claims := fencing.Set{{Resource: "a,b", Token: 7, Space: "é"}, {Resource: "c", Token: 8, Sequence: 3}}
	r = r.WithContext(fencing.NewOutgoingContext(t.Context(), claims))
	if _, err := transport.RoundTrip(r); err != nil {
		t.Fatal(err)
	}
	if r.Header.Get(httpguard.Header) != "by hand" {
		t.Errorf("the caller's headers were changed: %v", r.Header)
	}
	want := []string{"7; space=%C3%A9; resource=a%2Cb", "8; resource=c; seq=3"}
	if got := last.r.Header.Values(httpguard.Header); !slices.Equal(got, want) {
		t.Errorf("the header that is sent: %q, want %q", got, want)
	}
	for _, values := range [][]string{want, {strings.Join(want, ", ")}} { // a proxy may join them
		got, err := httpguard.ClaimsFrom(http.Header{httpguard.Header: values}, "a,b", "c")
		if err != nil || !slices.Equal(got, claims) {
			t.Errorf("what is read of %q: %+v, %v; want %+v", values, got, err, claims)
		}
	}
}

// A claim that came with a request does not leave with the calls that its handler makes.
func TestClaimsDoNotLeak(t *testing.T) {
	var last seen
	downstream := &httpguard.Transport{Base: &last}
	handler := httpguard.Middleware(new(fencing.Memory), httpguard.Path)(
		http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			call := httptest.NewRequest(http.MethodPut, "/ledger/7", nil).WithContext(r.Context())
			if _, err := downstream.RoundTrip(call); err != nil {
				t.Error(err)
			}
		}))
	r := httptest.NewRequest(http.MethodPut, "/accounts/42", nil)
	r.Header.Set(httpguard.Header, "34")
	handler.ServeHTTP(httptest.NewRecorder(), r)
	if last.r == nil || len(last.r.Header.Values(httpguard.Header)) != 0 {
		t.Errorf("the handler's call carries the claim of the request: %+v", last.r)
	}
}

// One account has one name, however its path is written, and all paths below it are the account's.
func TestPathsOfOneResource(t *testing.T) {
	of := func(resources httpguard.Resources, target string) string {
		names, err := resources(httptest.NewRequest(http.MethodPost, target, nil))
		if err != nil || len(names) != 1 {
			return fmt.Sprint(err)
		}
		return names[0]
	}
	for _, target := range []string{"/accounts/42", "/accounts/42/", "/accounts%2F42"} {
		if got := of(httpguard.Path, target); got != "/accounts/42" {
			t.Errorf("Path of %s is %s", target, got)
		}
	}
	for _, target := range []string{"/accounts/42/debit", "/accounts/42/", "/accounts/42/a/b"} {
		if got := of(httpguard.Segments(2), target); got != "/accounts/42" {
			t.Errorf("Segments(2) of %s is %s", target, got)
		}
	}
	for _, target := range []string{
		"/accounts//42", "/accounts/./42", "/accounts/x/../42", "/accounts/42;v=1", "/accounts/42//", `/a%5C42`,
	} {
		if got := of(httpguard.Path, target); !strings.Contains(got, "another way") {
			t.Errorf("Path of %s is %s, want it refused", target, got)
		}
	}
}

// An escaped slash belongs to its segment: the handler is given the whole id, and two ids are two resources.
func TestSegmentsCountEscapedSlashes(t *testing.T) {
	for target, want := range map[string]string{
		"/accounts/42/debit":      "/accounts/42",
		"/accounts/a%2Fb":         "/accounts/a%2Fb",
		"/accounts/a%2fb/debit":   "/accounts/a%2Fb",
		"/accounts/a%252Fb/debit": "/accounts/a%252Fb",
		"/accounts/a%2Fc/":        "/accounts/a%2Fc",
		"/accounts/a%20b/debit":   "/accounts/a b",
		"/accounts/100%25/debit":  "/accounts/100%",
	} {
		names, err := httpguard.Segments(2)(httptest.NewRequest(http.MethodPut, target, nil))
		if err != nil || len(names) != 1 || names[0] != want {
			t.Errorf("PUT %s writes to %q (%v), want %q", target, names, err, want)
		}
	}
}

// A write that failed behind the middleware is made when it is tried again: only the step that writes records a
// sequence.
func TestFailedWriteIsTriedAgain(t *testing.T) {
	calls := 0
	service := httptest.NewServer(httpguard.Middleware(new(fencing.Memory), decoded)(
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if calls++; calls == 1 {
				w.WriteHeader(http.StatusInternalServerError)
			}
		})))
	defer service.Close()
	client := &http.Client{Transport: &httpguard.Transport{Base: &http.Transport{DisableKeepAlives: true}}}
	claim := fencing.Claim{Resource: "a", Token: 34, Space: space}.At(1)
	for _, want := range []int{http.StatusInternalServerError, http.StatusOK} {
		req, err := http.NewRequestWithContext(
			fencing.NewOutgoingContext(t.Context(), claim), http.MethodPut, service.URL+"/a", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("write 1 is answered with %s after %d calls of the handler, want %d", resp.Status, calls, want)
		}
	}
}
