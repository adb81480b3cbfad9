package lead

import (
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// EventSetRules is the audit event of new rules.
const EventSetRules = "set-rules"

// trail writes audit events about the entries of a term. Only the leader that proposed the entries does so. Denials are
// written where they are answered.
type trail struct {
	log     *audit.Log
	replica *replica.Replica
}

func newTrail(c *Config) trail { return trail{c.Audit, c.Replica} }

// landed writes the events of one entry.
func (t trail) landed(batch []Proposal, out *replica.Applied) {
	if t.log == nil || len(out.Events) == 0 {
		return
	}
	var from map[uint64]string // addresses by the order of the token; nil unless the log includes acquires and releases
	if t.log.Locks() {
		from = senders(batch, out)
	}
	server, rules := t.replica.ID(), t.replica.State.Machine.Rules().Revision()
	for i := range out.Events {
		e := &out.Events[i]
		line := audit.Event{
			Server: server, Outcome: audit.Done, Name: e.Name, Owner: e.Owner, Holder: string(e.Holder),
			Token: e.Token.Order(), Rules: rules,
		}
		by := forcer(batch, out, e)
		switch {
		case by != nil:
			line.Event, line.Principal, line.From = "force-release", e.Principal, by.Address
			line.By, line.Reason = e.By, e.Reason
		case e.Type == machine.EventExpired:
			line.Event, line.Reason = "expire", e.Reason
		case e.Type == machine.EventAcquired && from != nil:
			line.Event, line.Principal, line.From = "acquire", string(e.Holder), from[line.Token]
		case e.Type == machine.EventReleased && from != nil:
			line.Event, line.Principal, line.From = "release", string(e.Holder), from[line.Token]
		default:
			continue
		}
		t.log.Write(line)
	}
}

// senders returns the client addresses of the acquires that an entry granted without a wait, and of its releases, by
// the order of the token.
func senders(batch []Proposal, out *replica.Applied) map[uint64]string {
	from := map[uint64]string{}
	for i := range batch {
		x := &batch[i]
		if x.Address == "" {
			continue
		}
		for _, g := range out.Results[i].Grants {
			from[g.Token.Order()] = x.Address
		}
		if x.Command.Op == machine.OpRelease && x.Command.Token != 0 && out.Results[i].Code == machine.CodeOK {
			from[x.Command.Token.Order()] = x.Address
		}
	}
	return from
}
