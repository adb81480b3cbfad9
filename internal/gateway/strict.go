package gateway

import (
	"mime"
	"net/http"
	"slices"
	"strings"
)

// misread refuses requests that two programs could understand differently: two names, a path that a proxy would clean,
// another content type. Type decoder refuses such bodies.
func misread(r *http.Request, body []byte) *Problem {
	segments := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	if len(segments) > 1 {
		for _, s := range segments {
			if s == "" || s == "." || s == ".." {
				return problem(codeName, "a path with an empty segment, . or .. leads elsewhere; "+
					"such names go into ?name=, with - in the path")
			}
		}
	}
	if r.URL.RawQuery != "" && len(segments) > 2 && segments[0] == "v1" && segments[1] == "locks" {
		names := r.URL.Query()["name"]
		if len(names) > 0 && segments[2] != "-" || len(names) > 1 {
			return problem(codeName, "the path names one lock and ?name= another: ?name= goes with the path's - only, once")
		}
	}
	if len(body) == 0 {
		return nil
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return problem(codeMedia, "bodies must have no Content-Encoding; this one has "+e)
	}
	if given := r.Header.Get("Content-Type"); given != "" && given != contentJSON {
		kind, parameters, err := mime.ParseMediaType(given)
		charset := parameters["charset"]
		if err != nil || kind != contentJSON || charset != "" && !strings.EqualFold(charset, "utf-8") {
			return problem(codeMedia, "bodies must have Content-Type: application/json; this one has "+given)
		}
	}
	return nil
}

// methodsOf returns the methods that a path supports.
func methodsOf(mux *http.ServeMux, r *http.Request) (methods []string) {
	for _, m := range []string{http.MethodDelete, http.MethodGet, http.MethodHead, http.MethodPost} {
		other := r.Clone(r.Context())
		other.Method = m
		if _, pattern := mux.Handler(other); pattern != "" && pattern != "/" {
			methods = append(methods, m)
		}
	}
	return methods
}

// notServed answers a request that matches no pattern, or matches a path with another method.
func notServed(mux *http.ServeMux, w http.ResponseWriter, r *http.Request) {
	said := r.Method + " " + r.URL.Path
	if methods := methodsOf(mux, r); len(methods) > 0 && !slices.Contains(methods, r.Method) {
		p := problem(codeMethod, said+"; the path has "+strings.Join(methods, ", "))
		p.headers = http.Header{"Allow": {strings.Join(methods, ", ")}}
		write(w, p)
		return
	}
	write(w, problem(codeNotFound, said+"; "+docsPath+" lists what there is"))
}
