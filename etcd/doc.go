// Package etcd is the driver for etcd 3.4 and later: the correctness tier on a cluster that survives the loss of a
// minority.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints})
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), nil)
//
// # The queue
//
// Every acquire writes one key under the name's directory. The keys of a directory, in the order of their create
// revisions, are the name's queue, and the first one holds the lock. An attempt without waiting writes its key only
// if no key is in its way. A waiter writes its key and watches the key before its own. When that key goes, it reads
// the queue again and checks its own key before it reports "held". When nobody else wants the lock, either is one
// transaction; a release is one transaction that compares the create revision.
//
// Keys are few and reused, and their value names the request. etcd remembers deleted keys until it is compacted, so
// with a new key for each request an acquire would cost more with every acquire before it.
//
// Shared holds and permits stand in the same queue, in their own directories below the name's. One rule decides for
// all kinds: a request holds as soon as no earlier request excludes it. A shared request waits for the last exclusive
// one before it. Permits wait until they fit the limit together with all permits requested before them. Earlier
// requests can only go, so a hold stays valid whatever comes later. The transaction that writes a key compares that
// the directory has no key of a kind or limit that does not mix with it.
//
// Acquires and releases of different names that one client makes at the same moment share a transaction, each with
// its own comparisons and its own answer. Steps that come while two transactions are under way wait for them, for 100
// ms at most, and then go together, up to 60 at a time. AcquireAll without waiting is one transaction over all names,
// unless it asks for permits of a name with holders or waiters.
//
// # The lease
//
// The keys of all locks with one TTL stand on one etcd lease. The driver keeps it alive, on one stream, one keepalive
// at a time, and records when each was sent. A hold is valid for the TTL from the instant before the last confirmed
// keepalive was sent. Confirmed means two things.
//
// First, a linearizable read follows each keepalive, and both answers must be of one raft term. An overtaken leader
// that does not know its successor yet answers keepalives, too, without asking anybody.
//
// Second, that term must be the one in which the lease was granted. A leader that stood still while another was elected
// has leases revoked, when it goes on, that ran out by its own clock, even if its successor has prolonged them since.
// So holds and waiters move to a new lease when the term changes, which the old leader has never heard of. That happens
// with the next renewal, by a read and a transaction for 100 keys, or as many as the server allows; tokens and places
// stay. A move compares the key's mod revision, so that a late request cannot move the key back. A cluster with a
// single voting member needs no move, since nobody else can have led it.
//
// # Promises
//
// The token is the create revision of the hold's key. etcd counts revisions for the whole store, and no deletion
// lowers the count. So the token increases strictly with every grant of a name, even across expiry, crash, leader
// change, restart, and deletion of all keys, as long as the cluster keeps its history. A backup must be restored with
// --bump-revision and --mark-compacted (etcd 3.5.10 and later).
//
// TokenSpace is random: the first driver on a cluster without a token space below KeyPrefix writes one, and every
// grant compares it. A new cluster gets a different one, and so does a backup that is restored as another cluster. So
// a guard that was given the space refuses tokens of the new cluster.
//
// A running driver notices the loss of the cluster's past. It compares the cluster id, the revision, the raft term of
// a member and the token space of each answer with their known values at the request. If one fell or
// changed, every hold ends with backend.ReasonHistoryLost, and every acquire is refused with backend.ErrHistoryLost
// until a new driver is made. Deleting all keys ends the token space too: drivers that knew it report the loss, and a
// fresh driver makes another one. A driver that notices a backup that was restored under the cluster's old id writes a
// new token space there. A fresh driver cannot notice it; without a driver of before, guards can, because they refuse
// tokens that are not greater.
//
// Grants are FIFO, and nobody barges: a reader does not pass a waiting writer, and a small request for permits not a
// bigger one, so neither starves. Tokens of shared holds and permits come from the same count, and carry the mark of
// tokens that do not fence.
//
// TTLs are whole seconds, and etcd raises TTLs below one and a half election timeouts (2 s by default); Grant.TTL is
// the granted TTL. A renewal with a shorter TTL does not shorten the current validity: the hold moves to the shorter
// lease once that lasts until the end of the earlier promise.
//
// # Limits
//
//   - Servers below 3.4.38, 3.5.23 and 3.6.5 can lose a key while its lease is renewed (etcd issue 20590). The loss is
//     noticed at the next renewal, and the token still protects. The driver warns about such servers.
//   - A key that somebody deletes is noticed at the next renewal of its holder, not at once: a watch per hold would
//     cost every lock two more messages. Holders whose lease ends, or whom ForceRelease names, are notified at once:
//     the driver watches one key for each lease.
//   - AcquireAll that may wait (Request.Wait), and of more than fit one transaction (100, or 33 shared ones), is
//     ErrUnsupported.
//   - An attempt at permits where others hold some is two transactions, and more while others come at the same moment.
//   - The end of a hold of permits wakes every waiter of the name, unless a single request blocks them. The waiters
//     that may now hold read the queue.
//   - After an election a cluster of several members must take writes within a TTL. If it refuses them, because its
//     quota is used up for example, the holds from before the election are lost, and their holders are notified.
//     Without an election holds in a full cluster can be renewed and released.
//   - A cluster that had no leader for long prolongs its leases. A lock may then be free later than its TTL, never
//     earlier.
//
// # Settings
//
// Connect to etcd itself. A gRPC proxy (etcd grpc-proxy) sends keepalives itself and answers its clients' keepalives
// from them, so that a rival may be granted before the holder is notified. The driver refuses a proxy with
// backend.ErrMisconfigured: the proxy's list of members is incomplete. A proxy that runs with an empty
// --advertise-client-url is indistinguishable from etcd.
//
// With several endpoints, the driver repeats a request that is not answered within half a second at another endpoint: a
// member that the leader does not hear, for example, delays a third of all requests by that. A client that Open makes
// also closes the connections of a server that is silent for 2 s, and requests and watches leave it.
//
// The members of a cluster may be replaced one by one. A client that Open makes adds new members to its endpoints, if
// its URL has an address as a member advertises it; while it holds or waits, it asks for the list at its keepalives,
// at most every 10 s. A member that was there from the beginning and is not in the URL stays out. A client that is
// passed to New has the endpoints that its owner sets: see AutoSyncInterval and Sync of clientv3.
//
// New takes any client. Set its DialKeepAliveTime: otherwise watches on a server that stands still never end, and with
// it after 13 s at least.
//
// A user needs the right to read and write below KeyPrefix, and no other. No prefix reaches into another one, even if
// it is the beginning of it.
//
// etcd checks a password with a slow hash, which takes a tenth of a second of a server's processor. A client that
// Open makes requests one token, and another one when a server no longer knows that token. A client that is passed to
// New requests a token whenever it opens a stream: for the keepalives of each TTL, and for the first wait after a
// time without waiters.
//
// # Escape hatches
//
// Driver.OwnerCmp fences a write to etcd itself with a comparison in the caller's transaction. Driver.Key is the key
// that a hold stands on.
package etcd
