// Package conformance tests that drivers keep the contract of package backend, and that the core keeps its promises
// over them. It is for driver authors, and versioned with the API.
//
//	func TestConformance(t *testing.T) {
//		server := containers.Redis(t)
//		conformance.Run(t, conformance.Harness{
//			New: func(t testing.TB) backend.Driver { return mydriver.New(server.Addr()) },
//			Linked: func(t testing.TB) (backend.Driver, fault.Link) {
//				addr, link := server.NewLink(t)
//				return mydriver.New(addr), link
//			},
//			Server: conformance.Server{
//				Restart: func(t testing.TB) { ... },
//			},
//		})
//	}
//
// New alone runs the clauses without faults. Each further field of Harness adds clauses; Run skips by name the
// clauses that it cannot run; with FENCELOCK_REQUIRE=all in the environment, as in CI, a skip is a failure. A
// capability that the driver declares is always tested; any other capability must answer backend.ErrUnsupported
// (clause P1). Run every public constructor and configuration of a driver, not only the default: faults often affect
// only one of them.
//
// # Reading a failure
//
//	--- FAIL: TestConformance/ambiguity/lost-request-is-no-success
//	    A1  after a lost request an acquire is never reported as granted, nor as held: its outcome is unknown
//	        acquire with a lost request = redis: acquire "…": lock is held although no answer reached the driver
//
// The first line is the clause: its number and the obligation, which package backend explains. Below it are the
// finding and the log of the clause. One clause runs alone with -run 'TestConformance/ambiguity/lost-request'; it
// does not depend on the others.
//
// # Time
//
// Clauses wait for Harness.TTL to pass, and run in parallel. Immediate steps have bounds that a busy machine keeps (two
// seconds, where a broken driver takes a TTL of a minute). Steps that must not happen too early are compared with the
// drivers' own clock, without tolerance. While clauses run, a goroutine and a child process wake every 5 ms and measure
// stalls of the machine. A clause that fails because a step was late is repeated if the machine stalled: for a tenth of
// Harness.TTL in one stall, or for that long in total and for a tenth of the clause's time. Repetitions run one at a
// time, after all other clauses. After three such failures the clause is Inconclusive, a skip, unless all three
// failures are the same and each stall was short. Run fails if at least two clauses, and more than one in a hundred of
// the clauses that ran, are inconclusive.
//
// Only lateness is excused: a call without an answer in time, a step after its bound, a hold that expired before the
// clause used it. Two holders at once, a wrong answer, a wrong token and a wrong nonce are failures on any machine.
//
// # What every clause checks
//
// Run records the answers of all drivers in a clause, and compares each answer with all earlier answers in that clause.
// SentAt lies in the past, and at least as far back as a slowed link takes for a request and its answer. The TTL and
// the kind of a grant are those of the request. A token is greater than all earlier tokens of the name. No two holds
// have the same nonce. A repeated request gets its earlier hold. No hold is granted while a valid hold excludes it, and
// no hold is renewed after a rival was granted the name. Look and List show each hold as it was granted.
//
// Choose Harness.TTL long enough for some hundred acquires even on a busy machine: clauses hold hundreds of locks,
// and leases of up to three times that TTL. A driver that supports a single TTL is tested with it.
//
// Clauses that act on the whole service, or count goroutines, run alone at the end.
//
// # Trusting the suite
//
// The suite is itself tested with broken drivers: TestMutants breaks the in-process driver in one way at a time, and
// each must fail on the clauses of the broken promise. Use Check to do the same with mutants of your own driver.
//
// # Clauses
//
// The function Clauses returns all clauses with their rules. Numbers and names do not change; new clauses come at the
// end of their group.
//
// exclusion:
//
//   - X1 one-holder-at-a-time
//   - X2 attempt-finds-it-held
//   - X3 beliefs-do-not-overlap
//
// ownership:
//
//   - O1 only-the-holder-releases
//   - O2 second-release-is-not-held
//   - O3 request-ids-compare-whole
//   - O4 stale-release-keeps-the-successor
//   - O5 incarnation-is-compared
//   - O6 same-request-is-the-same-hold
//   - O7 release-by-request
//   - O8 owner-decides-nothing
//   - O9 what-is-shown-moves-nothing
//   - O10 every-hold-has-its-nonce
//   - O11 nonce-of-a-repeat
//   - O12 nonce-is-kept-and-shown
//   - O13 a-repeat-proves-anew
//
// lease:
//
//   - L1 not-grantable-before-its-end
//   - L2 silent-holder-loses-it
//   - L3 renewal-prolongs
//   - L4 no-renewal-after-a-rival
//   - L5 renewal-creates-nothing
//   - L6 grant-tells-the-truth
//   - L7 validity-counts-from-sending
//   - L8 renewals-answer-in-order
//   - L9 renewals-share-round-trips
//   - L10 renewals-never-shorten
//   - L11 hundreds-outlive-one-renew
//   - L12 odd-ttls-are-kept
//   - L13 every-validity-counts-from-sending
//   - L14 crash-at-any-ttl
//   - L15 a-proof-is-dated-by-its-request
//
// waiting:
//
//   - W1 release-wakes-a-waiter
//   - W2 first-come-first-served
//   - W3 attempts-do-not-barge
//   - W4 release-wakes-no-herd
//   - W5 lost-notification-still-acquires
//   - W6 grant-after-a-wait-is-whole
//   - W7 dead-waiter-blocks-nobody
//   - W8 waiter-survives-a-reset
//   - W9 wait-does-not-end-early
//   - W10 evicted-waiter-does-not-hold
//   - W11 overtaken-waiter-does-not-hold
//   - W12 release-wakes-one-name
//
// cancellation:
//
//   - C1 ended-context-leaves-no-trace
//   - C2 waiter-returns-with-its-context
//   - C3 cancelled-waiter-leaves-the-queue
//   - C4 cancel-races-with-grant
//   - C5 silence-ends-with-the-context
//   - C6 a-wait-holds-nobody-up
//   - C7 a-call-that-hangs-holds-nobody-up
//
// ambiguity:
//
//   - A1 lost-request-is-no-success
//   - A2 lost-reply-is-resolved-by-repeating
//   - A3 lost-reply-is-undone-by-request
//   - A4 late-request-strands-nothing
//   - A5 repeated-release-spares-the-successor
//   - A6 unanswered-renewal-is-no-loss
//   - A7 reset-is-no-contention
//   - A8 first-of-its-ttl-in-doubt
//   - A9 late-request-beside-a-living-hold
//
// names:
//
//   - N1 no-two-names-meet
//   - N2 odd-names-work-bare
//   - N3 invalid-names-are-refused
//   - N4 foreign-entries-do-no-harm
//
// errors:
//
//   - E1 errors-name-the-call
//   - E2 answers-are-distinct
//   - E3 refused-is-unavailable
//   - E4 closed-answers-closed
//
// capabilities:
//
//   - P1 undeclared-is-unsupported
//   - P2 declaration-is-consistent
//   - P3 minimum-keeps-it-closed
//   - P22 unused-minimum-is-dropped
//   - P23 look-shows-what-is-declared
//   - P24 list-shows-what-is-declared
//   - P25 permits-show-their-limit
//   - P26 refusal-shows-when-to-retry
//   - P27 change-shows-time-and-author
//   - P4 holder-is-shown
//   - P5 list-yields-what-is-held
//   - P6 force-release-ends-the-hold
//   - P7 loss-is-pushed
//   - P8 what-is-declared-has-a-clause
//   - P9 watch-tells-in-order
//   - P10 watch-replays-without-a-gap
//   - P11 watch-tells-why-by-force
//   - P12 watch-tells-of-expiry
//   - P13 watch-ends
//   - P14 compaction-is-reported
//   - P15 exclusion-is-declared
//   - P16 texts-come-back-whole
//   - P17 force-release-names-one-hold
//   - P18 force-release-spares-the-successor
//   - P21 force-release-tells-the-victim
//   - P19 list-is-literal-and-whole
//   - P20 ping-tells
//
// refusals:
//
//   - U1 refused-release-abandons
//   - U2 refused-writes-abandon
//   - U3 health-is-no-condition
//   - U4 refused-release-is-repeated
//   - U5 refused-leaving-is-repeated
//
// shared:
//
//   - R1 readers-hold-together
//   - R2 writer-keeps-readers-out
//   - R3 waiting-writer-stops-readers
//   - R4 neither-side-starves
//   - R5 readers-and-writers-never-meet
//   - R6 dead-reader-lets-go
//   - R7 tokens-are-marked
//   - R8 each-hold-is-its-own
//   - R9 hundreds-of-readers
//
// permits:
//
//   - Q1 never-more-than-there-are
//   - Q2 what-is-left-is-granted
//   - Q3 limit-is-agreed
//   - Q4 dead-holder-gives-them-back
//   - Q5 big-request-gets-its-turn
//   - Q6 tokens-are-marked
//   - Q7 each-hold-is-its-own
//   - Q8 great-limits-are-counted
//   - Q10 limit-conflict-names-the-holder
//   - Q9 hundreds-at-once
//
// multi:
//
//   - M1 all-or-none
//   - M2 waits-without-keeping
//   - M3 same-requests-same-holds
//   - M4 lost-reply-leaves-nothing
//   - M5 ended-context-leaves-no-trace
//   - M6 refused-set-names-the-lock
//
// hierarchy:
//
//   - H1 excludes-above-and-below
//   - H2 shared-paths
//   - H3 uses-do-not-mix
//   - H4 waits-for-all-below
//
// deadlock:
//
//   - G1 cycle-is-refused
//   - G2 no-false-alarm
//   - G3 cycle-over-readers
//   - G4 cycle-of-simultaneous-requests
//
// fencing:
//
//   - F1 increases-across-release
//   - F2 increases-across-expiry
//   - F3 increases-across-deletion
//   - F4 increases-in-the-order-of-grants
//   - F5 stale-write-is-refused
//   - F6 stays-for-one-hold
//   - F7 one-token-space
//   - F8 great-tokens
//
// tier:
//
//   - T1 correctness-needs-fencing
//   - T2 efficiency-carries-no-token
//   - T3 promise-is-not-inherited
//
// core:
//
//   - D1 lost-before-a-rival-holds
//   - D2 deletion-is-noticed
//   - D3 do-is-cancelled-by-loss
//   - D4 release-after-loss-is-lost
//   - D5 release-outlives-its-context
//   - D6 lease-is-renewed
//   - D7 fault-is-no-loss
//   - D8 close-gives-back
//   - D9 unknown-is-cleaned-up
//   - D10 one-leader-at-a-time
//   - D11 several-names-without-deadlock
//   - D12 lock-delay-keeps-it-closed
//   - D13 same-request-elsewhere-contends
//   - D14 release-ends-with-its-context
//   - D15 grants-that-are-over
//   - D16 attempts-have-keys-of-their-own
//   - D17 close-after-its-context
//
// outages:
//
//   - S1 stopped-service
//   - S2 paused-service
//   - S3 restarted-service
//   - S4 increases-across-restart
//   - S5 increases-across-a-wipe
//   - S6 wiped-service
//   - S7 grants-outlive-a-restart
//   - S8 first-calls-at-once
//
// leftovers:
//
//   - K1 goroutines-end-with-close
//   - K2 service-keeps-nothing
//   - K3 goroutines-do-not-pile-up
//   - K4 goroutines-end-after-a-short-close
package conformance
