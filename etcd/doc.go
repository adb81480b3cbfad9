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
// nothing is in its way. A waiter writes its key, watches the key before its own, and when that goes reads again, with
// its own key in it, before it says "held". When nobody else wants the lock, either is one transaction; a release is
// one transaction that compares the create revision.
//
// Keys are few and are used again, and their value says which request they stand for. etcd remembers deleted keys until
// it is compacted, so with a new key for each request an acquire would cost the more the more came before it.
//
// Shared holds and permits stand in the same queue, in directories of their own below the name's. One rule decides for
// all kinds: a request holds as soon as nothing that came before it excludes it. A shared request waits for the last
// exclusive one before it. Permits wait until they fit the limit together with all that was asked for before them. What
// is before a request can only go, so what holds goes on holding, whatever comes later. The transaction that writes a
// key compares that the directory has no key of a kind or limit that does not mix with it.
//
// Acquires and releases of different names that one client wants at the same moment share a transaction, each with its
// own comparisons and its own answer. What comes while two transactions are under way waits for them, for 100 ms at
// most, and then goes together, up to 60 steps at a time. AcquireAll without waiting is one transaction over all names,
// if no permits are wanted where others have some.
//
// # The lease
//
// The keys of all locks with one TTL stand on one etcd lease. The driver keeps it alive by itself, on one stream, one
// keepalive at a time, and records when each was sent. A hold is valid for the TTL from the instant before the last
// confirmed keepalive was sent. Confirmed means two things.
//
// First, a linearizable read follows each keepalive, and both answers must be of one raft term. A leader that has been
// overtaken by another one, and has not heard of that yet, answers keepalives too, and asks nobody else before it does.
//
// Second, that term must be the one in which the lease was granted. A leader that stood still while another was elected
// has leases revoked, when it goes on, that ran out by its own clock, even if its successor has prolonged them since.
// So holds and waiters move to a new lease when the term changes, which the old leader has never heard of. That happens
// with the next renewal, by a read and a transaction for 100 keys, or as many as the server allows; tokens and places
// stay. A key moves only as it was read, so that no request that is carried out late takes it back. A cluster with a
// single voting member needs no move, since nobody else can have led it.
//
// # Promises
//
// The token is the create revision of the hold's key. etcd counts revisions for the whole store, and no deletion takes
// one back. So the token increases strictly with every grant of a name, also across expiry, crash, leader change,
// restart, and deletion of all keys, as long as the cluster keeps its history. A backup must be restored with
// --bump-revision and --mark-compacted (etcd 3.5.10 and later).
//
// TokenSpace is random: the first driver that finds none below KeyPrefix plants it there, and every grant compares it.
// A cluster that was made anew gets another one, as does a backup that is restored as another cluster. So a guard that
// was given the space refuses tokens of the new cluster.
//
// A driver that lived through the loss of the cluster's past notices. The cluster id, the revision, the raft term of a
// member and the token space of each answer are compared with what was known when it was asked for. If one fell or
// changed, every hold ends with backend.ReasonHistoryLost, and every acquire is refused with backend.ErrHistoryLost
// until a new driver is made. Deleting all keys ends the token space too: drivers that knew it report the loss, and a
// fresh driver makes another one. A fresh driver on a backup that was restored under the cluster's old id cannot tell;
// guards can, because they refuse tokens that are not greater.
//
// Grants are FIFO, and nobody barges: a reader does not pass a waiting writer, and a small request for permits not a
// bigger one, so neither starves. Tokens of shared holds and permits come from the same count, with the mark of those
// that do not fence.
//
// TTLs are whole seconds, and etcd raises those below one and a half election timeouts (2 s by default); Grant.TTL says
// what was granted. A renewal for less cuts nothing short: the hold moves to the shorter lease once that lasts until
// the end of what was promised before.
//
// # What it does not promise
//
//   - Servers below 3.4.38, 3.5.23 and 3.6.5 can lose a key while its lease is renewed (etcd issue 20590). The loss is
//     noticed at the next renewal, and the token still protects. The driver warns about such servers.
//   - A key that somebody deletes is noticed at the next renewal of its holder, not at once: a watch per hold would
//     cost every lock two more messages.
//   - AcquireAll that may wait (Request.Wait), and of more than fit one transaction (100, or 33 shared ones), is
//     ErrUnsupported.
//   - An attempt at permits where others hold some is two transactions, and more while others come at the same moment.
//   - The end of a hold of permits is told to everybody who waits for the name, unless a single request keeps them out.
//     Those that it may let in look.
//   - After an election a cluster of several members must take writes within a TTL. If it refuses them, because its
//     quota is used up for example, the holds from before the election are lost, and their holders are told so. Without
//     an election holds go on in a full cluster, and can be given back.
//   - A cluster that had no leader for long prolongs its leases. A lock may then be free later than its TTL, never
//     earlier.
//
// # Settings
//
// Connect to etcd itself. A gRPC proxy (etcd grpc-proxy) sends keepalives of its own and answers those of its clients
// by them, so that a rival may be granted before the holder is told. It is refused with backend.ErrMisconfigured, by
// what its list of members lacks. A proxy that runs with an empty --advertise-client-url cannot be told from etcd.
//
// A client that Open makes leaves servers that do not answer. One that says nothing at all is left after 2 s, by
// watches too. One that owes an answer is left after 1 s, if another server has answered a later request: a member that
// the leader does not hear, for example, beside which a third of all requests would hang.
//
// New takes any client. Set its DialKeepAliveTime: otherwise a server that stands still is never noticed, and with it
// after 13 s at least. With either client the driver repeats what was not answered within 3 s, at another endpoint.
//
// A user needs the right to read and write below KeyPrefix, and no other. No prefix reaches into another one, even if
// it is the beginning of it.
//
// etcd checks a password with a slow hash, which takes a tenth of a second of a server's processor. A client that Open
// has made asks for that once, and again when a server does not know its token any more. A client that is given to New
// asks whenever it opens a stream: for the keepalives of each TTL, and for the first wait after a time in which none
// was waiting.
//
// # Escape hatches
//
// Driver.OwnerCmp fences a write to etcd itself with a comparison in the caller's transaction. Driver.Key is the key
// that a hold stands on.
package etcd
