// Package nemesis breaks a lock service and its clients at random, while the clients contend for locks, and checks
// the history of their calls. It is for the soak tests of drivers; package conformance/cluster tests each fault
// alone, with its required effects.
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
// Three clients run in separate processes of the test binary (Role), so that SIGSTOP and kill -9 act as in
// production; two run in the test's process. Each contends for three exclusive locks and, if the driver has these
// kinds, for one shared lock and one with permits. Most holds are short. Every call, grant, renewal and loss is an
// event of conformance/check, in instants of the machine's boot clock; children write theirs to their standard
// output, where the lines of a killed child remain readable.
//
// # Faults
//
// Kinds lists the faults: holders and waiters are stopped or killed; the links of a holder hold back, lose or delay
// bytes, or reset or refuse connections, in one direction or both; nodes, even leaders, freeze, or end and restart;
// nodes are cut off from each other, in one direction or both; an operator force-releases locks; the service refuses
// releases, or all writes, for a while. Sometimes two faults strike together, never on more nodes than a minority.
// Each fault
//
//   - finds its target: a client that certainly holds, at the run's command, or the current leader,
//   - breaks it, and asserts that this happened: the kernel reports the process as stopped, bytes were held back,
//     connections were closed, the node does not answer, another node leads, the node has a new process,
//   - waits until the unaffected clients go on, if a majority of nodes or the end of a TTL allows it,
//   - lasts for the drawn length, and heals.
//
// Then every client must be granted a name, and every name must be granted, within Plan.Recovery. A fault that does
// not happen fails the run, and so do the findings of conformance/check, leftovers in the service after all clients
// have closed, and a wait longer than a minute.
//
// # The seed
//
// Schedule is a pure function of the seed, the duration, and the possible faults of the service. Two runs with one seed
// print the same schedule, and break the same parts for the same times in the same order. The actions of the clients,
// and the choice of the leader, are not fixed: a failure may need more than one repetition.
//
//	make soak BACKEND=etcd DURATION=10m SEED=7
//
// runs for longer; without SEED the seed is random. In plain go test a run takes half a minute, with a fixed seed.
// FENCELOCK_FAULTS=leader-kill,link-drop in the environment restricts a run to these kinds. go test -artifacts keeps
// the histories of all epochs. In an epoch of a few steps, the clients use the same names.
//
// # Output
//
// A run prints a line that begins with "soak:", and a line for each kind of fault with counts and times. A failed run
// also names a folder with the history as lines of JSON, the findings of check in words and as a picture, the
// schedule, the servers' logs and the children's output.
//
// # Beyond the promise
//
// RunReported draws faults that no driver promises to survive, such as deleting the service's data. Violations are then
// counts in the summary, "reported:", and not failures.
package nemesis
