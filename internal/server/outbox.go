package server

// The messages that wait to be sent to one client.

import (
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/notify"
)

const (
	// maxOutbox and maxOutboxBytes bound the unread replies of a client, in number and size. A client beyond them is
	// disconnected.
	maxOutbox      = 64 << 10
	maxOutboxBytes = 8 << 20
	// maxUnread bounds the unread bytes of all clients together. Beyond it, a client with more than fairUnread unread
	// bytes is disconnected at its next message.
	maxUnread  = 256 << 20
	fairUnread = 64 << 10
	// A client gets events, and answers to looks, while its unread data is below calmOutbox and calmBytes. A slower
	// client gets them later, or an error if the events are not kept any more.
	calmOutbox = 1 << 10
	calmBytes  = 1 << 20
	// maxReplies and maxReplyBytes bound one message. One reply alone may be larger.
	maxReplies    = 1 << 10
	maxReplyBytes = 1 << 20
)

// outbox holds the messages for one client. Adding to it never blocks, since one goroutine delivers outcomes of the
// log for all clients: otherwise a client that does not read would stop the others. add fails beyond a bound, and the
// connection is ended. Every reply counts, in bytes, until the connection has taken it.
//
// Events and looks, which can wait, ask isCalm first, so that a slow client does not lose its connection for them.
type outbox struct {
	unread *atomic.Int64 // of all clients of the server, in bytes

	mu      sync.Mutex
	replies []sized
	pushed  uint64 // the number of pushes about sessions that were added
	bytes   int    // of replies, and of the replies that take returned last
	taken   int    // bytes of these
	closed  bool   // no further replies are added

	ready notify.Signal // there is something to send, or closed
	calm  notify.Signal // there is room for events
	still notify.Signal // there is room for the next look
}

// sized is a reply with its size.
type sized struct {
	reply *lockpb.Reply
	bytes int
}

func newOutbox(unread *atomic.Int64) *outbox {
	return &outbox{
		unread: unread, ready: notify.New(), calm: notify.New(), still: notify.New(),
	}
}

// add reports false if the client reads too slowly. After close it has no effect. add sets the number of pushes in a
// reply that has a field for it: no push can come between.
func (o *outbox) add(r *lockpb.Reply) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return true
	}
	size := sizeOf(r)
	own := o.bytes + size
	// A single reply may be larger than the bound.
	if len(o.replies) >= maxOutbox || own > maxOutboxBytes && o.bytes > 0 ||
		own > fairUnread && o.unread.Load()+int64(size) > maxUnread {
		return false
	}
	switch r.Answer.(type) {
	case *lockpb.Reply_Granted, *lockpb.Reply_Lost:
		o.pushed++
	}
	if r.Pushed != nil {
		*r.Pushed = o.pushed
	}
	o.put(r, size)
	return true
}

// sizeOf estimates the size of a reply: on the wire, and in memory besides. It does not measure the most frequent
// answers.
func sizeOf(r *lockpb.Reply) int {
	const most = 128 // but for texts
	switch a := r.Answer.(type) {
	case *lockpb.Reply_Done:
		return most
	case *lockpb.Reply_Acquired:
		size := most
		for _, g := range a.Acquired.GetGrants() {
			size += most + len(g.Name) + len(g.RequestId)
		}
		return size
	}
	return proto.Size(r) + 64
}

// put adds a reply. The caller holds o.mu.
func (o *outbox) put(r *lockpb.Reply, size int) {
	o.replies = append(o.replies, sized{r, size})
	o.count(size)
	o.ready.Notify()
}

// count adds n bytes. The caller holds o.mu.
func (o *outbox) count(n int) {
	o.bytes += n
	o.unread.Add(int64(n))
}

// close adds a last reply. drop discards the replies before it, if the client reads too slowly for them.
func (o *outbox) close(last *lockpb.Reply, drop bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	if drop {
		o.count(o.taken - o.bytes)
		o.replies = nil
	}
	o.put(last, sizeOf(last))
	o.closed = true
}

// abandon drops all messages: the connection has ended.
func (o *outbox) abandon() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed, o.replies, o.taken = true, nil, 0
	o.count(-o.bytes)
}

// sent notes that the connection has taken the result of the last take, which no longer counts.
func (o *outbox) sent() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.count(-o.taken)
	o.taken = 0
}

// take returns the next message; last says that no more follow. Its bytes count until sent is called: the connection
// holds them for as long as the client does not read.
func (o *outbox) take() (batch []*lockpb.Reply, last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := 0
	for n < len(o.replies) && n < maxReplies && (n == 0 || o.taken+o.replies[n].bytes <= maxReplyBytes) {
		batch = append(batch, o.replies[n].reply)
		o.taken += o.replies[n].bytes
		n++
	}
	clear(o.replies[:n])
	if o.replies = o.replies[n:]; len(o.replies) == 0 {
		o.replies = nil
	} else {
		o.ready.Notify()
	}
	if o.quiet() {
		o.calm.Notify()
		o.still.Notify()
	}
	return batch, o.closed && len(o.replies) == 0
}

// quiet reports whether there is room for messages that can wait. The caller holds o.mu.
func (o *outbox) quiet() bool { return len(o.replies) < calmOutbox && o.bytes-o.taken < calmBytes }

// isCalm reports whether there is room for events.
func (o *outbox) isCalm() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.quiet()
}
