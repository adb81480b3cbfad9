package machine

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// The encoding of log entries and snapshots: unsigned varints, length and bytes, one byte for flags. Every value has
// one encoding only, so a decoded value encodes to the same bytes.

func appendUint(dst []byte, v uint64) []byte { return binary.AppendUvarint(dst, v) }

func appendInt(dst []byte, v int64) []byte { return binary.AppendVarint(dst, v) }

func appendText(dst []byte, s string) []byte {
	return append(appendUint(dst, uint64(len(s))), s...)
}

// appendFlags packs up to eight booleans, the first one lowest.
func appendFlags(dst []byte, flags ...bool) []byte {
	b := byte(0)
	for i, f := range flags {
		if f {
			b |= 1 << i
		}
	}
	return append(dst, b)
}

func appendLimits(dst []byte, l *Limits) []byte {
	for _, f := range l.firstLevel() {
		dst = appendInt(dst, int64(*f.Value))
	}
	return dst
}

func appendRequest(dst []byte, r *Request) []byte {
	dst = appendText(dst, r.Name)
	dst = appendText(dst, r.ID)
	dst = appendText(dst, r.HoldID)
	dst = appendText(dst, r.Owner)
	dst = append(dst, byte(r.Kind))
	dst = appendFlags(dst, r.Hierarchical, r.Permits|r.Limit != 0, r.MinHold != 0, len(r.Metadata) > 0,
		r.Nonce != fencing.Nonce{}, r.Sealed != "", r.HeedsMaxHold, r.For != "")
	if r.Permits|r.Limit != 0 {
		dst = appendUint(dst, uint64(r.Permits))
		dst = appendUint(dst, uint64(r.Limit))
	}
	if r.MinHold != 0 {
		dst = appendInt(dst, int64(r.MinHold))
	}
	if len(r.Metadata) > 0 {
		dst = appendUint(dst, uint64(len(r.Metadata)))
		for _, k := range slices.Sorted(maps.Keys(r.Metadata)) {
			dst = appendText(dst, k)
			dst = appendText(dst, r.Metadata[k])
		}
	}
	if (r.Nonce != fencing.Nonce{}) {
		dst = append(dst, r.Nonce[:]...)
	}
	if r.Sealed != "" {
		dst = appendText(dst, r.Sealed)
	}
	if r.For != "" {
		dst = appendText(dst, string(r.For))
	}
	return dst
}

func appendTexts(dst []byte, all []string) []byte {
	dst = appendUint(dst, uint64(len(all)))
	for _, s := range all {
		dst = appendText(dst, s)
	}
	return dst
}

func appendRequests(dst []byte, requests []Request) []byte {
	dst = appendUint(dst, uint64(len(requests)))
	for i := range requests {
		dst = appendRequest(dst, &requests[i])
	}
	return dst
}

// reader reads the output of the functions above. After its first error it returns zero values only.
type reader struct {
	what string
	data []byte
	off  int
	err  *FormatError
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = &FormatError{What: r.what, Offset: r.off, Why: fmt.Sprintf(format, args...)}
		r.off = len(r.data)
	}
}

func (r *reader) uint() uint64 {
	v, n := binary.Uvarint(r.data[r.off:])
	if n <= 0 || n > 1 && r.data[r.off+n-1] == 0 {
		r.fail("a number is cut off, too large, or longer than needed")
		return 0
	}
	r.off += n
	return v
}

func (r *reader) int() int64 {
	u := r.uint()
	v := int64(u >> 1)
	if u&1 != 0 {
		v = ^v
	}
	return v
}

// max returns a number up to most.
func (r *reader) max(most uint64) uint64 {
	v := r.uint()
	if v > most {
		r.fail("%d is larger than %d", v, most)
		return 0
	}
	return v
}

// count returns a number of items of at least size bytes each, for which the remaining data is large enough.
func (r *reader) count(size int) int {
	n := r.uint()
	if n > uint64((len(r.data)-r.off)/size) {
		r.fail("%d things of at least %d bytes are announced, and cut off", n, size)
		return 0
	}
	return int(n)
}

func (r *reader) bytes(n int) []byte {
	if n > len(r.data)-r.off {
		r.fail("%d bytes are missing", n-len(r.data)+r.off)
		return nil
	}
	r.off += n
	return r.data[r.off-n : r.off]
}

func (r *reader) text() string { return string(r.bytes(r.count(1))) }

// threeTexts reads texts that are kept and dropped together, as pieces of one string.
func (r *reader) threeTexts() (a, b, c string) {
	from := r.off
	var first, last [3]int
	for i := range first {
		n := r.count(1)
		first[i] = r.off - from
		r.bytes(n)
		last[i] = r.off - from
	}
	if r.err != nil {
		return "", "", ""
	}
	all := string(r.data[from:r.off])
	return all[first[0]:last[0]], all[first[1]:last[1]], all[first[2]:last[2]]
}

func (r *reader) byte() byte {
	if b := r.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

// flags returns n booleans.
func (r *reader) flags(n int) (flags [8]bool) {
	b := r.byte()
	if b>>n != 0 {
		r.fail("flags %#x, only %d are known", b, n)
	}
	for i := range n {
		flags[i] = b&(1<<i) != 0
	}
	return flags
}

func (r *reader) session() (id SessionID) {
	copy(id[:], r.bytes(len(id)))
	return id
}

func (r *reader) nonce() (n fencing.Nonce) {
	copy(n[:], r.bytes(len(n)))
	return n
}

func (r *reader) limits() *Limits {
	l := &Limits{ClientShare: DefaultLimits().ClientShare}
	for _, f := range l.firstLevel() {
		*f.Value = int(r.int())
	}
	return l
}

// minRequest is the minimum size of a request: four empty texts, kind and flags.
const minRequest = 6

func (r *reader) request() (q Request) {
	q.Name, q.ID, q.HoldID = r.threeTexts()
	q.Owner = r.text() // most requests of a session have the same owner: see shareOwner
	q.Kind = Kind(r.byte())
	f := r.flags(8)
	q.Hierarchical, q.HeedsMaxHold = f[0], f[6]
	if f[1] {
		q.Permits, q.Limit = uint32(r.max(1<<32-1)), uint32(r.max(1<<32-1))
		r.must(q.Permits|q.Limit != 0, "permits that are all zero")
	}
	if f[2] {
		q.MinHold = time.Duration(r.int())
		r.must(q.MinHold != 0, "a minimum hold of zero")
	}
	if f[3] {
		q.Metadata = r.metadata()
	}
	if f[4] {
		q.Nonce = r.nonce()
		r.must(q.Nonce != fencing.Nonce{}, "a nonce of zero")
	}
	if f[5] {
		q.Sealed = r.text()
		r.must(q.Sealed != "", "nothing is sealed")
	}
	q.For = r.principal(f[7])
	return q
}

func (r *reader) metadata() map[string]string {
	n := r.count(2)
	r.must(n > 0, "metadata without an entry")
	data := make(map[string]string, min(n, 64))
	last := ""
	for i := 0; i < n && r.err == nil; i++ {
		k := r.text()
		r.must(i == 0 || k > last, "metadata that is not sorted")
		data[k] = r.text()
		last = k
	}
	return data
}

func (r *reader) requests() []Request {
	n := r.count(minRequest)
	if n == 0 {
		return nil
	}
	requests := make([]Request, 0, min(n, 64))
	for len(requests) < n && r.err == nil {
		requests = append(requests, r.request())
	}
	return requests
}

func (r *reader) texts() []string {
	n := r.count(1)
	if n == 0 {
		return nil
	}
	all := make([]string, 0, min(n, 64))
	for len(all) < n && r.err == nil {
		all = append(all, r.text())
	}
	return all
}

func (r *reader) must(ok bool, why string) {
	if !ok {
		r.fail("%s", why)
	}
}

// end fails if data is left over, and returns the first error.
func (r *reader) end() error {
	if left := len(r.data) - r.off; left > 0 {
		r.fail("%d bytes are left over", left)
	}
	if r.err != nil {
		return r.err
	}
	return nil
}
