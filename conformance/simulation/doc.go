// Package simulation runs the core for thousands of hours of simulated time, under all kinds of faults, and checks its
// promises. It contains only tests: authors of drivers need package conformance.
//
//	go test -v -run 'TestSimulation$' ./conformance/simulation
//
// A seed determines a world: the in-process lock service, two to four clients of it on separate machines, their
// callers, and the weather, which injects faults. The core is the real one; everything below it is simulated, under
// testing/synctest:
//
//	actors ─► fencelock.Client ─► port (pauses, clock) ─► memory.Driver ─► memory.Network ─► memory.Store
//	                                     ▲                                       ▲                 ▲
//	                                     └─────────────── weather ───────────────┴─────────────────┘
//
// Actors use every kind of hold, waits with and without bounds, renewal by hand, repeated request ids, minimum holds,
// several locks at once, leases under leases, elections, and releases with contexts that have ended. The weather
// delays messages, delivers them long after their sender has stopped waiting, drops them in either direction, breaks
// and refuses connections, pauses, closes and kills clients, stops and freezes the service, and evicts and
// force-releases locks. A fault lasts from milliseconds to many TTLs.
//
// # What must hold
//
//   - No two holders rely on locks that exclude each other, to the nanosecond. A holder relies on its lock from the
//     return of Acquire to the call of Release or the end of the lease's context. Only holds that the service itself
//     has ended may overlap with others, for their TTL at most.
//   - A context ends within 10 ms of its lease's deadline. No loss is reported before that, unless the service has
//     ended the hold.
//   - Tokens increase and are never issued twice, and a register that checks them refuses no write of a holder.
//   - Every call returns within 100 ms of the end of its context, or of the pause in which its context ends.
//   - After the faults every client gets every lock in turn, and without delay once the leftovers of the faults have
//     ended. Close then succeeds, and leaves no entry in the service and no goroutine.
//
// TestHistories also checks histories of short worlds with package check, which searches for an order of the
// operations that is possible for a lock.
//
// TestMutants breaks the driver in one way at a time, and requires that some seed detects each mutant.
//
// # Running
//
// FENCELOCK_SIM_HOURS sets the number of hours to simulate. Default 10, and 1000 with FENCELOCK_DEEP=1 without the
// race detector. The seeds are 1, 2, 3, …, until these hours are over. A summary reports the activity per hour, and
// fails if it is too low. FENCELOCK_SEED runs one seed and logs every event; a failure prints that command.
//
// # What repeats
//
// In four of five worlds, every client has one caller, and its clock runs at the rate of the service's. Such a world
// repeats exactly: TestReplayIsExact compares the logs of two runs, with every message and every instant. The
// simulation removes four sources of nondeterminism:
//
//   - The scheduler. Instants are drawn to the nanosecond, and no two messages leave a client at the same instant, so
//     usually one goroutine runs at a time. The fate of a message is drawn from its content, not from a common
//     sequence. The log is sorted by time, client and text, and has the ranks of tokens.
//   - Releases of one set that wait in the driver for the answer to its acquire. All of them would leave when the
//     answer arrives, and only the first would find a hold to release. The port lets them leave one after the other.
//   - The random pauses of the core before retries of renewals and of elections. A renewal waits in the port until the
//     latest instant that the core could have drawn, and so do the acquires of Lead.
//   - The slack of the core's timer, half a millisecond after a deadline, which depends on the time at which it was
//     last set. Actors handle the expiry of a lease a little later than that. The checks use the real instants.
//
// In the other worlds, two callers share a client, and leases with different deadlines share its renewals; or clocks
// run at different rates, by up to 1 %. Then the core's random numbers determine which renewals share a call, and one
// in five of these worlds takes another course in a second run. A failure reports the sort of its world; repeat such a
// world with -count.
package simulation
