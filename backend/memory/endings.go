package memory

import (
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// endings remembers why the last holds ended against their holders' will.
type endings struct {
	reasons map[fencing.Token]backend.Reason
	order   []fencing.Token
	next    int
}

const endingsKept = 1024

func (n *endings) add(token fencing.Token, reason backend.Reason) {
	if n.reasons == nil {
		n.reasons = map[fencing.Token]backend.Reason{}
	}
	if len(n.order) < endingsKept {
		n.order = append(n.order, token)
	} else {
		delete(n.reasons, n.order[n.next])
		n.order[n.next] = token
		n.next = (n.next + 1) % endingsKept
	}
	n.reasons[token] = reason
}

// reason is empty if the hold was released, never was, or ended too long ago.
func (n *endings) reason(token fencing.Token) backend.Reason { return n.reasons[token] }
