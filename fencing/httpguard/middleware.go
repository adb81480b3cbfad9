package httpguard

import (
	"net/http"
	"path"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// Resources tells what a request writes to, as the guard knows it. None: the request writes nothing, and passes without
// a check. An error is answered with 400.
type Resources func(*http.Request) ([]string, error)

// Path is the Resources of services whose paths name what is written to: the path of a request without a slash at its
// end. Methods that only read (GET, HEAD, OPTIONS, TRACE) are checked if they come with a claim: a holder that reads
// before it writes shows its claim with the reading. A path that could be written in another way, with empty or dot
// segments, or with parameters after a semicolon, is refused: it would be another resource.
func Path(r *http.Request) ([]string, error) { return resource(r, 0) }

// Segments is Path for services with several paths below the one that names the resource: the first n segments count,
// so that with 2 both /accounts/42 and /accounts/42/debit write to /accounts/42.
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
	if parts := strings.Split(name, "/"); segments > 0 && len(parts) > segments+1 {
		name = strings.Join(parts[:segments+1], "/")
	}
	return []string{name}, nil
}

// Middleware returns what wraps a handler: it reads the claims of each request that writes, asks the guard, and puts
// the claims into the request's context (fencing.FromIncomingContext). Without a guard it asks nobody: the handler
// does.
//
// A refused request is answered as by Refuse, one that cannot be understood with 400. Where the guard itself fails the
// answer is 503, without a word about the cause, and the handler does not run.
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
				if err := guard.Check(r.Context(), claims); err != nil {
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
