package server

import (
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

const (
	// maxOutbox is how many replies a client may leave unread before it is cut off.
	maxOutbox = 64 << 10
	// calmOutbox is up to how many unread replies a client is sent events. Who reads slowly gets them later, or is told that
	// they are no longer kept.
	calmOutbox = 1 << 10
	// maxReplies and maxReplyBytes bound one message. One reply alone may be larger.
	maxReplies    = 1 << 10
	maxReplyBytes = 1 << 20
)

// outbox is what is to be sent to one client. Adding to it never blocks: the log goes on, whoever reads.
type outbox struct {
	mu      sync.Mutex
	replies []*lockpb.Reply
	closed  bool // nothing is added any more

	ready chan struct{} // has room for one: there is something to send, or closed
	calm  chan struct{} // has room for one: there is room for events again
}

func newOutbox() *outbox {
	return &outbox{ready: make(chan struct{}, 1), calm: make(chan struct{}, 1)}
}

// add reports false if the client reads too slowly. After close it does nothing.
func (o *outbox) add(r *lockpb.Reply) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return true
	}
	if len(o.replies) >= maxOutbox {
		return false
	}
	o.replies = append(o.replies, r)
	signal(o.ready)
	return true
}

// close adds a last reply. drop forgets those before it.
func (o *outbox) close(last *lockpb.Reply, drop bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	if drop {
		o.replies = nil
	}
	o.replies = append(o.replies, last)
	o.closed = true
	signal(o.ready)
}

// take returns what is to be sent next; last says that nothing follows.
func (o *outbox) take() (batch []*lockpb.Reply, last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, size := 0, 0
	for n < len(o.replies) && n < maxReplies {
		size += proto.Size(o.replies[n])
		if n > 0 && size > maxReplyBytes {
			break
		}
		n++
	}
	batch = o.replies[:n:n]
	if o.replies = o.replies[n:]; len(o.replies) == 0 {
		o.replies = nil // the batch keeps the memory
	} else {
		signal(o.ready)
	}
	if len(o.replies) < calmOutbox {
		signal(o.calm)
	}
	return batch, o.closed && len(o.replies) == 0
}

// isCalm reports whether there is room for events.
func (o *outbox) isCalm() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.replies) < calmOutbox
}

// signal fills a channel that has room for one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
