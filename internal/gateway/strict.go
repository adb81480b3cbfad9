package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

// misread refuses requests that two readers could understand differently: two names, a path that is cleaned on the
// way, another content type, JSON with a duplicate key, text that is not Unicode.
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
	if names := r.URL.Query()["name"]; len(segments) > 2 && segments[0] == "v1" && segments[1] == "locks" {
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
	if given := r.Header.Get("Content-Type"); given != "" {
		kind, parameters, err := mime.ParseMediaType(given)
		charset := parameters["charset"]
		if err != nil || kind != "application/json" || charset != "" && !strings.EqualFold(charset, "utf-8") {
			return problem(codeMedia, "bodies must have Content-Type: application/json; this one has "+given)
		}
	}
	if err := unambiguous(body); err != nil {
		return problem(codeRequest, err.Error())
	}
	return nil
}

// unambiguous returns an error if JSON has a duplicate key in one object, or text that is not Unicode. It leaves
// other faults to the decoder.
func unambiguous(text []byte) error {
	notUnicode := errors.New("the body contains text that is not UTF-8, or the replacement character")
	if !utf8.Valid(text) {
		return notUnicode
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var open []map[string]bool // the keys of each open object; nil for an array
	key := false               // the next string is a key
	for {
		t, err := d.Token()
		if err != nil {
			return nil //nolint:nilerr // the end, or no JSON at all
		}
		// Half of a surrogate pair decodes to the replacement character.
		s, isText := t.(string)
		if isText && strings.ContainsRune(s, utf8.RuneError) {
			return notUnicode
		}
		top := len(open) - 1
		if key && isText {
			if open[top][s] {
				return fmt.Errorf("the body has the key %q twice", s)
			}
			open[top][s] = true
			key = false
			continue
		}
		switch t {
		case json.Delim('{'):
			open = append(open, map[string]bool{})
		case json.Delim('['):
			open = append(open, nil)
		case json.Delim('}'), json.Delim(']'):
			open = open[:top]
		}
		key = len(open) > 0 && open[len(open)-1] != nil
	}
}

// methodsOf returns the methods of a path.
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

// notServed answers a request that no pattern matches.
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
