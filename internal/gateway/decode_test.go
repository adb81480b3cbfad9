package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
)

// bodyOf is a body type, for the gateway's decoder, and for the specification with encoding/json.
type bodyOf struct {
	t      reflect.Type
	shape  *shape
	all    huma.Registry
	schema *huma.Schema
	keys   []string
}

func bodiesOf(types ...reflect.Type) (all []*bodyOf) {
	for _, t := range types {
		registry := huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer)
		b := &bodyOf{t, shapeOf(t), registry, registry.Schema(t, true, "Body"), nil}
		for _, f := range b.shape.fields {
			b.keys = append(b.keys, f.name)
		}
		all = append(all, b)
	}
	return all
}

// reads decodes a text as the gateway does.
func (b *bodyOf) reads(text []byte) (any, error) {
	v := reflect.New(b.t)
	err := b.shape.decode(text, v.Interface())
	return v.Elem().Interface(), err
}

// specifies decodes a text by the specification.
func (b *bodyOf) specifies(text []byte) (any, error) {
	v := reflect.New(b.t)
	if err := unambiguous(text); err != nil {
		return nil, err
	}
	var said any
	if err := json.Unmarshal(text, &said); err != nil {
		return nil, err
	}
	var found huma.ValidateResult
	path := huma.NewPathBuffer([]byte{}, 0)
	huma.Validate(b.all, b.schema, path, huma.ModeWriteToServer, said, &found)
	if len(found.Errors) > 0 {
		return nil, found.Errors[0]
	}
	err := json.Unmarshal(text, v.Interface())
	return v.Elem().Interface(), err
}

// unambiguous returns an error if a text has a duplicate key in one object, or is not Unicode.
func unambiguous(text []byte) error {
	if !utf8.Valid(text) {
		return errNotUnicode
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
		s, isText := t.(string)
		if isText && strings.ContainsRune(s, utf8.RuneError) {
			return errNotUnicode
		}
		top := len(open) - 1
		if key && isText {
			if open[top][s] {
				return twice([]byte(s))
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

// compare fails the test if the gateway and the specification disagree about a text. It returns whether both accept it.
func (b *bodyOf) compare(t *testing.T, text []byte) (accepted bool) {
	t.Helper()
	got, err := b.reads(text)
	want, refused := b.specifies(text)
	switch {
	case (err == nil) != (refused == nil):
		t.Errorf("%s %q: %v; by the specification %v", b.t.Name(), text, err, refused)
	case err == nil && !reflect.DeepEqual(got, want):
		t.Errorf("%s %q: read as %+v; by the specification %+v", b.t.Name(), text, got, want)
	}
	return err == nil
}

// values are JSON values at the bounds of the specification.
var values = []string{
	`null`, `true`, `false`, `""`, `"a"`, `"exclusive"`, `"shared"`, `"permits"`, `"Exclusive"`, `0`, `1`, `-1`, `-0`, `7`, `30000`,
	`5e3`, `5000.0`, `00`, `+1`, `.5`, `1.`, `9223372036854775807`, `9223372036854775808`, `-9223372036854775809`,
	`18446744073709551615`, `18446744073709551616`, `1e400`, `[]`, `{}`, `{"k":"v"}`, `{"k":1}`, `{"k":null}`, `{"k":"v","k":"w"}`,
	`{"":""}`, `[{"lockKey":"a"}]`, `[{"lockKey":"a","kind":"shared"},{"lockKey":"b"}]`, `[{"lockKey":""}]`, `[{}]`, `[null]`, `[1]`,
	`[{"lockKey":"a"},]`, `[{"lockKey":"a","metadata":{"lockKey":"a"}}]`, `"\u0061\ud83d\ude00\n\"\/\\"`, `"\ud800"`, `"\ud800\u0061"`,
	`"\udc00"`, `"\ud800\ud800"`, `"\u12"`, `"\x"`, `"é😀"`, "\"\x00\"", "\"\xff\"", "\"\ufffd\"", `"\ufffd"`, `nul`, `tru`, `"open`, `{`,
	"\"" + strings.Repeat("é", 128) + "\"", "\"" + strings.Repeat("é", 129) + "\"", "\"" + strings.Repeat("é", 256) + "\"",
	"\"" + strings.Repeat("é", 257) + "\"", "\"" + strings.Repeat("r", 1024) + "\"", "\"" + strings.Repeat("r", 1025) + "\"",
	"[" + strings.Repeat(`{"lockKey":"a"},`, 63) + `{"lockKey":"a"}]`, "[" + strings.Repeat(`{"lockKey":"a"},`, 64) + `{"lockKey":"a"}]`,
}

// The gateway reads each body as the specification and encoding/json do, and refuses the same bodies: random bodies,
// each value as each member, and texts with faults.
func TestBodiesAreReadAsSpecified(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(34, 1)) //nolint:gosec // repeatable
	pick := func(from []string) string { return from[random.IntN(len(from))] }
	valid := map[string]string{
		"ownerId": `"a"`, "ttlMillis": `30000`, "lockToken": `"x"`, "reason": `"r"`, "requests": `[{"lockKey":"a"}]`,
	}
	spaces := []string{"", "", "", " ", "\n\t\r "}
	for _, b := range bodiesOf(
		typeOf[acquireBody](), typeOf[acquireAllBody](), typeOf[renewBody](), typeOf[releaseBody](), typeOf[forceBody](),
	) {
		write := func(members [][2]string) []byte {
			var out strings.Builder
			for i, m := range members {
				if i > 0 {
					out.WriteString("," + pick(spaces))
				}
				fmt.Fprintf(&out, `"%s"%s:%s%s`, m[0], pick(spaces), pick(spaces), m[1])
			}
			return []byte(pick(spaces) + "{" + out.String() + pick(spaces) + "}" + pick(spaces))
		}
		required := func(but string) (members [][2]string) {
			for _, f := range b.shape.fields {
				if f.required && f.name != but {
					members = append(members, [2]string{f.name, valid[f.name]})
				}
			}
			return members
		}
		for _, whole := range append([]string{"", " ", "{}", "null", "[]", "{}{}", "{} x", "\ufeff{}"}, values...) {
			b.compare(t, []byte(whole))
		}
		n, accepted := 0, 0
		count := func(text []byte) {
			if n++; b.compare(t, text) {
				accepted++
			}
		}
		for _, key := range append([]string{"unknown", "OWNERID", "ownerid", ""}, b.keys...) {
			for _, value := range values {
				count(write(append(required(key), [2]string{key, value})))
			}
			count(write(required(key)))
			count(write(append(required(""), [2]string{key, valid[key]}, [2]string{key, valid[key]})))
		}
		for range 5000 {
			members := required("")
			for range random.IntN(4) {
				members = append(members, [2]string{pick(b.keys), pick(values)})
			}
			random.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
			text := write(members)
			count(text)
			switch at := random.IntN(len(text)); random.IntN(3) {
			case 0:
				text = append(text[:at], text[at+1:]...)
			case 1:
				text[at] = "{}[]\",:\\u0 1"[random.IntN(12)]
			case 2:
				text = text[:at]
			}
			count(text)
		}
		if accepted < n/100 || accepted > n*9/10 {
			t.Errorf("%s: %d of %d bodies are valid", b.t.Name(), accepted, n)
		}
	}
}

func FuzzBodies(f *testing.F) {
	all := bodiesOf(typeOf[acquireBody](), typeOf[acquireAllBody](), typeOf[renewBody](), typeOf[releaseBody](), typeOf[forceBody]())
	f.Add([]byte(acquireOf("a", `,"metadata":{"k":"\ud83d\ude00"}`)))
	f.Add([]byte(`{"ownerId":"a","ttlMillis":1,"requests":[{"lockKey":"a","kind":"permits","limit":2}]}`))
	f.Add([]byte(`{"lockToken":"t","ttlMillis":-0}`))
	f.Add([]byte(`{"reason":"r","fencingToken":18446744073709551615}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, b := range all {
			b.compare(t, text)
		}
	})
}
