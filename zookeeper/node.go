// This file maps names, requests and grants to nodes and back. It defines all stored forms: the paths,
// the names of entries, their content, and the incarnation of a grant. It does no I/O.

package zookeeper

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// A name has a container node below the root, and every acquire of it one ephemeral node there, named for its request
// and numbered by the server:
//
//	/fencelock                         the token space
//	/fencelock/lock:orders%2F7         why a hold was taken away last
//	/fencelock/lock:orders%2F7/4f2a….0000000003   {"fencelock":1,"owner":"host/42/…","hold":"…","nonce":"…"}
//
// The mark before the name is the boundary of a prefix: no part of a prefix starts with it, so that no name of one
// prefix is part of another prefix. The node's name also has the kind of the request, unless it is an exclusive hold:
// see kind.go.

// nameMark starts the nodes of names. checkOptions refuses it in prefixes.
const nameMark = "lock:"

// escape returns the name's node, without its mark. It escapes all characters except letters, digits, - and _, so that
// ZooKeeper refuses no such name and reads no such name as part of a path, and no two names have one node.
func escape(name string) string {
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		c := name[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// unescape is the reverse of escape. It returns false for nodes that escape never makes, such as one with %2f in place
// of %2F: with two nodes for one name, List would yield that name twice.
func unescape(node string) (name string, ok bool) {
	name, err := url.PathUnescape(node)
	return name, err == nil && escape(name) == node && backend.ValidateName(name) == nil
}

// dir returns the node of a name.
func (e *service) dir(name string) string { return e.root + "/" + nameMark + escape(name) }

// nameOf returns the name of a node below the root, and false for foreign nodes.
func nameOf(node string) (name string, ok bool) {
	escaped, ok := strings.CutPrefix(node, nameMark)
	if !ok {
		return "", false
	}
	return unescape(escaped)
}

// entry is a node of the queue, as parsed from its name.
type entry struct {
	path      string
	requestID string
	kit.Use

	// Given by the server. See maxNumber.
	number uint32
}

// maxNumber bounds the numbers of entries that hold. A name's node counts its creations with 31 bits, and at the end
// of the count every entry has the number 2³¹ - 1, or a negative one if requests follow each other closely: neither
// order nor the identity of a path rests on such a number. An entry with a number of maxNumber or more therefore never
// holds: it leaves, and the node of the name is replaced after its last entry has left (renewDir). At half of the
// count, servers still number in order, so that clients without this bound stay behind a holder below it.
const maxNumber = 1 << 30

// spent reports whether the number of an entry is too high to hold.
func (e entry) spent() bool { return e.number >= maxNumber }

// spentCount reports whether the next entry in a node is spent. The servers return the number of changes: twice the
// creations, less the present children.
func spentCount(dir zk.Stat) bool { return uint32(dir.Cversion+dir.NumChildren)/2 >= maxNumber }

// entryOf parses the name of a node, and returns false for foreign nodes. It is called for every entry of every queue
// read, so it makes only one allocation, for the path; the request id is a part of that.
func entryOf(dir, node string) (entry, bool) {
	name, number, ok := strings.Cut(node, ".")
	n, err := strconv.ParseInt(number, 10, 32)
	if !ok || err != nil || !tenDigits(number, n) {
		return entry{}, false
	}
	id, u := cutMark(name)
	if backend.ValidateRequestID(id) != nil {
		return entry{}, false
	}
	path := dir + "/" + node
	// The id is cut from path, so that a kept entry does not keep the rest of the queue in memory.
	id = path[len(dir)+1:][:len(id)]
	return entry{path: path, requestID: id, Use: u, number: uint32(n)}, true
}

// tenDigits reports whether text is the server's spelling of the number n, as of %010d. Other spellings of a number
// belong to foreign nodes.
func tenDigits(text string, n int64) bool {
	if n < 0 {
		return len(text) == 10 || n <= -1e9
	}
	return len(text) == 10 && text[0] != '+' && text[0] != '-'
}

// entriesOf returns the entries among the children of dir in the order of the queue. ZooKeeper returns children in no
// order.
//
// A negative number follows 2³¹ - 1. The order of the entries below maxNumber is that of their creation; no decision
// depends on the order of the others.
func entriesOf(dir string, children []string) []entry {
	entries := make([]entry, 0, len(children))
	for _, node := range children {
		if e, ok := entryOf(dir, node); ok {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.number, b.number), strings.Compare(a.requestID, b.requestID))
	})
	return entries
}

// ofRequest returns the entries of one request, the oldest first; there is more than one only if a creation was
// repeated.
func ofRequest(queue []entry, requestID string) []entry {
	var own []entry
	for _, e := range queue {
		if e.requestID == requestID {
			own = append(own, e)
		}
	}
	return own
}

// value is the content of a request's node, as JSON. Only Token and Try affect decisions, for moved nodes and for
// refusals; the rest is shown to people. Names alone decide the holders.
type value struct {
	Format   int               `json:"fencelock"` // 1
	Owner    string            `json:"owner,omitempty"`
	HoldID   string            `json:"hold,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Try      bool              `json:"try,omitempty"`   // an attempt that does not wait
	Token    int64             `json:"token,omitempty"` // of a node that moved to another session; 0: its czxid
	Nonce    string            `json:"nonce,omitempty"` // Grant.Nonce; empty from clients before 2026-11-25
}

// nonce returns Grant.Nonce of the hold. It is zero if an earlier version made or moved the node.
func (v value) nonce() fencing.Nonce {
	n, _ := fencing.ParseNonce(v.Nonce) // zero if it is not one
	return n
}

// valueOf returns the content of a new node of a request. It has a new nonce, and no token: the token is the node's
// zxid, which is not known yet.
func valueOf(r backend.Request) value {
	return value{
		Format: 1, Owner: r.Owner, HoldID: r.HoldID, Metadata: r.Metadata, Try: !r.Wait, Nonce: fencing.NewNonce().String(),
	}
}

// encode returns the JSON of a value, of text and numbers only, which can be encoded.
func (v value) encode() []byte {
	v.Format = 1
	text, _ := json.Marshal(v)
	return text
}

// decode reads the content of a node that was created by czxid. Unreadable content, such as a later format or foreign
// text, is shown without an owner but still counts in the queue.
func decode(data []byte, czxid int64) value {
	var v value
	if json.Unmarshal(data, &v) != nil || v.Format != 1 {
		v = value{}
	}
	if v.Token == 0 {
		v.Token = czxid
	}
	return v
}

// incarnation identifies one hold permanently: the node and its token. Grants carry it, and pathOf reads it back, so
// that the driver needs no table to find the node of a grant from another process.
func incarnation(node string, token int64) string { return node + "/" + strconv.FormatInt(token, 10) }

// pathOf returns the node of a grant, and its token. It returns false for a grant made by Request.Grant, which names a
// request only, and for a grant with contradictory parts.
func (e *service) pathOf(g backend.Grant) (path string, token int64, ok bool) {
	node, number, ok := strings.Cut(g.Incarnation, "/")
	if !ok {
		return "", 0, false
	}
	token, err := strconv.ParseInt(number, 10, 64)
	x, ok := entryOf(e.dir(g.Name), node)
	asked := kit.Use{Kind: g.Kind, Permits: g.Permits, Limit: g.Limit}
	return x.path, token, ok && err == nil && x.requestID == g.RequestID && x.Use == asked
}

// tokenOf returns the token for the writes of an entry's holder: the zxid that created it, marked unless the hold is
// exclusive. The counter in the node's name is no token: it restarts after a name's node was removed.
func tokenOf(u kit.Use, zxid int64) fencing.Token {
	if u.Kind != backend.KindExclusive {
		return fencing.Token(zxid).NotExclusive()
	}
	return fencing.Token(zxid)
}
