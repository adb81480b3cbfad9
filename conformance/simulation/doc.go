// Package simulation runs the core for thousands of hours of simulated time, in all weathers, and checks that it keeps
// its promises. It holds tests only: writers of drivers want package conformance.
//
//	go test -v -run 'TestSimulation$' ./conformance/simulation
//
// A seed makes a world: the in-process lock service, two to four clients of it on separate machines, their callers,
// and the weather. The core is the real one; what lies below it is simulated, under testing/synctest:
//
//	actors ─► fencelock.Client ─► port (pauses, clock) ─► memory.Driver ─► memory.Network ─► memory.Store
//	                                     ▲                                       ▲                 ▲
//	                                     └─────────────── weather ───────────────┴─────────────────┘
//
// Actors use every kind of hold, waits with and without bounds, renewal by hand, repeated request ids,
// minimum holds, several locks at once, leases under leases, elections, and releases with contexts that have ended. The
// weather delays messages, delivers them long after their sender gave up, drops them in either direction, breaks and
// refuses connections, pauses, closes and kills clients, stops and freezes the service, evicts locks and releases them
// by force; for milliseconds or for many TTLs.
//
// # What must hold
//
//   - Nobody believes in a lock while somebody believes in one that excludes it, from the return of Acquire to the call
//     of Release or the end of the lease's context, to the nanosecond. Only holds that the service itself took away may
//     overlap for a while, and then no longer than their TTL.
//   - A context ends within 10 ms of its lease's deadline. Nobody gets a loss before that, unless the service
//     took the hold away.
//   - Tokens increase, are never issued twice, and a register that checks them refuses no write of a holder.
//   - Every call returns within 100 ms of the end of its context, or of the pause in which that falls.
//   - Once all is well everybody gets a turn; when the leftovers of the storm have ended, at once. Close succeeds then,
//     and leaves no entry in the service and no goroutine.
//
// Histories of short worlds are held against package check besides (TestHistories), which searches for an order in
// which a lock could have done all that.
//
// TestMutants breaks the driver in one way at a time, and wants some seed to show each.
//
// # Running
//
// FENCELOCK_SIM_HOURS sets how many hours to simulate. Without it: 10, and 1000 with FENCELOCK_DEEP=1 unless under the
// race detector. The seeds are 1, 2, 3, … as far as that takes. A summary tells how busy the hours were, and idle ones
// fail. FENCELOCK_SEED runs one seed and tells all that happened; a failure prints that command.
//
// # What repeats
//
// In four worlds out of five every client has one caller and its clock goes at the rate of the service's. Such a world
// repeats exactly: TestReplayIsExact compares the logs of two runs, with every message and every instant. Four
// things would stand against it, and are dealt with:
//
//   - The scheduler. Instants are drawn to the nanosecond, and no two messages leave a client at one, so that mostly
//     one goroutine runs at a time. The fate of a message is drawn from its content, not from a common sequence. The
//     log is sorted by time, client, and text, and tells tokens by their rank.
//   - Releases of one set that wait in the driver for the answer to its acquire. All would leave when that lands, and
//     the first alone would find something to release. The port lets them leave one after the other.
//   - The chance with which the core spreads retries of renewals and of elections. A renewal waits in the port for the
//     latest instant that chance could have drawn; Lead's acquires do likewise.
//   - The slack of the core's timer, half a millisecond after a deadline, which depends on when it was set last. Actors
//     look at a lease that expired a little later than that. The checks use the real instants.
//
// In the others, two callers share a client, and leases with different deadlines share its renewals; or clocks go at
// different rates, by up to 1 %. Which renewals share a call then depends on the core's chance, and one in five of
// these worlds takes another course in a second run. A failure says which sort it was; run it with -count.
package simulation
