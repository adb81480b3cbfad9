package machine

// Secrets. A client that knows the id of a session can act for the session, and a client that knows the id of a
// request can move and release its hold. From LevelHiddenIDs the machine keeps only hashes of both, which the leader
// makes before it proposes. Beside the hash of a request id it keeps the id itself, sealed with a key that is derived
// from the id of the request's session. So a snapshot gives no access to sessions and holds, and the leader can still
// return the ids of its requests to a client, which knows its session.

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/base64"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/internal/principal"
)

// The purposes of the hashes: a hash for one purpose is useless for another.
const (
	hidesSession = "fencelock: session\x00"
	hidesRequest = "fencelock: request\x00"
	sealsRequest = "fencelock: seal of requests\x00"
)

// hash returns 128 bits of the SHA-256 of an id for a purpose.
func hash(purpose string, id []byte) (sum [16]byte) {
	var room [192]byte // the longest purpose and id
	full := sha256.Sum256(append(append(room[:0], purpose...), id...))
	copy(sum[:], full[:])
	return sum
}

// Hidden returns the id by which the machine knows the session from LevelHiddenIDs on.
func (id SessionID) Hidden() SessionID {
	if (id == SessionID{}) {
		return id
	}
	return hash(hidesSession, id[:])
}

// HiddenRequest returns the id by which the machine knows a request from LevelHiddenIDs on.
func HiddenRequest(id string) string {
	sum := hash(hidesRequest, []byte(id))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// Seal encrypts the ids of the requests of one session. It is safe for concurrent use.
type Seal struct{ block cipher.Block }

// NewSeal returns the seal of the session with that id, as its client knows it.
func NewSeal(secret SessionID) Seal {
	key := hash(sealsRequest, secret[:])
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic(err) // the key has 16 bytes
	}
	return Seal{block}
}

// Close returns the sealed id of a request; hidden is its hash.
func (s Seal) Close(hidden, id string) string { return s.xor(hidden, id) }

// Open returns the id that Close has sealed.
func (s Seal) Open(hidden, sealed string) string { return s.xor(hidden, sealed) }

// xor applies the key stream of hidden: one id has one hash, so no two ids share a stream.
func (s Seal) xor(hidden, text string) string {
	var first [aes.BlockSize]byte
	if n, err := base64.RawURLEncoding.Decode(first[:], []byte(hidden)); err != nil || n != len(first) || text == "" {
		return ""
	}
	out := []byte(text)
	cipher.NewCTR(s.block, first[:]).XORKeyStream(out, out)
	return string(out)
}

// HideRequests replaces the ids of requests in c, as clients send them, by hashes, and seals the ids that the machine
// has to keep. It returns the error in these ids, which the machine cannot detect in hashes, or nil.
func (c *Command) HideRequests(seal Seal) *Result {
	if bad := checkUnder(c.Under); bad != nil {
		return bad
	}
	for i := range c.Requests {
		r := &c.Requests[i]
		if bad := checkRequestID(r.ID); bad != nil {
			return bad
		}
		id := r.ID
		r.ID = HiddenRequest(id)
		r.Sealed = seal.Close(r.ID, id)
	}
	if len(c.Under)+len(c.UnderHidden) > 0 {
		under := make([]string, len(c.Under), len(c.Under)+len(c.UnderHidden))
		for i, id := range c.Under {
			under[i] = HiddenRequest(id)
		}
		for _, hidden := range c.UnderHidden {
			if !slices.Contains(under, hidden) {
				under = append(under, hidden)
			}
		}
		c.Under, c.UnderHidden = under, nil
		if bad := checkUnder(under); bad != nil {
			return bad
		}
	}
	if c.RequestID != "" {
		id := c.RequestID
		c.RequestID = HiddenRequest(id)
		if c.Op == OpMove && len(id) <= maxIDBytes {
			c.Sealed = seal.Close(c.RequestID, id)
		}
	}
	return nil
}

// hide replaces the ids in a state of an earlier level by hashes, and gives each session the principal of its client.
func (m *Machine) hide() {
	fresh := New(1)
	for _, s := range m.sessionsByID() {
		hidden := &session{
			id: s.id.Hidden(), ttl: s.ttl, due: s.due, client: s.client, principal: principalOf(s.client),
			acked: s.acked,
		}
		for _, r := range s.results {
			hidden.results = append(hidden.results, remembered{r.seq, r.result.hidden()})
		}
		fresh.sessions[hidden.id] = hidden
		fresh.use(hidden.client, Usage{Sessions: 1})
	}
	for _, h := range sorted(m.holds) {
		moved := *h
		moved.session = h.session.Hidden()
		moved.hide(h.session)
		fresh.shareOwner(&moved)
		fresh.addHold(&moved)
	}
	for _, w := range sorted(m.waits) {
		moved := *w
		moved.session = w.session.Hidden()
		moved.requests = make([]Request, len(w.requests))
		for i, r := range w.requests {
			r.hide(w.session)
			moved.requests[i] = r
		}
		moved.under = make([]string, len(w.under))
		for i, id := range w.under {
			moved.under[i] = HiddenRequest(id)
		}
		fresh.addWait(&moved)
	}
	m.sessions, m.holds, m.waits = fresh.sessions, fresh.holds, fresh.waits
	m.names, m.sorted, m.claimants, m.under, m.clients = fresh.names, fresh.sorted, fresh.claimants, fresh.under,
		fresh.clients
	for i := range m.past.events {
		m.past.events[i].Session = m.past.events[i].Session.Hidden()
	}
}

// hide replaces the id of the request by its hash. secret is the session id as the client knows it; zero: no session,
// the hold lingers.
func (r *Request) hide(secret SessionID) {
	id := r.ID
	if r.ID = HiddenRequest(id); secret != (SessionID{}) {
		r.Sealed = NewSeal(secret).Close(r.ID, id)
	}
}

// hidden returns the result with hashes in place of the ids of sessions.
func (r *Result) hidden() *Result {
	if r == nil || r.Holder == nil && len(r.Cycle) == 0 {
		return r
	}
	out := *r
	if r.Holder != nil {
		b := *r.Holder
		b.Session = b.Session.Hidden()
		out.Holder = &b
	}
	out.Cycle = nil
	for _, b := range r.Cycle {
		b.Session = b.Session.Hidden()
		out.Cycle = append(out.Cycle, b)
	}
	return &out
}

// principalOf returns the principal of a session of an earlier level, which has only the client.
func principalOf(client string) principal.Principal {
	name, ok := strings.CutPrefix(client, "certificate ")
	switch {
	case ok:
		return principal.Certificate(name)
	case strings.HasPrefix(client, "address "):
		return principal.Nobody
	}
	return principal.Process // which names its connections as it likes
}
