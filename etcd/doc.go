// Package etcd is the driver for etcd 3.4 and later: the correctness tier on a cluster that survives the loss of a
// minority.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints})
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), nil)
//
// # Algorithm
//
// Every acquire creates one key under the name's directory, on an etcd lease that all locks with one TTL share. The
// keys of a directory in the order of their create revisions are the queue, and the first one holds the lock. Keys are
// few and are used again, and say in their value which request they stand for: etcd remembers deleted keys until it is
// compacted, so that an acquire would cost the more the more came before it. A waiter watches the key before its own;
// when that one goes, it reads the queue again, with its own key in it, before it says "held". An attempt without
// waiting writes its key only if the directory is empty. Either is one transaction when nobody else wants the lock; a
// release is one transaction that compares the create revision.
//
// Shared holds and permits stand in the same queue, in directories of their own below the name's. One rule decides for
// all kinds: a request holds as soon as nothing that came before it excludes it. A shared one waits for the last
// exclusive request before its own; permits wait until those of all requests before theirs and their own fit the limit.
// What is before a request can only go, so what holds goes on holding, whatever comes later. The transaction that
// writes a key compares that the directory has no key of a kind or limit that does not mix with it.
//
// Acquires and releases of different names that one client wants at the same moment share a transaction, each with its
// own comparisons and its own answer: what comes while two are under way waits for them, for 100 ms at most, and then
// goes together, up to 60 at a time.
//
// AcquireAll without waiting is one transaction over all names, if no permits are wanted where others have some.
//
// The driver's own loop keeps the lease alive, on one stream, one keepalive at a time, and records when each was sent.
// A hold is valid for the TTL from the instant before the last confirmed one was sent. A keepalive is confirmed by a
// linearizable read of the same raft term after it: a leader that has been overtaken and does not know answers
// keepalives, and etcd asks nobody else. It counts only in the term in which the lease was granted: when it goes on, a
// leader that stood still while another was elected has leases revoked that ran out by its own clock, whoever prolonged
// them since. So holds and waiters move to a new lease when the term changes: with the next renewal, a read and a
// transaction for 100 keys, or as many as the server allows, which keep tokens and places. A key moves only as it was
// read, so that no request that is carried out late takes it back. A cluster of one member, which nobody else can have
// led, spares them that.
//
// # Promises
//
// The token is the create revision of the hold's key. etcd counts revisions for the whole store, and no deletion takes
// one back: so the token increases strictly with every grant of a name, also across expiry, crash, leader change,
// restart, and deletion of all keys, as long as the cluster keeps its history. A backup must be restored with
// --bump-revision and --mark-compacted (etcd 3.5.10 and later). TokenSpace is random: the first driver that finds none
// below KeyPrefix plants it there, and every grant compares it. A cluster that was made anew gets another one, as does
// a backup that is restored as another cluster, so that a guard which was given the space refuses tokens of the new
// one.
//
// A driver that lived through the loss of the cluster's past notices: the cluster id, the revision, the raft term of a
// member and the token space of each answer are compared with what was known when it was asked for. What fell or
// changed ends every hold with backend.ReasonHistoryLost, and every acquire is refused with backend.ErrHistoryLost
// until a new driver is made. Deleting all keys ends the token space too: who knew it is told so, and a fresh driver
// makes another one. A fresh driver on a backup that was restored under the cluster's old id has nothing to tell it by;
// guards do, which refuse tokens that are not greater.
//
// Grants are FIFO, and nobody barges: a reader does not pass a waiting writer, and a small request for permits not a
// bigger one, so neither starves. Tokens of shared holds and permits come from the same count, with the mark of those
// that do not fence. TTLs are whole seconds, and etcd raises those below one and a half election timeouts (2 s by
// default); Grant.TTL tells what was granted. A renewal for less cuts nothing short: the hold moves to the shorter
// lease when that lasts until the end of what was promised before.
//
// # What it does not promise
//
// Servers below 3.4.38, 3.5.23 and 3.6.5 can lose a key while its lease is renewed: the loss is noticed at the next
// renewal, and the token still protects. The driver warns about them. A deleted key is noticed at the next renewal of
// its holder, not at once: a watch per hold would cost every lock two more messages.
//
// AcquireAll of names to wait for, and of more than fit one transaction (100, or 33 shared ones), is ErrUnsupported. An
// attempt at permits where others hold some is two transactions, and more while others come at the same moment. The end
// of a hold of permits is told to everybody who waits for the name, unless a single request keeps them out; those whom
// it may let in look.
//
// After an election a cluster of several members must take writes within a TTL, or the holds of before are lost, and
// told so: a quota that is used up refuses them. Without an election holds go on in a full cluster, and can be given
// back.
//
// A cluster that had no leader for long prolongs its leases. A lock may then be free later than its TTL, never earlier.
//
// # Settings
//
// Connect to etcd itself. A gRPC proxy (etcd grpc-proxy) sends keepalives of its own and answers those of its clients
// by them, so that a rival may be granted before the holder is told. It is refused with backend.ErrMisconfigured, by
// what its list of members lacks; one that runs with an empty --advertise-client-url cannot be told from etcd.
//
// The driver repeats what was not answered within 3 s, and the client sends that to another endpoint. With a client
// that Open has made, a server that stands still is left after 2 s, by watches too; and one that owes an answer after
// 1 s, when another one has answered a later request: a member that the leader does not hear, for example, beside which
// a third of all requests would hang. New takes any client: set its DialKeepAliveTime, so that a server that stands
// still is noticed at all, which takes gRPC 13 s at least.
//
// A user needs the right to read and write below KeyPrefix, and no other. No prefix reaches into another one, be it the
// beginning of it.
//
// A password is checked with a slow hash, a tenth of a second of a server's processor. A client that Open has made asks
// for that once, and again when its token is not known any more. One that is given to New asks whenever it opens a
// stream: for the keepalives of each TTL, and for the first wait after a time in which none was waiting.
//
// # Escape hatches
//
// Driver.OwnerCmp fences a write to etcd itself with a comparison in the caller's transaction. Driver.Key is the key
// that a hold stands on.
package etcd
