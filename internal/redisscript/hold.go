package redisscript

// This file writes and reads the text by which Redis knows a hold. It is a text and not a hash because SET NX, GET and
// DEL of one key are the whole cost of an uncontended lock.

import (
	"crypto/sha256"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Hold is the value of the lock key and of the queue's elements: share|client|nonce|request|id|owner, and metadata
// after a newline, which no owner has. Everything up to the request decides, and is never shown; the rest is for
// people.
//
// The share is px of an exclusive hold, "s" and px of a shared one, "p", n/limit/ and px of permits.
type Hold struct {
	PX             time.Duration // time to live when granted: the TTL, or the minimum hold if that is longer
	Shared         bool          // beside other shared holds
	Permits, Limit int           // so many of limit permits, if not zero
	Client         string        // whose channel hears of the hand-over
	Nonce          string        // of one try of the client
	Request        string        // the secret key: Request.RequestID
	ID             string        // what may be shown: Request.HoldID
	Owner          string
	Metadata       string
}

// Start returns the part that decides, with its last separator, so that two starts are equal or differ in a field and
// none is a prefix of another.
func (h Hold) Start() string {
	_, start, _ := h.Texts()
	return start
}

// Incarnation returns the part of Start that the request's own id does not contain.
func (h Hold) Incarnation() string {
	_, _, incarnation := h.Texts()
	return incarnation
}

// Value returns the whole string.
func (h Hold) Value() string {
	value, _, _ := h.Texts()
	return value
}

// Texts returns Value, and Start and Incarnation as parts of it, with one allocation.
func (h *Hold) Texts() (value, start, incarnation string) {
	b := append(h.appendShare(make([]byte, 0, 256)), '|')
	b = append(append(append(b, h.Client...), '|'), h.Nonce...)
	ofIncarnation := len(b)
	b = append(append(append(b, '|'), h.Request...), '|')
	ofStart := len(b)
	b = append(append(append(b, h.ID...), '|'), h.Owner...)
	if h.Metadata != "" {
		b = append(append(b, '\n'), h.Metadata...)
	}
	value = string(b)
	return value, value[:ofStart], value[:ofIncarnation]
}

// StartOf returns Start for the incarnation of a request's hold.
func StartOf(incarnation, request string) string { return incarnation + "|" + request + "|" }

// NonceOf returns the public nonce of the hold that start names. It is a hash, because start contains the request id and
// is unique already: a driver's random identity and its count of tries tell each new hold from every earlier one, and a
// repeat of the request finds the same start. So the server stores no more than before.
func NonceOf(start string) fencing.Nonce {
	sum := sha256.Sum256(append(append(make([]byte, 0, 256), "fencelock hold nonce\x00"...), start...))
	return fencing.Nonce(sum[:16])
}

// ValueOf returns Value for the incarnation of a request's hold, with what h says for people.
func ValueOf(incarnation, request string, h Hold) string {
	return StartOf(incarnation, request) + h.forPeople()
}

// forPeople is the part that decides nothing: the id that may be shown, the owner and the metadata.
func (h Hold) forPeople() string {
	if h.Metadata == "" {
		return h.ID + "|" + h.Owner
	}
	return h.ID + "|" + h.Owner + "\n" + h.Metadata
}

// appendShare writes the first field.
func (h *Hold) appendShare(b []byte) []byte {
	switch {
	case h.Shared:
		b = append(b, 's')
	case h.Permits > 0:
		b = strconv.AppendInt(append(b, 'p'), int64(h.Permits), 10)
		b = append(strconv.AppendInt(append(b, '/'), int64(h.Limit), 10), '/')
	}
	return append(b, Millis(h.PX)...)
}

// readShare is the inverse of appendShare.
func (h *Hold) readShare(text string) bool {
	if rest, ok := strings.CutPrefix(text, "s"); ok {
		h.Shared, text = true, rest
	} else if rest, ok := strings.CutPrefix(text, "p"); ok {
		parts := strings.Split(rest, "/")
		if len(parts) != 3 {
			return false
		}
		var err1, err2 error
		h.Permits, err1 = strconv.Atoi(parts[0])
		h.Limit, err2 = strconv.Atoi(parts[1])
		if err1 != nil || err2 != nil || h.Permits < 1 || h.Limit < h.Permits {
			return false
		}
		text = parts[2]
	}
	px, err := strconv.ParseInt(text, 10, 64)
	h.PX = time.Duration(px) * time.Millisecond
	return err == nil
}

// NonceIn returns the nonce in a value, or "".
func NonceIn(value string) string {
	_, rest, _ := strings.Cut(value, "|")
	_, rest, _ = strings.Cut(rest, "|")
	nonce, _, _ := strings.Cut(rest, "|")
	return nonce
}

// told stands before the id of a hold that several attempts were answered with. No id has it. The script
// writes it.
const told = "+"

// ParseHold reads what Value wrote. It is false for foreign values and for the mark of a closed name.
func ParseHold(v string) (Hold, bool) {
	parts := strings.SplitN(v, "|", 6)
	if len(parts) != 6 {
		return Hold{}, false
	}
	h := Hold{Client: parts[1], Nonce: parts[2], Request: parts[3], ID: strings.TrimPrefix(parts[4], told)}
	if !h.readShare(parts[0]) {
		return Hold{}, false
	}
	h.Owner, h.Metadata, _ = strings.Cut(parts[5], "\n")
	return h, true
}
