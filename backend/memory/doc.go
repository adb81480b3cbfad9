// Package memory is a lock service inside the process, and its driver. It is the reference for the conformance suite,
// the backend of the quickstart, and the fake for tests of code that takes locks.
//
//	locks, err := fencelock.ForCorrectness(memory.New(nil), nil)
//
// A Store is the server: the lock machine of the bundled server, in memory; it alone enforces TTLs. Each
// Driver is one more independent client of it, with its own network between the two:
//
//	Driver.Acquire ─► Network (Requests) ─► Store
//	       answer  ◄─ Network (Replies)  ◄────┘
//
// New makes a store with one driver. For several contenders make one store and a driver each:
//
//	store := memory.NewStore(nil)
//	a, b := store.Driver(), store.Driver()
//
// Other processes do not share a store, so this is no backend for production.
//
// # Promises
//
// Grants are FIFO by arrival, without barging, for all kinds: readers next to each other in the queue are admitted
// together, and no request overtakes one that waits for permits. AcquireAll has a place in the queues of all of its
// names. A wait that would close a cycle is refused. Tokens come from one counter of the store; deleting and
// restarting never set it back, and after a Wipe it restarts in another token space. A hold ends exactly its TTL after
// the store received the last request that prolonged it. Holds survive Store.Restart, places in queues do not.
//
// The counter of tokens counts places in queues and the ends of both too, so tokens of one name may skip numbers; it is
// also the revision of the changes that Watch yields. The store keeps the last 4096 of all these, of all names
// together, across Restart.
//
// # Trouble on demand
//
// Store.Evict, Wipe, Pause, Stop and Restart have the effects of operators and outages on a server. Driver.Network cuts
// one client off: it holds, drops, delays or refuses requests and replies. With backend.GoClock as its clock everything
// runs under testing/synctest.
package memory
