// Package builtin is the driver for the bundled lock server: the correctness tier for those who run no lock service.
//
//	fencelock serve                                  one durable server on this machine
//
//	locks, err := fencelock.ForCorrectness(builtin.New([]string{"127.0.0.1:7480"}, nil), nil)
//	locks, err := fencelock.OpenURL(ctx, "fencelock://a:7480,b:7480,c:7480", fencelock.Correctness, nil)
//
// Three servers survive the loss of any one. Package embedded runs one inside a program instead, without a socket.
//
// # Algorithm
//
// The servers replicate one state machine by Raft; its leader serves. A client keeps one connection to the leader, on
// which everything travels: what callers ask for at the same time is sent together, answers come in any order, and the
// server pushes grants to waiters, losses to holders and events to watchers. See package lockpb for the protocol.
//
// Pushes get lost with their connection only. On the next one the driver compares what it believes with what the server
// lists: holds that are missing are lost, waiters that are missing ask again. Should the server lose a push by a fault,
// the answer to the next keepalive shows it, and the driver ends the connection.
//
// All locks of one client with one TTL hang on one session, which the driver keeps alive by itself while somebody needs
// it, and which costs one small request per third of the TTL however many locks there are. Each further TTL costs
// another session, so an application should use few different ones. A hold is valid for the TTL from the instant before
// the last request was sent that renewed the session. The leader answers such a request only after most servers have
// confirmed that it still led when the request arrived, so none is honoured that its successor does not know of.
//
// # Promises
//
// The token is the server's count of changes at the grant. It is in the log entry that grants, and increases strictly
// over all names of the cluster: across release, expiry, crash, restart and change of leader. Grants are FIFO, and
// nobody barges. A holder is told of a loss by push.
//
// TokenSpace is the cluster's id. A driver that has had an answer of a durable cluster notices when that cluster has
// forgotten what it acknowledged: its id is another (it was wiped, or replaced), it was restored from a backup, or its
// revision fell (its data directory is an old copy, or lost its end). Then every hold of the driver is lost with
// backend.ReasonHistoryLost, and every later call is backend.ErrHistoryLost, until the driver is made anew. A new
// driver takes the cluster as it is: a restored one issues greater tokens than before in the same token space, a wiped
// one has another.
//
// Identity. A request with the same Request.RequestID for a name gets the hold that this request has, with the same
// token. The server shows it to nobody; a look at the name shows Request.HoldID. A renewal for less time than before
// leaves the hold as it is until the longer time is over.
//
// A request that was sent is carried out once, however often it arrives, and not at all after its caller gave up and
// the clean-up was carried out. What an abandoned connection delivers late does nothing.
//
// # Kinds of holds
//
// Queues are strict for every kind: nobody passes an earlier waiter that it is not compatible with. So a waiting writer
// stops later readers, and a request for few permits does not overtake one for many. Permits come back when their
// holder releases or its session ends. Tokens of shared holds and of permits are marked (fencing.Token.Exclusive):
// guards refuse them.
//
// Names do not change their use while they are held or waited for: permits with another limit, permits beside other
// kinds, and hierarchical beside flat requests are backend.ErrLimitMismatch. The latter holds for the name and its
// ancestors: while "a" is held flatly, a hierarchical request for "a/b" is refused, and the other way round. But a flat
// hold of "a/b" does not touch "a", which it knows nothing of: an application that wants a hierarchy has to ask
// hierarchically throughout. Looking at a name, watching it and force-releasing it concern its own holds, not those
// below it.
//
// AcquireAll is one log entry with one place in all queues, so sets that overlap cannot deadlock each other. Sent again
// by its request ids it is the same set; if only part of it is left, because an administrator took one name, the rest
// is given back and the whole is acquired anew. An attempt without Wait and without an answer leaves what it may have
// been granted to Release, as Acquire does.
//
// Deadlocks. A request made under holds (backend.Request.Under) that would have to wait is refused with a
// *backend.DeadlockError if one of these holds is in its way, directly or over any number of others that wait under
// theirs, whichever client and TTL they belong to, and whether they hold the name or wait ahead. Two requests under one
// hold that want the same name just queue. The server looks at 10,000 holders and waiters per request, unless told
// otherwise; a longer cycle is not found. A holder of permits counts in the search only if no other holder could make
// room instead. A waiter that queues again because its session had ended is examined again.
//
// # Bounds
//
// A holder that dies frees its names when its session ends: one TTL and 50 ms after its last request. If the leader
// changes meanwhile, that may be an election later, which takes one to two seconds, and 1 s in which clients find the
// new leader; and if both die at about the same time, up to half a TTL more with many sessions, 10 ms for each
// with few.
//
// A server that says nothing is left after a quarter of the shortest TTL in use, between 500 ms and 3 s. A session
// outlives the change of leader if its TTL is longer than that and the election together: hence the servers' least TTL
// of 3 s, unless they are told otherwise (--min-ttl). A waiter whose session ended takes a new place at the end of the
// queue.
//
// Calls fail with backend.ErrUnavailable after half a second in which all servers refuse connections, after 10 s in
// which they elect nobody, and after 5 s in which they say nothing. Requests that wait in a queue wait on.
//
// # What it does not promise
//
// A server without a data directory (fencelock serve --dev) starts its tokens anew with its process. It grants none,
// and the correctness tier refuses it: OpenURL and Open at once, New at its first acquire.
//
// Hierarchical permits and sets whose requests differ in TTL, Wait or Under are refused before anything is sent.
//
// # Settings
//
// The servers' addresses are those of all members, or some: the others are learnt from them. Where clients reach
// members by other names than the members tell, Options.Dial translates. A Driver links neither the servers nor Raft.
package builtin
