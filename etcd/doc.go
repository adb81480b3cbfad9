// Package etcd is the driver for etcd 3.4 and later: the correctness tier on a cluster that survives the loss of a
// minority.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints})
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), nil)
//
// # The queue
//
// Every acquire writes one key under the name's directory. The keys of a directory, in the order of their create
// revisions, are the name's queue, and the first one holds the lock. An attempt without waiting writes its key only if
// no key is in its way. A waiter writes its key and watches the key before its own. When that key goes, it reads the
// queue again and checks its own key before it reports "held". Without contention, each is one transaction; a release
// is one transaction that compares the create revision.
//
// The driver uses few keys and reuses them; the value of a key names the request. etcd keeps deleted keys until it is
// compacted, so if each request had a new key, every acquire would make later acquires slower.
//
// Requests for shared holds and permits wait in the same queue, in separate directories below the name's. One rule
// decides for all kinds: a request holds as soon as no earlier request excludes it. A shared request waits for the last
// exclusive one before it. Permits wait until they fit the limit together with all permits requested before them.
// Earlier requests can only go, so a hold stays valid whatever comes later. The transaction that writes a key compares
// that the directory has no key of a kind or limit that does not mix with it.
//
// Acquires and releases of different names that one client makes at the same moment share a transaction, each with its
// own comparisons and its own answer. While two transactions are in flight, further steps wait for at most 100 ms, and
// then share a transaction, up to 60 at a time. AcquireAll without waiting is one transaction over all names, unless it
// asks for permits of a name with holders or waiters.
//
// # The lease
//
// The keys of all locks with one TTL are attached to one etcd lease. A client with more than eight different TTLs
// shares leases between similar ones: the keys of a client that dies may then stay up to a quarter longer than their
// TTL. The driver keeps a lease alive, on one stream, one keepalive at a time, and records when each was sent. A hold
// is valid for its TTL from the instant before the last confirmed keepalive was sent. Confirmed means two things.
//
// First, a linearizable read follows each keepalive, and both answers must have the same raft term. A former leader
// that does not know its successor yet answers keepalives without asking any member.
//
// Second, that term must be the one in which the lease was granted. A leader that froze while another was elected can
// revoke leases after it resumes: the leases that expired by its own clock, even if its successor has prolonged them
// since. So when the term changes, holds and waiters move to a new lease, which the old leader does not know. They
// move with the next renewal, by a read and a transaction for each 100 keys, or as many as the server allows; tokens
// and places in the queue stay. A move compares the key's mod revision, so that a late request cannot move the key
// back. A cluster with a single voting member needs no move, since no other member can have led it.
//
// # Promises
//
// The token is the create revision of the hold's key. etcd counts revisions for the whole store, and no deletion
// lowers the count. So the token increases strictly with every grant of a name, even across expiry, crash, leader
// change, restart, and deletion of all keys, as long as the cluster keeps its history. A backup must be restored with
// --bump-revision and --mark-compacted (etcd 3.5.10 and later). Guards admit tokens up to 2⁶²: a cluster that was
// restored beyond this revision grants nothing.
//
// TokenSpace is random: the first driver on a cluster without a token space below KeyPrefix writes one, and every grant
// compares it. A new cluster gets a different token space, and so does a backup that is restored as another cluster. So
// a guard that knows the space refuses tokens of the new cluster.
//
// A running driver notices the loss of the cluster's past. It compares the cluster id, the revision, the raft term of a
// member and the token space of each answer with their known values at the request. If one fell or changed, every hold
// ends with backend.ReasonHistoryLost, and every acquire is refused with backend.ErrHistoryLost until a new driver is
// made. Deleting all keys also deletes the token space: running drivers report the loss, and a new driver writes
// another token space. If a running driver detects a backup that was restored under the cluster's old id, it writes a
// new token space there. A new driver cannot detect this. If no driver ran before and after the restore, only guards
// can, because they refuse tokens that are not greater.
//
// Never start a member on earlier data, or on a copy of another member's data: remove it and add it with an empty data
// directory. A member with reverted data stops if the leader has counted its later entries ("tocommit is out of
// range"). With another leader, the reverted member may be in the majority that forgets acknowledged holds.
//
// Grants are FIFO, and no request overtakes another: a reader does not pass a waiting writer, and a small request for
// permits does not pass a larger one, so neither starves. Tokens of shared holds and permits come from the same count,
// and carry the mark of tokens that do not fence.
//
// TTLs are whole seconds, and etcd raises TTLs below one and a half election timeouts (2 s by default); Grant.TTL is
// the granted TTL. A renewal with a shorter TTL does not shorten the current validity: the hold moves to the shorter
// lease once that lasts until the end of the earlier promise.
//
// # Limits
//
//   - Servers below 3.4.38, 3.5.23 and 3.6.5 can lose a key while its lease is renewed (etcd issue 20590). The loss is
//     noticed at the next renewal, and the token still protects. The driver warns about such servers.
//   - If someone deletes the key of a hold, its holder notices at the next renewal, not immediately: a watch per hold
//     would cost every lock two more messages. If its lease ends, or ForceRelease ends its hold, the holder is notified
//     immediately: the driver watches one key for each lease.
//   - AcquireAll that may wait (Request.Wait), and of more than fit one transaction (100, or 33 shared ones), is
//     ErrUnsupported.
//   - An attempt at permits of a name with holders takes two transactions, and more if other clients acquire permits at
//     the same moment.
//   - The end of a hold of permits wakes every waiter of the name, unless a single request blocks them. Each waiter
//     reads the queue if it may now hold.
//   - After an election a cluster of several members must take writes within a TTL. If it refuses them, because its
//     quota is used up for example, the holds from before the election are lost, and their holders are notified.
//     Without an election, holds in a full cluster can be renewed and released.
//   - A cluster that had no leader for a long time prolongs its leases. A lock may then be free later than its TTL,
//     never earlier.
//
// # Settings
//
// Connect to etcd itself. A gRPC proxy (etcd grpc-proxy) sends keepalives itself and answers its clients' keepalives
// from them, so that another client may acquire the lock before the holder is notified. The driver refuses a proxy with
// backend.ErrMisconfigured: the proxy's list of members is incomplete. A proxy that runs with an empty
// --advertise-client-url is indistinguishable from etcd.
//
// With several endpoints, the driver repeats a request that is not answered within half a second at other endpoints,
// up to four times: a member that the leader does not hear, for example, delays a third of all requests by half a
// second. A client that Open makes also closes the connections of a server that does not answer for 2 s, and requests
// and watches move to another server. After the leader has frozen, such a client acquires a lock within about 3 s.
//
// The members of a cluster may be replaced one by one. A client that Open makes adds new members to its endpoints, if
// its URL has an address as a member advertises it; while it holds or waits, it asks for the list at its keepalives, at
// most every 10 s. It does not add members that existed at the start but are not in the URL. A client that is passed to
// New has the endpoints that its owner sets: see AutoSyncInterval and Sync of clientv3.
//
// New takes any client. Set its DialKeepAliveTime: with it, watches on a frozen server end after 13 s or more; without
// it, they never end.
//
// A user needs the right to read and write below KeyPrefix, and no other right. Prefixes never overlap, even if one is
// the beginning of the other.
//
// etcd checks a password with a slow hash, which takes a tenth of a second of a server's processor. A client that Open
// makes requests one token, and a new token only when a server no longer knows it. A client that is passed to New
// requests a token whenever it opens a stream: for the keepalives of each TTL, and for the first wait after a time
// without waiters.
//
// # Access to etcd
//
// Driver.OwnerCmp fences a write to etcd itself with a comparison in the caller's transaction. Driver.Key returns the
// key of a hold.
package etcd
