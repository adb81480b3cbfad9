package httpguard

import (
	"net/http"

	"github.com/fencelock/fencelock/fencing"
)

// Resource tells what a request writes to, as the guard knows it. Empty: the request writes nothing, and passes without a
// check. An error is answered with 400.
type Resource func(*http.Request) (string, error)

// Path is the Resource of services whose paths name what is written to: the path of a request, and empty for the methods
// that only read (GET, HEAD, OPTIONS, TRACE).
func Path(r *http.Request) (string, error) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return "", nil
	}
	return r.URL.Path, nil
}

// Middleware returns what wraps a handler: it reads the claim of each request that writes, asks the guard, and puts the
// claim into the request's context (fencing.FromContext). Without a guard it asks nobody: the handler does.
//
// A refused request is answered as by Refuse, one that cannot be understood with 400. Where the guard itself fails the
// answer is 503, without a word about the cause, and the handler does not run.
func Middleware(guard fencing.Guard, resource Resource) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			name, err := resource(r)
			if err != nil {
				badRequest(w, err)
				return
			}
			if name == "" {
				next.ServeHTTP(w, r)
				return
			}
			claim, err := ClaimFrom(r.Header, name)
			if err == nil {
				err = claim.Validate()
			}
			if err != nil {
				badRequest(w, err)
				return
			}
			if guard != nil {
				if err := fencing.Check(r.Context(), guard, claim); err != nil {
					if !Refuse(w, err) {
						unavailable(w)
					}
					return
				}
			}
			next.ServeHTTP(w, r.WithContext(fencing.NewContext(r.Context(), claim)))
		})
	}
}
