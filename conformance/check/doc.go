// Package check records what clients of a lock did, and decides afterwards whether a lock could have behaved like that.
//
//	r := check.NewRecorder(check.Options{Client: "child-3"})
//	l := r.Wrap("worker-1", client)            // any fencelock.Locker
//	held, err := l.Acquire(ctx, "orders/7")    // recorded: call, return, and what was granted until when
//	…
//	held.Release(ctx)                          // recorded: the end of the belief, call, return
//
//	report := check.Verify(ctx, check.Merge(histories...), check.Rules{Fencing: true, TTL: ttl})
//	for _, v := range report.Violations { … }
//	report.Dump(dir)
//
// A lock of which Fencelock knows nothing is recorded by hand: Recorder.Begin, Call.Granted, Hold.Lost, Hold.Release.
//
// # Time
//
// Events carry instants of one clock, by default the machine's boot clock, which all processes of one machine share. So
// do histories of child processes, which write theirs line by line (Options.Writer) until they are killed.
//
// # Belief
//
// A holder believes in its lock from the return of Acquire until it calls Release, is told of the loss, or its deadline
// passes, whichever is first. The deadline counts also where nobody looked at it: a caller that asks the lease is told.
// A loss that is told before the deadline counts from when it reached a goroutine, or, if that is earlier, from when a
// rival in the same process was granted the lock and the lease was found dead.
//
// # What is checked
//
// The scans go first; each costs next to nothing and says plainly what is wrong:
//
//   - overlap: nobody believes in a lock while somebody else does: never two exclusive holders, none beside a shared
//     one, no more permits than there are. A holder from whom the lock is taken by force may believe for one TTL more.
//   - early: nobody is granted a lock before its holder has released it or the TTL of the last renewal that the service
//     confirmed is over.
//   - early loss: nobody is told of a loss before its deadline, unless somebody took the lock away by force.
//   - token: of two grants, one of which was over before the other was asked for, the later exclusive one has the
//     higher token. No token is issued twice. Shared holds and permits have tokens that are marked.
//   - stuck: every call ends with its context. A name that is free is not waited for.
//
// Then porcupine searches for an order of all operations in which a lock with tokens could have done them, per name:
// see model.go. It finds what no scan was written for. A search that does not end in time is a violation too: nobody
// knows.
package check
