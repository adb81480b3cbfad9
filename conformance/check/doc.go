// Package check records the calls of a lock's clients, and decides afterwards whether a lock could have behaved like
// that.
//
//	r := check.NewRecorder(check.Options{Client: "child-3"})
//	l := r.Wrap("worker-1", client)            // any fencelock.Locker
//	held, err := l.Acquire(ctx, "orders/7")    // recorded: call, return, and the grant with its end
//	…
//	held.Release(ctx)                          // recorded: the end of the belief, call, return
//
//	report := check.Verify(ctx, check.Merge(histories...), check.Rules{Fencing: true, TTL: ttl})
//	for _, v := range report.Violations { … }
//	report.Dump(dir)
//
// A foreign lock is recorded by hand: Recorder.Begin, Call.Granted, Hold.Lost, Hold.Release.
//
// # Time
//
// Events carry instants of one clock, by default the machine's boot clock, which all processes of one machine share. So
// do histories of child processes, which write theirs line by line (Options.Writer) until they are killed.
//
// # Belief
//
// A holder believes in its lock from the return of Acquire until it calls Release, is notified of the loss, or its
// deadline passes, whichever is first. The deadline counts even if nobody checked it: a caller that asks the lease gets
// the answer. A loss reported before the deadline counts from its arrival at a goroutine, or, if that is earlier, from
// when a
// rival in the same process was granted the lock and the lease was found dead.
//
// # Checks
//
// The scans go first; each is cheap and names the violation:
//
//   - overlap: nobody believes in a lock while somebody else does: never two exclusive holders, or one beside a shared
//     one, no more permits than there are. A holder from whom the lock is taken by force may believe for one TTL more.
//   - early: nobody is granted a lock before its holder has released it or the TTL of the last renewal that the service
//     confirmed is over.
//   - early loss: nobody gets a loss before its deadline, unless somebody took the lock away by force.
//   - token: of two grants, one of which was over before the other was asked for, the later exclusive one has the
//     higher token. No token is issued twice. Shared holds and permits have tokens that are marked.
//   - stuck: every call ends with its context. Nobody waits for a free name.
//
// Then porcupine searches for an order of all operations in which a lock with tokens could have done them, per name:
// see model.go. It finds what no scan was written for. A search that does not end in time is a violation too: nobody
// knows.
package check
