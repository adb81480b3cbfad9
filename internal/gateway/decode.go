package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// decoder reads the body of a request in one pass, strictly: unknown keys, duplicate keys, keys in another case,
// numbers that are no integers, values beyond the bounds of the specification and text that is not Unicode are errors.
// Bounds come from the tags from which the specification is generated. Package encoding/json would need a second pass
// for the duplicates and a third for the bounds.
type decoder struct {
	text []byte
	at   int
}

var (
	errNotJSON    = errors.New("the body is not valid JSON")
	errNotUnicode = errors.New("the body contains text that is not UTF-8, or the replacement character")
)

// decode reads a body into a struct of the shape.
func (of *shape) decode(text []byte, into any) error {
	if len(text) == 0 {
		return errors.New("the request has no body")
	}
	d := decoder{text: text}
	if err := d.object(reflect.ValueOf(into).Elem(), of); err != nil {
		return err
	}
	if d.space(); d.at < len(d.text) {
		return errNotJSON
	}
	return nil
}

// shape describes the members of a body, or of an object in it.
type shape struct {
	fields   []field
	byName   map[string]int
	required uint64 // a bit set of indexes into fields
}

// field is a member of an object. An optional member may be null, which means the same as a missing member.
type field struct {
	name        string
	index       []int
	required    bool
	least, most int64 // of a number, or of the length of a text or an array
	among       []string
	items       *shape // of an array
}

// shapeOf returns the shape of a struct, from its tags.
func shapeOf(t reflect.Type) *shape {
	of := &shape{byName: map[string]int{}}
	for _, f := range reflect.VisibleFields(t) {
		tag, more, _ := strings.Cut(f.Tag.Get("json"), ",")
		if tag == "" {
			continue
		}
		x := field{name: tag, index: f.Index, required: more == "", least: math.MinInt64, most: math.MaxInt64}
		for _, name := range []string{"minimum", "minLength", "minItems"} {
			x.least = max(x.least, boundOf(f.Tag, name, math.MinInt64))
		}
		for _, name := range []string{"maximum", "maxLength", "maxItems"} {
			x.most = min(x.most, boundOf(f.Tag, name, math.MaxInt64))
		}
		if among, found := f.Tag.Lookup("enum"); found {
			x.among = strings.Split(among, ",")
		}
		switch f.Type.Kind() {
		case reflect.Bool, reflect.String, reflect.Int, reflect.Int64, reflect.Uint64:
		case reflect.Slice:
			x.items = shapeOf(f.Type.Elem())
		default:
			if f.Type != reflect.TypeFor[map[string]string]() {
				panic("a body has a field of the type " + f.Type.String()) // a mistake in this program
			}
		}
		if x.required {
			of.required |= 1 << len(of.fields)
		}
		of.byName[tag] = len(of.fields)
		of.fields = append(of.fields, x)
	}
	return of
}

// boundOf returns the bound called name in a tag, or otherwise.
func boundOf(tag reflect.StructTag, name string, otherwise int64) int64 {
	text, found := tag.Lookup(name)
	if !found {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(err) // a mistake in this program
	}
	return n
}

func (d *decoder) space() {
	for d.at < len(d.text) && strings.IndexByte(" \t\r\n", d.text[d.at]) >= 0 {
		d.at++
	}
}

// take consumes a byte, after white space, if it is next.
func (d *decoder) take(c byte) bool {
	d.space()
	if d.at < len(d.text) && d.text[d.at] == c {
		d.at++
		return true
	}
	return false
}

// word consumes a word, after white space, if it is next.
func (d *decoder) word(w string) bool {
	d.space()
	if len(d.text)-d.at < len(w) || string(d.text[d.at:d.at+len(w)]) != w {
		return false
	}
	d.at += len(w)
	return true
}

// each calls do for each element up to the closing byte end.
func (d *decoder) each(end byte, do func() error) error {
	if d.take(end) {
		return nil
	}
	for {
		if err := do(); err != nil {
			return err
		}
		switch {
		case d.take(end):
			return nil
		case !d.take(','):
			return errNotJSON
		}
	}
}

// key reads the key of a member, and the colon.
func (d *decoder) key() ([]byte, error) {
	if !d.take('"') {
		return nil, errNotJSON
	}
	key, err := d.textTo()
	if err == nil && !d.take(':') {
		err = errNotJSON
	}
	return key, err
}

func (d *decoder) object(v reflect.Value, of *shape) error {
	if !d.take('{') {
		return errors.New("the body, or an element of an array in it, is not an object")
	}
	var seen uint64
	err := d.each('}', func() error {
		key, err := d.key()
		if err != nil {
			return err
		}
		i, known := of.byName[string(key)]
		switch {
		case !known:
			return fmt.Errorf("the body has the unknown key %.64q", key)
		case seen&(1<<i) != 0:
			return twice(key)
		}
		seen |= 1 << i
		f := &of.fields[i]
		if d.word("null") {
			if f.required {
				return fmt.Errorf("%s: want a value", f.name)
			}
			return nil
		}
		return d.value(v.FieldByIndex(f.index), f)
	})
	if err != nil || of.required&^seen == 0 {
		return err
	}
	var missing []string
	for i, f := range of.fields {
		if of.required&^seen&(1<<i) != 0 {
			missing = append(missing, f.name)
		}
	}
	return fmt.Errorf("the body has no %s", strings.Join(missing, ", no "))
}

func twice(key []byte) error { return fmt.Errorf("the body has the key %.64q twice", key) }

func (d *decoder) value(v reflect.Value, f *field) error {
	switch v.Kind() {
	case reflect.Bool:
		if !d.word("false") {
			if !d.word("true") {
				return fmt.Errorf("%s: want true or false", f.name)
			}
			v.SetBool(true)
		}
	case reflect.String:
		if !d.take('"') {
			return fmt.Errorf("%s: want a string", f.name)
		}
		text, err := d.textTo()
		if err != nil {
			return err
		}
		if err := f.bounds(int64(utf8.RuneCount(text)), "characters"); err != nil {
			return err
		}
		if v.SetString(string(text)); f.among != nil && !slices.Contains(f.among, v.String()) {
			return fmt.Errorf("%s: want one of %s", f.name, strings.Join(f.among, ", "))
		}
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return d.number(v, f)
	case reflect.Map:
		return d.texts(v.Addr().Interface().(*map[string]string), f)
	case reflect.Slice:
		if !d.take('[') {
			return fmt.Errorf("%s: want an array", f.name)
		}
		err := d.each(']', func() error {
			if int64(v.Len()) == f.most {
				return f.bounds(f.most+1, "elements")
			}
			v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
			if err := d.object(v.Index(v.Len()-1), f.items); err != nil {
				return fmt.Errorf("%s[%d]: %w", f.name, v.Len()-1, err)
			}
			return nil
		})
		if err != nil {
			return err
		}
		return f.bounds(int64(v.Len()), "elements")
	}
	return nil
}

// bounds checks a number, or a length in units, against the bounds of the field.
func (f *field) bounds(n int64, units string) error {
	if n >= f.least && n <= f.most {
		return nil
	}
	want := fmt.Sprintf("%d to %d", f.least, f.most)
	switch {
	case f.most == math.MaxInt64:
		want = fmt.Sprintf("at least %d", f.least)
	case f.least == math.MinInt64:
		want = fmt.Sprintf("at most %d", f.most)
	}
	return errors.New(strings.TrimSpace(f.name + ": want " + want + " " + units))
}

// number reads an integer.
func (d *decoder) number(v reflect.Value, f *field) error {
	d.space()
	from := d.at
	for d.at < len(d.text) && strings.IndexByte("+-.0123456789Ee", d.text[d.at]) >= 0 {
		d.at++
	}
	text := string(d.text[from:d.at])
	digits := strings.TrimPrefix(text, "-")
	if digits == "" || digits[0] == '+' || digits[0] == '-' || digits[0] == '0' && len(digits) > 1 {
		return fmt.Errorf("%s: want an integer", f.name)
	}
	if v.Kind() == reflect.Uint64 {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return fmt.Errorf("%s: want an integer from 0 to %d", f.name, uint64(math.MaxUint64))
		}
		v.SetUint(n)
		return nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || v.OverflowInt(n) {
		return fmt.Errorf("%s: want an integer of %d bits", f.name, v.Type().Bits())
	}
	v.SetInt(n)
	return f.bounds(n, "")
}

// texts reads an object whose values are strings.
func (d *decoder) texts(into *map[string]string, f *field) error {
	if !d.take('{') {
		return fmt.Errorf("%s: want an object", f.name)
	}
	*into = map[string]string{}
	return d.each('}', func() error {
		key, err := d.key()
		if err != nil {
			return err
		}
		if _, found := (*into)[string(key)]; found {
			return twice(key)
		}
		if !d.take('"') {
			return fmt.Errorf("%s: want strings as values", f.name)
		}
		value, err := d.textTo()
		(*into)[string(key)] = string(value)
		return err
	})
}

// textTo reads the rest of a string, after its opening quote. Without escapes, the result shares memory with the body.
func (d *decoder) textTo() ([]byte, error) {
	from := d.at
	var out []byte // with the escapes resolved; nil without escapes
	ascii := true
	for d.at < len(d.text) {
		switch c := d.text[d.at]; {
		case c == '"':
			said := d.text[from:d.at]
			if d.at++; out != nil {
				said = append(out, said...)
			}
			if (!ascii || out != nil) && bytes.ContainsRune(said, utf8.RuneError) {
				return nil, errNotUnicode
			}
			return said, nil
		case c < ' ':
			return nil, errNotJSON
		case c == '\\':
			out = append(out, d.text[from:d.at]...)
			r, err := d.escape()
			if err != nil {
				return nil, err
			}
			out = utf8.AppendRune(out, r)
			from = d.at
		default:
			ascii = ascii && c < utf8.RuneSelf
			d.at++
		}
	}
	return nil, errNotJSON
}

// escape reads an escape in a string. It returns the replacement character for half of a surrogate pair.
func (d *decoder) escape() (rune, error) {
	if d.at+1 == len(d.text) {
		return 0, errNotJSON
	}
	c := d.text[d.at+1]
	if c != 'u' {
		i := strings.IndexByte(`"\/bfnrt`, c)
		if i < 0 {
			return 0, errNotJSON
		}
		d.at += 2
		return rune("\"\\/\b\f\n\r\t"[i]), nil
	}
	r, err := d.hex()
	if err != nil || !utf16.IsSurrogate(r) {
		return r, err
	}
	if d.at+1 < len(d.text) && d.text[d.at] == '\\' && d.text[d.at+1] == 'u' {
		low, err := d.hex()
		return utf16.DecodeRune(r, low), err
	}
	return unicode.ReplacementChar, nil
}

// hex reads \u and four digits.
func (d *decoder) hex() (rune, error) {
	if len(d.text)-d.at < 6 {
		return 0, errNotJSON
	}
	digits := string(d.text[d.at+2 : d.at+6])
	n, err := strconv.ParseUint(digits, 16, 16)
	if err != nil {
		return 0, errNotJSON
	}
	d.at += 6
	return rune(n), nil
}
