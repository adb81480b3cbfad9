package zookeeper

import (
	"cmp"
	"encoding/binary"
	"errors"

	"github.com/go-zookeeper/zk"
)

// The protocol: a request is its length, a number, an operation and its fields; a reply is its length, the number, a
// zxid, an error code and its fields.

// The operations.
const (
	opCreate          = 1
	opDelete          = 2
	opExists          = 3
	opGetData         = 4
	opSetData         = 5
	opPing            = 11
	opGetChildren2    = 12
	opCheck           = 13
	opMulti           = 14
	opCreate2         = 15 // as opCreate; the answer has the node's state
	opCreateContainer = 19
	opAuth            = 100
	opClose           = -11
	opError           = -1
)

// The numbers of messages that are not replies to requests of callers.
const (
	numberEvent = -1
	numberPing  = -2
	numberAuth  = -4
)

// The types of events, and the flags of created nodes.
const (
	eventDeleted       = 2
	flagEphemeral      = 1
	flagEphemeralInSeq = 3
	flagContainer      = 4
)

// anyVersion is the version of a condition that every node fulfills.
const anyVersion = -1

// request is one operation with its fields.
type request struct {
	op   int32
	body []byte
}

func appendInt(p []byte, n int32) []byte { return binary.BigEndian.AppendUint32(p, uint32(n)) }

func appendLong(p []byte, n int64) []byte { return binary.BigEndian.AppendUint64(p, uint64(n)) }

func appendText[T string | []byte](p []byte, text T) []byte {
	return append(appendInt(p, int32(len(text))), text...)
}

func create(op int32, path string, data []byte, acl []zk.ACL, flags int32) request {
	p := make([]byte, 0, 64+len(path)+len(data))
	p = appendText(appendText(p, path), data)
	p = appendInt(p, int32(len(acl)))
	for _, a := range acl {
		p = appendText(appendText(appendInt(p, a.Perms), a.Scheme), a.ID)
	}
	return request{op, appendInt(p, flags)}
}

func remove(path string, version int32) request {
	return request{opDelete, appendInt(appendText(nil, path), version)}
}

func setData(path string, data []byte, version int32) request {
	return request{opSetData, appendInt(appendText(appendText(nil, path), data), version)}
}

func check(path string, version int32) request {
	return request{opCheck, appendInt(appendText(nil, path), version)}
}

func watched(op int32, path string, watch bool) request {
	p := append(appendText(nil, path), 0)
	if watch {
		p[len(p)-1] = 1
	}
	return request{op, p}
}

func getData(path string, watch bool) request { return watched(opGetData, path, watch) }

func children(path string) request { return watched(opGetChildren2, path, false) }

func exists(path string) request { return watched(opExists, path, false) }

// multi is a transaction of some operations.
func multi(ops ...request) request {
	var p []byte
	for _, op := range ops {
		p = append(appendInt(append(appendInt(p, op.op), 0), -1), op.body...)
	}
	return request{opMulti, appendInt(append(appendInt(p, -1), 1), -1)}
}

// confirmed is a transaction that changes nothing. A majority has to log it, so that the server of the session has all
// that the leader had when it answers.
func confirmed() request { return multi(check("/", anyVersion)) }

var errShort = errors.New("a reply of ZooKeeper is too short")

// reader reads the fields of a reply. err is the first failure, after which all fields are zero.
type reader struct {
	p   []byte
	err error
}

func (r *reader) take(n int) []byte {
	if r.err != nil || n < 0 || n > len(r.p) {
		r.err = errShort
		return nil
	}
	taken := r.p[:n]
	r.p = r.p[n:]
	return taken
}

func (r *reader) int() int32 {
	if p := r.take(4); p != nil {
		return int32(binary.BigEndian.Uint32(p))
	}
	return 0
}

func (r *reader) long() int64 {
	if p := r.take(8); p != nil {
		return int64(binary.BigEndian.Uint64(p))
	}
	return 0
}

func (r *reader) bool() bool {
	p := r.take(1)
	return p != nil && p[0] != 0
}

func (r *reader) bytes() []byte { return r.take(max(0, int(r.int()))) }

func (r *reader) stat() zk.Stat {
	return zk.Stat{
		Czxid: r.long(), Mzxid: r.long(), Ctime: r.long(), Mtime: r.long(), Version: r.int(), Cversion: r.int(),
		Aversion: r.int(), EphemeralOwner: r.long(), DataLength: r.int(), NumChildren: r.int(), Pzxid: r.long(),
	}
}

// reply is the answer to one request.
type reply struct {
	zxid int64
	err  error // a code
	body []byte
}

// node is a node as it was read.
type node struct {
	data []byte
	stat zk.Stat
}

// node is the answer to getData.
func (a reply) node() (node, error) {
	if a.err != nil {
		return node{}, a.err
	}
	r := reader{p: a.body}
	n := node{r.bytes(), r.stat()}
	return n, r.err
}

// stat is the answer to exists and setData.
func (a reply) stat() (zk.Stat, error) {
	r := reader{p: a.body}
	s := r.stat()
	if a.err != nil {
		return s, a.err
	}
	return s, r.err
}

// names is the answer to children. A missing node has none. All names are parts of one string, so that a queue of
// thousands is one allocation.
func (a reply) names() ([]string, zk.Stat, error) {
	if a.err != nil {
		return nil, zk.Stat{}, ignore(a.err, codeNoNode)
	}
	r, all := reader{p: a.body}, string(a.body)
	n := r.int()
	names := make([]string, 0, min(max(0, int(n)), len(a.body)/4))
	for range n {
		size := len(r.bytes())
		if r.err != nil {
			return nil, zk.Stat{}, r.err
		}
		end := len(all) - len(r.p)
		names = append(names, all[end-size:end])
	}
	s := r.stat()
	return names, s, r.err
}

// created is the answer to opCreate2.
func (a reply) created() (path string, czxid int64, err error) {
	if a.err != nil {
		return "", 0, a.err
	}
	r := reader{p: a.body}
	return string(r.bytes()), r.stat().Czxid, r.err
}

// failed is the answer to multi: nil, or the error of the operation that failed.
func (a reply) failed() error {
	r := reader{p: a.body}
	for a.err == nil && r.err == nil {
		op, end, _ := r.int(), r.bool(), r.int()
		switch {
		case end:
			return r.err
		case op == opCreate:
			r.bytes()
		case op == opSetData:
			r.stat()
		case op == opError:
			if code := code(r.int()); code != 0 && code != codeInconsistent {
				return code
			}
		}
	}
	return cmp.Or(a.err, r.err)
}
