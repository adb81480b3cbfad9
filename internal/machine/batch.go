package machine

import (
	"fmt"
	"slices"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// Batch is one entry of the log: commands that are carried out one after the other.
type Batch struct {
	// At is the leader's wall clock, Unix nanoseconds. For people; it does not affect any decision.
	At       int64
	Commands []Command
}

// batchVersion is the first byte of every entry.
const batchVersion = 2

// field is one of the fields of Command that only some operations use.
type field uint16

const (
	fieldTTL      field = 1 << iota
	fieldRequests       // and Under
	fieldName
	fieldRequestID
	fieldToken
	fieldTarget
	fieldReason // and By
	fieldLimits
	fieldLevel
	fieldDeadlines // and Clock
	fieldSealed
	fieldRules
)

// fieldsOf has the fields that an operation uses, in the log as in Apply.
var fieldsOf = map[Op]field{
	OpOpenSession:  fieldTTL,
	OpCloseSession: 0,
	OpExpire:       0,
	OpAcquire:      fieldRequests,
	OpCancelWait:   fieldName | fieldRequestID | fieldTarget,
	OpRelease:      fieldName | fieldRequestID | fieldTarget | fieldToken,
	OpForceRelease: fieldName | fieldReason,
	OpFree:         fieldName | fieldToken,
	OpSetLimits:    fieldLimits,
	OpRaiseLevel:   fieldLevel,
	OpMove:         fieldName | fieldRequestID | fieldToken | fieldSealed,
	OpCheckpoint:   fieldDeadlines,
	OpRenew:        0,
	OpSetRules:     fieldRules,
	OpSetPolicies:  fieldRules,
}

// AppendBatch appends the encoding of b to dst. DecodeBatch returns an equal batch, up to fields that the operations
// do not use.
func AppendBatch(dst []byte, b *Batch) []byte {
	dst = append(dst, batchVersion)
	dst = appendInt(dst, b.At)
	dst = appendUint(dst, uint64(len(b.Commands)))
	var payload []byte
	for i := range b.Commands {
		c := &b.Commands[i]
		payload = appendPayload(payload[:0], c)
		dst = appendUint(dst, uint64(c.Op))
		dst = appendFlags(dst, c.Ignorable)
		dst = appendUint(dst, uint64(len(payload)))
		dst = append(dst, payload...)
	}
	return dst
}

func appendPayload(dst []byte, c *Command) []byte {
	f, known := fieldsOf[c.Op]
	if !known {
		return append(dst, c.Payload...)
	}
	hasSession := c.Session != SessionID{}
	dst = appendFlags(dst, hasSession, c.Seq != 0, c.Acked != 0, c.Wait, c.Linger, c.Own,
		f&fieldTTL != 0 && c.Client != "" || f&fieldReason != 0 && c.conditional() ||
			f&fieldSealed != 0 && c.Sealed != "",
		f&fieldLimits != 0 && c.share() != 0 || f&(fieldTTL|fieldTarget) != 0 && c.Principal != "")
	if hasSession {
		dst = append(dst, c.Session[:]...)
	}
	if c.Seq != 0 {
		dst = appendUint(dst, c.Seq)
	}
	if c.Acked != 0 {
		dst = appendUint(dst, c.Acked)
	}
	if f&fieldTTL != 0 {
		dst = appendInt(dst, int64(c.TTL))
		if c.Client != "" {
			dst = appendText(dst, c.Client)
		}
		if c.Principal != "" {
			dst = appendText(dst, string(c.Principal))
		}
	}
	if f&fieldRequests != 0 {
		dst = appendRequests(dst, c.Requests)
		dst = appendTexts(dst, c.Under)
	}
	if f&fieldName != 0 {
		dst = appendText(dst, c.Name)
	}
	if f&fieldRequestID != 0 {
		dst = appendText(dst, c.RequestID)
	}
	if f&fieldSealed != 0 && c.Sealed != "" {
		dst = appendText(dst, c.Sealed)
	}
	if f&fieldToken != 0 {
		dst = appendUint(dst, uint64(c.Token))
	}
	if f&fieldTarget != 0 {
		dst = appendUint(dst, c.Target)
		if c.Principal != "" {
			dst = appendText(dst, string(c.Principal))
		}
	}
	if f&fieldReason != 0 {
		dst = appendText(dst, c.Reason)
		dst = appendText(dst, c.By)
		if c.conditional() {
			dst = appendText(dst, string(c.Principal))
			dst = append(dst, c.Nonce[:]...)
			dst = appendUint(dst, uint64(c.Token))
		}
	}
	if f&fieldLimits != 0 {
		limits := c.Limits
		if limits == nil {
			limits = &Limits{} // invalid in the same way
		}
		dst = appendLimits(dst, limits)
		if c.share() != 0 {
			dst = appendInt(dst, int64(c.share()))
		}
	}
	if f&fieldLevel != 0 {
		dst = appendUint(dst, uint64(c.Level))
	}
	if f&fieldRules != 0 {
		dst = appendText(dst, c.Rules)
	}
	if f&fieldDeadlines != 0 {
		dst = appendInt(dst, int64(c.Clock))
		dst = appendUint(dst, uint64(len(c.Deadlines)))
		for _, d := range c.Deadlines {
			dst = append(dst, d.Session[:]...)
			dst = appendInt(dst, int64(d.At))
		}
	}
	return dst
}

// conditional reports whether a forced release uses fields that members know only from LevelNonces on.
func (c *Command) conditional() bool {
	return c.Principal != "" || c.Nonce != fencing.Nonce{} || c.Token != 0
}

// share returns the limits' ClientShare; zero if it is the default, which members of the first level use.
func (c *Command) share() int {
	if c.Limits == nil || c.Limits.ClientShare == DefaultLimits().ClientShare {
		return 0
	}
	return c.Limits.ClientShare
}

// DecodeBatch decodes the output of AppendBatch. It shares no memory with data. An operation that this build does not
// know is no error: its command carries Payload, and Apply answers CodeUnknown. Any other data that AppendBatch does
// not write is a *FormatError; no memory is allocated for lengths that data cannot contain.
func DecodeBatch(data []byte) (*Batch, error) {
	r := &reader{what: "batch", data: data}
	if v := r.byte(); v != batchVersion {
		r.fail("version %d, this build reads %d", v, batchVersion)
	}
	b := &Batch{At: r.int()}
	n := r.count(3) // operation, flags and length
	b.Commands = make([]Command, 0, min(n, 1024))
	for len(b.Commands) < n && r.err == nil {
		b.Commands = append(b.Commands, r.command())
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return b, nil
}

func (r *reader) command() Command {
	c := Command{Op: Op(r.max(1<<16 - 1)), Ignorable: r.flags(1)[0]}
	n := r.count(1)
	f, known := fieldsOf[c.Op]
	if !known {
		c.Payload = slices.Clone(r.bytes(n))
		return c
	}
	whole := r.data
	r.data = whole[:r.off+n]
	r.payload(&c, f)
	r.must(r.off == len(r.data), "a payload is longer than its fields")
	r.data = whole
	if r.err != nil {
		r.off = len(whole)
	}
	return c
}

func (r *reader) payload(c *Command, f field) {
	has := r.flags(8)
	r.must(!has[6] || f&(fieldTTL|fieldReason|fieldSealed) != 0, "a client of no session")
	r.must(!has[7] || f&(fieldLimits|fieldTTL|fieldTarget) != 0, "a share of no limits")
	c.Wait, c.Linger, c.Own = has[3], has[4], has[5]
	if has[0] {
		c.Session = r.session()
		r.must(c.Session != SessionID{}, "a session of zero")
	}
	if has[1] {
		c.Seq = r.uint()
		r.must(c.Seq != 0, "a sequence of zero")
	}
	if has[2] {
		c.Acked = r.uint()
		r.must(c.Acked != 0, "an acknowledgement of zero")
	}
	if f&fieldTTL != 0 {
		c.TTL = time.Duration(r.int())
		if has[6] {
			c.Client = r.text()
			r.must(c.Client != "", "an empty client")
		}
		c.Principal = r.principal(has[7])
	}
	if f&fieldRequests != 0 {
		c.Requests, c.Under = r.requests(), r.texts()
	}
	if f&fieldName != 0 {
		c.Name = r.text()
	}
	if f&fieldRequestID != 0 {
		c.RequestID = r.text()
	}
	if f&fieldSealed != 0 && has[6] {
		c.Sealed = r.text()
		r.must(c.Sealed != "", "nothing is sealed")
	}
	if f&fieldToken != 0 {
		c.Token = fencing.Token(r.uint())
	}
	if f&fieldTarget != 0 {
		c.Target = r.uint()
		c.Principal = r.principal(has[7])
	}
	if f&fieldReason != 0 {
		c.Reason, c.By = r.text(), r.text()
		if has[6] {
			c.Principal, c.Nonce = principal.Principal(r.text()), r.nonce()
			c.Token = fencing.Token(r.uint())
			r.must(c.conditional(), "conditions that are all empty")
		}
	}
	if f&fieldLimits != 0 {
		c.Limits = r.limits()
		if has[7] {
			c.Limits.ClientShare = int(r.int())
			r.must(c.share() != 0, "the usual share")
		}
	}
	if f&fieldLevel != 0 {
		c.Level = uint32(r.max(1<<32 - 1))
	}
	if f&fieldRules != 0 {
		c.Rules = r.text()
	}
	if f&fieldDeadlines != 0 {
		c.Clock = r.duration()
		for n := r.count(len(SessionID{}) + 1); n > 0 && r.err == nil; n-- {
			c.Deadlines = append(c.Deadlines, Deadline{r.session(), r.duration()})
		}
	}
}

func (r *reader) principal(there bool) principal.Principal {
	if !there {
		return principal.Nobody
	}
	p := principal.Principal(r.text())
	r.must(p != "", "an empty principal")
	return p
}

// FormatError describes an error in a log entry or a snapshot.
type FormatError struct {
	What   string // "batch" or "snapshot"
	Offset int    // where, in bytes from the start
	Why    string
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("machine: %s: at byte %d: %s", e.What, e.Offset, e.Why)
}
