package builtin

import (
	"cmp"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/generation"
)

// past is the driver's record of a durable cluster, which the cluster must not contradict. service.mu protects it. It
// is about the service and not about sessions: the end of a session is an ordinary loss, after which the next acquire
// is safe. After a cluster has lost changes no acquire is safe, since a known token may be issued a second time.
type past struct {
	cluster    string             // its name, the token space; empty before the first connection to a durable leader
	restore    string             // its generation in the server's form; empty if it was never restored
	generation fencing.Generation // the same in the form of package fencing
	seen       uint64             // the greatest revision, token or ticket that it has acknowledged to this driver
	lost       error              // a *backend.HistoryError, once the service has lost its history; never reset
}

// learn records the leader's report about its cluster. It fails if that is another cluster than the last leader's, or
// an earlier state of it. A server that is not durable has no history to lose: its holds end with their sessions.
//
//	first leader              its cluster is accepted as it is
//	the same as before        accepted, with its bounds of the TTL and its number of voters
//	another cluster id        lost: wiped, or replaced
//	another restore           lost: the changes after the backup are forgotten
//	never durable             no comparison; no token space, and no fencing
func (s *service) learn(w *lockpb.Welcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.past
	switch {
	case p.lost != nil:
	case p.cluster == "":
	case p.cluster != w.ClusterId:
		s.forgotten("cluster id", p.cluster, w.ClusterId)
	case p.restore != w.History:
		s.forgotten("restore of a backup", cmp.Or(p.restore, "none"), cmp.Or(w.History, "none"))
	}
	if p.lost != nil {
		return p.lost
	}
	now := *s.described.Load()
	now.MinTTL, now.MaxTTL = time.Duration(w.MinTtlNanos), time.Duration(w.MaxTtlNanos)
	switch {
	case !w.Durable:
		now.Capabilities, now.TokenSpace, now.Exclusion = capabilities, "", backend.ExclusionVolatileServer
		now.NoFencing = "the server keeps its state in memory only: its tokens start anew with its process"
	default:
		p.cluster, p.restore, p.generation = w.ClusterId, w.History, generation.Of(w.History)
		now.Capabilities, now.TokenSpace, now.NoFencing = capabilities|backend.CapFencing, w.ClusterId, ""
		now.Exclusion = backend.ExclusionDurableServer
		if w.Voters > 1 {
			now.Exclusion = backend.ExclusionQuorum
		}
	}
	s.described.Store(&now)
	return nil
}

// forgotten ends the connection and all sessions: the service has lost acknowledged changes. This driver cannot recover:
// its holds may be another client's, and a token that it saw may be issued a second time. By making a new driver the
// user confirms that no earlier holder still runs. The caller holds s.mu.
func (s *service) forgotten(what, was, now string) {
	if s.past.lost != nil || s.lineCtx.Err() != nil {
		return
	}
	lost := &backend.HistoryError{What: what, Was: was, Now: now}
	s.past.lost = lost
	s.log.Error("fencelock: "+lost.Error(), "driver", driverName)
	for _, own := range s.sessions {
		s.end(own) // the engine asks why
	}
	s.signal()
	if s.conn != nil {
		s.cut(s.conn, lost)
	}
}

// saw notes a revision, token or ticket that the service has acknowledged. Those of a server that is not durable are not
// kept: they restart with its process. The caller holds s.mu.
func (s *service) saw(revision uint64) {
	if s.past.cluster != "" {
		s.past.seen = max(s.past.seen, revision)
	}
}

// compare checks the service's revision in a reply. It must not be less than any revision that the service acknowledged
// to any client before the request was sent. Only answers about a session or a name have a comparable revision. Tokens
// of grants are only noted, since a repeated answer may have an old grant. The caller holds s.mu.
func (s *service) compare(seen uint64, r *lockpb.Reply) {
	var revision uint64
	switch answer := r.Answer.(type) {
	case *lockpb.Reply_Session:
		revision = answer.Session.Revision
	case *lockpb.Reply_Error:
		revision = answer.Error.Revision
	case *lockpb.Reply_Name:
		revision = answer.Name.Revision
	case *lockpb.Reply_Acquired:
		s.saw(answer.Acquired.Ticket)
		s.sawGrants(answer.Acquired.Grants)
	}
	if revision == 0 {
		return
	}
	if s.past.cluster != "" && revision < seen {
		s.forgotten("revision", strconv.FormatUint(seen, 10), strconv.FormatUint(revision, 10))
		return
	}
	s.saw(revision)
}

// sawGrants notes the tokens of grants, without the mark of tokens that do not fence. The caller holds s.mu.
func (s *service) sawGrants(grants []*lockpb.Grant) {
	for _, g := range grants {
		s.saw(fencing.Token(g.Token).Order())
	}
}
