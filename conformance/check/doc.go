// Package check records the calls of a lock's clients, and then decides whether a correct lock could have produced
// this history.
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
// A caller records a lock that is no fencelock.Locker by hand: Recorder.Begin, Call.Granted, Hold.Lost, Hold.Release.
//
// # Time
//
// Events carry instants of one clock, by default the machine's boot clock, which all processes of one machine share.
// The same holds for child processes, which write their histories line by line (Options.Writer) until they are
// killed.
//
// # Validity
//
// A hold is valid for its holder from the return of Acquire until the holder calls Release, is notified of the loss,
// or the deadline passes, whichever is first. The deadline counts even if the holder did not check it: the lease
// reports it. A loss reported before the deadline counts from the notification of a goroutine, or, if that is
// earlier, from the instant at which a rival in the same process was granted the lock and the lease had been lost.
//
// # Checks
//
// The scans run first; each is cheap and names the violation:
//
//   - overlap: no two conflicting holds are valid at the same time: no two exclusive holds, no exclusive hold beside
//     a shared one, and no more permits than the limit. A force-released hold may stay valid for one more TTL.
//   - early: no lock is granted before its holder has released it or the TTL of its last confirmed renewal has ended.
//   - early loss: no holder is notified of a loss before its deadline, unless the lock was force-released.
//   - token: an exclusive grant has a higher token than every grant that returned before its request. No token is
//     issued twice. Tokens of shared holds and permits are marked.
//   - stuck: every call ends with its context. No client waits for a free name.
//
// Then porcupine searches per name, for an order of all operations in which a lock with tokens could have executed
// them: see model.go. It finds violations for which there is no scan. A search that does not end in time is a
// violation, too: the result is unknown.
package check
