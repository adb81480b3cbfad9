package httpguard

import (
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// Resources returns the resources that a request writes, by the guard's names. Without resources the request passes
// without a check. An error is answered with 400.
type Resources func(*http.Request) ([]string, error)

// Path is the Resources of services with paths that name the resource: the path of a request without a slash at its
// end. Methods that only read (GET, HEAD, OPTIONS, TRACE) are checked if they come with a claim: a holder that reads
// before it writes shows its claim with the reading. A path that could be written in another way, with empty or dot
// segments, or with parameters after a semicolon, is refused: it would be another resource. The method is that of the
// request: a service that obeys X-HTTP-Method-Override applies it before this middleware.
func Path(r *http.Request) ([]string, error) { return resource(r, 0) }

// Segments is Path for services with several paths below the path of the resource: the first n segments count, so
// that with 2 both /accounts/42 and /accounts/42/debit write to /accounts/42. An escaped slash belongs to its segment
// and stays escaped in the name: /accounts/a%2Fb/debit writes to /accounts/a%2Fb.
func Segments(n int) Resources {
	return func(r *http.Request) ([]string, error) { return resource(r, n) }
}

func resource(r *http.Request, segments int) ([]string, error) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		if len(r.Header.Values(Header)) == 0 {
			return nil, nil
		}
	}
	name := strings.TrimSuffix(r.URL.Path, "/")
	if name == "" {
		return []string{"/"}, nil
	}
	if path.Clean(name) != name || name[0] != '/' || strings.ContainsAny(name, `;\`) {
		return nil, &fencing.InvalidError{What: "path", Value: r.URL.Path, Why: "it can be written in another way"}
	}
	if segments == 0 {
		return []string{name}, nil
	}
	// An escaped slash is part of a segment, as http.ServeMux has it.
	parts := strings.Split(strings.TrimSuffix(r.URL.EscapedPath(), "/"), "/")
	parts = parts[:min(len(parts), segments+1)]
	for i, part := range parts {
		text, err := url.PathUnescape(part)
		if err != nil {
			return nil, &fencing.InvalidError{What: "path", Value: r.URL.Path, Why: err.Error()}
		}
		if strings.Contains(text, "/") || strings.Contains(strings.ToLower(text), "%2f") {
			text = url.PathEscape(text) // it stays another name than that of two segments
		}
		parts[i] = text
	}
	return []string{strings.Join(parts, "/")}, nil
}

// Middleware returns a wrapper for handlers: it reads the claims of each request that writes, asks the guard, and
// puts the claims into the request's context (fencing.FromIncomingContext). Without a guard the handler has to check.
//
// A refused request is answered as by Refuse, a malformed one with 400. If the guard itself fails the answer is 503,
// without the cause, and the handler does not run.
func Middleware(guard fencing.Guard, resources Resources) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			names, err := resources(r)
			if err != nil {
				badRequest(w, err)
				return
			}
			if len(names) == 0 {
				next.ServeHTTP(w, r)
				return
			}
			claims, err := ClaimsFrom(r.Header, names...)
			if err != nil {
				badRequest(w, err)
				return
			}
			if guard != nil {
				if err := guard.Check(r.Context(), fencing.Unordered(claims)); err != nil {
					if !Refuse(w, err) {
						unavailable(w)
					}
					return
				}
			}
			next.ServeHTTP(w, r.WithContext(fencing.NewIncomingContext(r.Context(), claims)))
		})
	}
}
