// Package nemesis breaks a lock service and its clients at random, while the clients contend for locks, and
// checks all that they saw. It is for the soak tests of drivers; package conformance/cluster has each fault alone,
// with its required effects.
//
//	func TestMain(m *testing.M) {
//		fault.RunRole(map[string]fault.Role{nemesis.Role: nemesis.Client(open)})
//		os.Exit(m.Run())
//	}
//
//	func TestSoak(t *testing.T) {
//		nemesis.Run(t, func(t testing.TB) nemesis.Service {
//			server := containers.Redis(t)
//			return nemesis.Service{
//				Driver: "redis",
//				Client: func(t testing.TB) (string, fault.Links) {
//					addr, link := server.NewLink(t)
//					return addr, fault.Links{link}
//				},
//				Open: open, // a driver for that address
//				…           // what can be done to the server: see Service
//			}
//		})
//	}
//
// # Who contends
//
// Three clients in separate processes, which the test binary makes of itself (Role), so that SIGSTOP and kill -9
// act as they do in production; and two in the test's process. Each contends for three names exclusively, one in
// shares and one for permits, where the driver has these, with short holds mostly. Every call, grant, renewal and loss
// is an event of conformance/check, in instants of the machine's boot clock; children write theirs to their standard
// output, where the lines of a killed child remain.
//
// # Faults
//
// Kinds lists it: holders and waiters are stopped or killed; the links of a holder keep back, lose, delay, reset or
// refuse, both ways or one; nodes freeze, end and come back, leaders too; nodes are cut off from each other, also one
// way; an operator takes locks away; the service answers and refuses releases, or all writes, for a while. Now and then
// there are two faults at once, never on more nodes than a minority. Each fault
//
//   - finds its target: a client that holds for sure, since it was told to; the leader of that moment,
//   - breaks it, and asserts that this happened: the kernel says that the process stands still, bytes were kept back,
//     connections were severed, the node does not answer, another node leads, the process is another one,
//   - waits until the unaffected clients go on, where a majority of nodes or the end of a TTL lets them,
//   - lasts as long as was drawn, and heals.
//
// Then every client and every name must have a turn within Plan.Recovery. A fault that does not happen fails the run,
// and so do the findings of conformance/check, leftovers in the service when all have gone, and a wait
// longer than a minute.
//
// # The seed
//
// Schedule is a pure function of the seed, the duration, and the possible faults of the service. Two runs with one seed
// print the same schedule, and break the same parts for the same times in the same order. The clients' actions between,
// and the choice of the leader, are not fixed: a failure may need more than one repetition.
//
//	make soak BACKEND=etcd DURATION=10m SEED=7
//
// runs for longer; without SEED the seed is random. In plain go test a run takes half a minute, with a fixed seed. With
// FENCELOCK_FAULTS=leader-kill,link-drop in the environment only these kinds are drawn. go test -artifacts keeps the
// histories of all epochs, the stretches of some steps for which the clients stay with the same names.
//
// # What comes out
//
// A line that begins with "soak:" for the run, and one for each kind of fault with counts and times. A run that fails
// names a folder: the history as lines of JSON, what check found in words and as a picture, the schedule, the servers'
// logs and the children's output.
//
// # Beyond the promise
//
// RunReported draws faults that no driver promises to survive, such as deleting the service's data. Violations are then
// figures of the summary, "reported:", and no failures.
package nemesis
