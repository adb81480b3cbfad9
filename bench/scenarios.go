package main

import "time"

// service is a system, with the scenarios that apply to it. peers returns the compared peers; nil: start has set them.
type service struct {
	name      string
	start     func(life *scope) *system
	peers     func(s *system) []peer
	scenarios string
}

const (
	costs     = "seq tput16 tput64 tput256 "
	contended = "handoff16 handoff64 handoff16s wake1 "
	faults    = " partition wipe stop crash"
	troubles  = " trouble-auth trouble-proxy trouble-nospace trouble-txnops trouble-wiped"
)

// services are in the order of the report. init sets them, because a child looks its own service up in them.
var services []service

func init() {
	services = []service{
		{"redis", startRedis, redisPeers, costs + "rtt100 rtt400 rtt1000 " + contended +
			"idle200 idlenames200 idlenames10000 dead200 dead200p hold1k hold10k hold100k" + faults},
		{"redis-cluster", startRedisCluster, redisClusterPeers, "seq tput16 tput64 dead200 dead200p"},
		{"redlock", startRedlock, redlockPeers, costs + contended},
		{"etcd", startEtcd, etcdPeers, costs + contended + "idle200 hold1k" + faults + " growth" + troubles},
		{"etcd-cluster", startEtcdCluster, etcdClusterPeers, "failover frozen frozen-follower"},
		{"zookeeper", startZooKeeper, zooKeeperPeers, costs + contended + "idle200 idle2000 hold1k" + faults},
		{"postgres", startPostgres, postgresPeers, "seq tput32 handoff16 wake1 hold1k hold10k"},
		{"builtin", startBuiltin, builtinPeers, costs + contended + "renew256 renew1024 idle200 hold1k hold10k " +
			"hold100k restart watch1 watch100 watch1000 failover handover frozen frozen-follower" + faults},
		{"http-redis", startHTTPRedis, nil, costs + "flood4 beside1000"},
		{"http-etcd", startHTTPEtcd, nil, costs},
		{"http-builtin", startHTTPBuiltin, nil, costs + "flood4 beside1000"},
		{"memory", startMemory, nil, costs + contended},
		{"core", startCore, nil, "core"},
	}
}

const (
	cycleColumns = "x=x floor; x2=x second; ops=cycles/s; p50=p50 us; p95=p95 us; p99=p99 us; trips=trips/op; " +
		"commands=commands/op; client-us=client CPU us/op; cpu-x=CPU x floor; server-us=server CPU us/op"
	handoffColumns = "x=x floor; x2=x recipe; ops=to another/s; all=grants/s; p50=p50 us; p95=p95 us; p99=p99 us; " +
		"trips=trips/grant; commands=commands/grant; client-us=client CPU us; server-us=server CPU us; " +
		"mean=grants/worker; least=min/mean<; most=max/mean>; starved>; wait-ms=longest wait ms>; overlaps>; errors>"
	idleColumns = "commands/s; trips/s; kb/s=KB/s; client-cpu=client CPU %; server-cpu=server CPU %; " +
		"goroutines=goroutines/waiter; kb=KB/waiter; cancel-ms=all cancel ms"
	holdColumns = "turns=round trips/interval; per-interval=commands/interval; per-lock=commands/lock/interval; " +
		"interval-ms=interval ms; client-cpu=client CPU %; server-cpu=server CPU %; goroutines=goroutines/lock>; " +
		"kb=KB/lock>; acquires=acquires/s; releases=releases/s; expired>; unnoticed>"
	grantColumns    = "grant-s=grant s, min<; grant-s=median; grant-s=max>"
	failoverColumns = "grant-ms=next grant ms, min<; grant-ms=median; grant-ms=max>; " +
		"leader-ms=new leader ms, median; leader-ms=max>; tries=failed calls before>; end-ms=process ended ms, max>"

	frozenColumns = "grant-ms=next grant ms, min<; grant-ms=median; grant-ms=max>; " +
		"next-ms=later grants ms, max>; tries=failed calls>"

	cycleCurve = "ops p99 client-us server-us"
	holdCurve  = "kb turns client-cpu server-cpu acquires releases"

	// recipes are the locks of the services' own client libraries.
	recipes = "zk.Lock, concurrency.Mutex, etcd concurrency.Mutex, polled lease"
)

// kinds are the scenarios. Scenarios that share an entry differ in size.
var kinds = []scenario{
	{name: "seq", about: "1 caller, 1 name: acquire + release (the curve's first point)", columns: cycleColumns,
		floor: "raw pooled", second: "raw autopipelined, redsync-5", grows: "callers", along: cycleCurve,
		rounds: 5, suits: uncontended, phase: cycle},
	{name: "tput16 tput32 tput64 tput256", about: "{n} callers, a name each, one client: acquire + release",
		columns: cycleColumns, floor: "raw pooled", second: "raw autopipelined", grows: "callers", along: cycleCurve,
		rounds: 5, suits: uncontended, phase: cycle},
	{name: "rtt100 rtt400 rtt1000",
		about:   "{n} arrivals/s at random, names of their own, 1.2 ms round trip: acquire + release",
		columns: "x=x floor; p50=p50 us; p95=p95 us; p99=p99 us; ops=cycles/s; client-us=client CPU us/op",
		floor:   "raw pooled", ratioOf: "p50", rounds: 5, suits: distant, phase: distance},
	{name: "handoff16 handoff64", about: "{n} workers with a client each want one name, hold time 0",
		columns: handoffColumns, floor: "token by BLPOP", second: recipes, rounds: 3, suits: waits,
		phase: func(r *round) { handoff(r, r.size) }},
	{name: "handoff16s", about: "{n} workers that share one client want one name, hold time 0",
		columns: handoffColumns, floor: "token by BLPOP", second: recipes, rounds: 3, suits: waits,
		phase: func(r *round) { handoff(r, 1) }},
	{name: "wake1", about: "release to acquire, one waiter, the holder holds 130 to 190 ms",
		columns: "x=x floor; p50=p50 us; p95=p95 us; p99=max us; trips=trips/grant; commands=commands/grant",
		floor:   "token by BLPOP", rounds: 3, suits: waits, phase: wake},
	{name: "idle200 idle2000", columns: idleColumns, rounds: 1, suits: waits,
		about: "{n} waiters on one client, nothing happens; per second, in all (the holder's renewals included)",
		phase: func(r *round) { idle(r, 1) }},
	{name: "idlenames200", about: "{n} waiters on one client, a name each, nothing happens; per second, in all",
		columns: idleColumns, rounds: 1, suits: waits, phase: func(r *round) { idle(r, r.size) }},
	{name: "idlenames10000", about: "{n} waiters on one client, a name each, nothing happens; per second, in all",
		columns: idleColumns, rounds: 1, suits: onlyOurs, phase: func(r *round) { idle(r, r.size) }},
	{name: "dead200", columns: grantColumns, rounds: 3, suits: contending, phase: dead,
		about: "{n} waiters whose process was killed, a live one behind them, TTL 30 s: release to grant"},
	{name: "dead200p", columns: grantColumns, rounds: 3, suits: contending,
		about: "{n} waiters whose process was killed, a live one behind them, TTL 30 s: release to grant, " +
			"beside PSUBSCRIBE *",
		phase: func(r *round) { listen(r); dead(r) }},
	{name: "hold1k", about: "one client holds {n} locks, TTL 3s; round trips and commands per renewal interval",
		columns: holdColumns, grows: "locks held", along: holdCurve, rounds: 1, suits: keyed,
		phase: func(r *round) { keep(r, lossTTL, 6*time.Second) }},
	{name: "hold10k", about: "one client holds {n} locks, TTL 3s; round trips and commands per renewal interval",
		columns: holdColumns, grows: "locks held", along: holdCurve, rounds: 1, suits: renewed,
		phase: func(r *round) { keep(r, lossTTL, 6*time.Second) }},
	{name: "hold100k", about: "one client holds {n} locks, TTL 10s; round trips and commands per renewal interval",
		columns: holdColumns, grows: "locks held", along: holdCurve, rounds: 1, suits: onlyOurs,
		phase: func(r *round) { keep(r, 10*time.Second, 10*time.Second) }},
	{name: "renew256 renew1024",
		about: "{n} callers on 4 clients renew a session each; 64 callers acquire and release beside them, " +
			"10000 a second in all",
		columns: "x=x floor; ops=renewals/s; lock-ops=lock operations/s; p50=renewal p50 us; p95=p95 us; p99=p99 us; " +
			"commands=entries/renewal; client-us=client CPU us/renewal; server-us=server CPU us/renewal",
		floor: "etcd raw", rounds: 3, phase: renewals,
		suits: func(_ *system, p peer) bool { return p.sessions != nil }},
	{name: "watch1 watch100 watch1000",
		about: "{n} watchers of one name on at most 10 clients; from the call of acquire or release to the event",
		columns: "x=x floor; p50=p50 us; p95=p95 us; p99=p99 us; last=last one, median us; " +
			"client-us=client CPU us/event; server-us=server CPU us/event",
		floor: "etcd raw", grows: "watchers", along: "p50 p99 last", rounds: 3, phase: watching,
		suits: func(_ *system, p peer) bool { return p.watch != nil }},
	{name: "flood4",
		about: "{n} callers, a name each: acquire + release, beside a stranger's 10,000 requests/s over HTTP",
		columns: "p99-x=p99 x quiet; quiet-p99=quiet p99 us; p99=p99 us; p50=p50 us; ops=cycles/s; " +
			"sent=stranger's answers/s; refused=of them 429 %",
		rounds: 5, suits: func(s *system, _ peer) bool { return s.door != "" }, phase: flood},
	{name: "beside1000",
		about: "1 caller, 1 name: acquire + release, beside a process with {n} watchers of the name over HTTP",
		columns: "watched-x=cycles/s x alone; alone=alone cycles/s; ops=watched cycles/s; p99=p99 us; heard=watchers' KB/s; " +
			"server-us=server CPU us/op",
		rounds: 3, suits: func(s *system, p peer) bool { return s.door != "" && p.role == roleOurs }, phase: beside},
	{name: "growth",
		about:   "1 caller, 1 name: acquire + release, after as many of that name before; nothing is compacted",
		columns: "before; p50=p50 us; server-us=server CPU us/op; ratio=p50, x first; worst=worst x first>",
		rounds:  1, limit: 20 * time.Minute, suits: onlyOurs, phase: growth},
	{name: "restart",
		about: "locks held on one durable server: memory, snapshots, kill (SIGKILL) and start until the next grant",
		columns: "kb=state KB/lock; server-kb=server's resident KB/lock; pause-ms=snapshot pause ms; " +
			"call-ms=longest call meanwhile ms; write-ms=write ms; mb=snapshot MB; read-ms=read ms; " +
			"restart-s=start from snapshot s; replay-s=start from log s; gone=locks gone>",
		rounds: 1, limit: 10 * time.Minute, suits: onlyOurs, phase: restart},
	{name: "failover", about: "the leader's process is killed (SIGKILL): ms until the next acquire returns",
		columns: failoverColumns, rounds: 5, suits: clustered,
		phase: func(r *round) { failover(r, (*process).kill) }},
	{name: "handover", about: "the leader is asked to end (SIGTERM): ms until the next acquire returns",
		columns: failoverColumns, rounds: 5, suits: clustered,
		phase: func(r *round) { failover(r, func(p *process) { _ = p.child.Terminate() }) }},
	{name: "frozen", about: "the leader's process is stopped (SIGSTOP): ms until the next acquires return",
		columns: frozenColumns, rounds: 5, suits: clustered, phase: func(r *round) { frozen(r, true) }},
	{name: "frozen-follower", about: "a follower's process is stopped (SIGSTOP): ms until the next acquires return",
		columns: frozenColumns, rounds: 5, suits: clustered, phase: func(r *round) { frozen(r, false) }},
	{name: "partition",
		about: "the holder's network falls silent, a rival waits; TTL 3 s; margin = rival holds - holder notified",
		columns: "rival-s=rival holds s, min<; rival-s=max>; notified-s=notified s, min<; notified-s=max>; " +
			"margin-ms=margin ms, worst<; margin-ms=median; late=notified late or never>",
		rounds: 5, together: true, suits: breakable, phase: partition},
	{name: "wipe", about: "the record is deleted behind the library, TTL 3 s: seconds until the holder is notified",
		columns: "notified-s=notified s, min<; notified-s=median; notified-s=max>", rounds: 5, together: true,
		suits: func(_ *system, p peer) bool { return p.key != nil && p.contends() }, phase: wipe},
	{name: "stop", about: "the server is stopped (SIGSTOP), contexts of 1 s: seconds until the calls return",
		columns: "lock-s=Lock returned s>; unlock-s=Unlock returned s>; unlock-ok=Unlock said ok>",
		rounds:  2, suits: breakable, phase: stop},
	{name: "crash",
		about:   "the holder's process is killed (SIGKILL) while it holds, TTL 3 s: seconds to the next grant",
		columns: grantColumns + "; beyond-ms=beyond TTL ms, worst>", rounds: 5, together: true,
		suits: breakable, phase: crash},
	{name: "core",
		about: "core overhead per acquire + release on a driver that costs nothing, beside what is held already",
		columns: "ns=ns/op; beside-ns=beside the driver ns; cpu-ns=CPU ns/op; allocs=allocs/op; bytes=B/op; " +
			"kb=KB/lease held",
		rounds: 5, suits: onlyOurs, phase: core},
	trouble("auth", "with user and password"), trouble("proxy", "behind etcd grpc-proxy"),
	trouble("nospace", "the quota is used up (NOSPACE), then an election"),
	trouble("txnops", "--max-txn-ops 64, then an election"),
	trouble("wiped", "the server is wiped and started again with the same flags"),
}

func trouble(name, about string) scenario {
	return scenario{name: "trouble-" + name, about: "one client holds 200 locks, TTL 6 s; " + about,
		columns: "refused<; lost>; history=reported as lost history<; auths=Authenticates/min>; keepalives=keepalives/s; " +
			"trips/s; server-cpu=server CPU %",
		rounds: 1, limit: 2 * time.Minute, suits: contending, phase: func(r *round) { troubled(r, name) }}
}

// The following functions select the peers that take part.
func uncontended(_ *system, p peer) bool { return p.role != roleFloor || !p.waits }
func waits(_ *system, p peer) bool       { return p.waits }
func contending(_ *system, p peer) bool  { return p.contends() }
func breakable(s *system, p peer) bool   { return p.contends() && s.breakable() }
func clustered(s *system, p peer) bool   { return p.contends() && s.leads != nil && len(s.servers) > 1 }
func onlyOurs(_ *system, p peer) bool    { return p.role == roleOurs }
func keyed(_ *system, p peer) bool       { return p.key != nil && p.role != roleVariant }

// renewed omits peers that never renew: one scenario is enough to show that.
func renewed(s *system, p peer) bool { return keyed(s, p) && p.renewEvery != nil }

func distant(_ *system, p peer) bool {
	return p.role == roleFloor && !p.waits || p.role == roleOurs || p.name == "rueidislock"
}

const (
	handoffs   = "handoff16 handoff64 handoff16s"
	exclusives = "redis, etcd, zookeeper, builtin" // the services for the fault scenarios
)

var targets = []target{
	{"redis", "seq", "trips", "<=", 2.02, "round trips per acquire + release (2, rounded)"},
	{"redis", "seq", "cpu-x", "<=", 1.3, "client CPU, x pooled floor"},
	{"redis", "seq", "x", ">=", 0.87, "cycles/s, x pooled floor (1.15 x its latency)"},
	{"redlock", "seq", "x2", ">=", 1.67, "cycles/s, x redsync (0.6 x its latency)"},
	{"etcd", "seq", "trips", "<=", 2.05, "messages per acquire + release (2, and a keepalive now and then)"},
	{"builtin", "seq", "commands", "<=", 2.05, "log entries per acquire + release"},
	{"http", "seq", "x", ">=", 0.333, "cycles/s, x the SDK on the same server (3 x its time)"},
	{"http", "flood4", "p99-x", "<=", 2, "p99 beside a flood, x p99 in quiet"},
	{"http", "beside1000", "watched-x", ">=", 0.5, "cycles/s beside 1,000 watchers, x cycles/s alone"},
	{"redis-cluster", "tput16", "x", ">=", 1.3, "cycles/s, x pooled floor"},
	{"postgres", "tput32", "x", ">=", 0.8, "cycles/s, x raw UPDATE, of which a cycle has two"},
	{"redis", "tput64", "x", ">=", 2, "cycles/s, x pooled floor"},
	{"redis", "tput64", "x2", ">=", 0.8, "cycles/s, x autopipelined floor"},
	{"redis-cluster", "tput64", "x", ">=", 1.5, "cycles/s, x pooled floor"},
	{"etcd", "tput64", "x", ">=", 1, "cycles/s, x raw put + delete"},
	{"zookeeper", "tput64", "x", ">=", 1, "cycles/s, x raw create and delete on one session"},
	{"builtin", "tput64", "x", ">=", 5, "cycles/s, x raw etcd of three members"},
	{"builtin", "tput256", "ops", ">=", 25_000,
		"cycles/s: 50 000 lock operations/s, an acquire and a release being two"},
	{"builtin", "tput256", "p99", "<=", 50_000, "acquire + release, p99 us"},
	{"redis", "rtt100 rtt400 rtt1000", "x", "<=", 1.1, "median, x pooled floor"},

	{"redis", handoffs, "ops", ">=", 8000, "grants/s to another worker"},
	{"redis", handoffs, "x", ">=", 0.45, "grants/s to another worker, x token by BLPOP"},
	{"redis", handoffs, "commands", "<=", 13.2, "commands per grant (13, and some settlements)"},
	{"redis", handoffs, "least", ">=", 0.95, "fewest grants of a worker, x mean"},
	{"redis", handoffs, "most", "<=", 1.05, "most grants of a worker, x mean"},
	{"etcd", handoffs, "x", ">=", 0.9, "grants/s to another worker, x raw queue"},
	{"etcd", handoffs, "p95", "<=", 3000, "release to acquire, p95 us"},
	{"zookeeper", handoffs, "x2", ">=", 1, "grants/s to another worker, x zk.Lock"},
	{"postgres", handoffs, "x2", ">=", 100, "grants/s to another worker, x polled lease"},
	{"etcd, zookeeper, postgres, builtin", handoffs, "least", ">=", 0.9, "fewest grants of a worker, x mean"},
	{"builtin", "handoff64", "x2", ">=", 5, "grants/s to another worker, x etcd's concurrency.Mutex"},
	{"redis", "wake1", "p50", "<=", 600, "release to acquire, p50 us"},
	{"redis, redis-cluster", "dead200 dead200p", "grant-s", "<=", 3, "s from the release to the grant"},

	{"redis", "idle200", "commands/s", "<=", 5, "commands/s in all"},
	{"redis", "idle200", "client-cpu", "<=", 1, "client CPU %"},
	{"redis", "idle200", "goroutines", "<=", 2.01, "goroutines per waiter (2, rounded; one is the caller's)"},
	{"redis", "idle200", "kb", "<=", 15, "KB per waiter"},
	{"etcd", "idle200", "trips/s", "<=", 5, "requests/s in all"},
	{"zookeeper", "idle2000", "kb/s", "<=", 1000, "KB/s in all"},
	{"redis", "idlenames200", "commands/s", "<=", 40, "commands/s in all"},
	{"redis", "idlenames10000", "commands/s", "<=", 500, "commands/s in all"},
	{"redis, etcd, builtin", "hold1k hold10k hold100k", "goroutines", "<=", 0.01, "goroutines per lock"},
	{"redis, etcd, builtin", "hold1k hold10k hold100k", "kb", "<=", 2, "KB per lock"},
	{"redis, etcd, builtin", "hold1k hold10k hold100k", "unnoticed", "<=", 0, "locks that expired unnoticed"},
	{"redis, etcd, builtin", "hold1k hold10k", "turns", "<=", 5,
		"round trips per renewal interval, the same for 1,000 and 10,000 locks"},

	{"builtin", "renew1024", "ops", ">=", 100_000, "renewals/s, each proved by a quorum"},
	{"builtin", "renew1024", "lock-ops", ">=", 0.95 * besideRenewals, "lock operations/s beside them"},
	{"builtin", "watch1000", "p99", "<=", 50_000, "from the change to the client, p99 us"},
	{"builtin", "restart", "server-kb", "<=", 1, "KB per lock, of the server's resident memory"},
	{"builtin", "restart", "pause-ms", "<=", 10, "snapshot pause, ms"},
	{"builtin", "restart", "restart-s", "<=", 2, "start from a snapshot to the next grant, s"},
	{"builtin", "restart", "gone", "<=", 0, "locks that the restart lost"},
	{"builtin", "failover", "grant-ms", "<=", 2000, "next grant, ms after the kill, worst"},
	{"builtin", "handover", "grant-ms", "<=", 100, "next grant, ms after the signal, worst"},
	{"builtin", "failover handover", "tries", "<=", 0, "failed calls"},
	{"etcd-cluster, builtin", "frozen frozen-follower", "grant-ms", "<=", 3000, "next grant, ms after the stop, worst"},
	{"etcd-cluster, builtin", "frozen frozen-follower", "next-ms", "<=", 3000, "later grants, ms, worst"},
	{"etcd", "growth", "worst", "<=", 1.3, "acquire + release after up to 100,000 of that name, x the first"},

	{exclusives, "partition", "margin-ms", ">=", 0, "worst margin in ms: notified before the rival holds"},
	{exclusives, "wipe", "notified-s", "<=", ourRenewal(lossTTL).Seconds() * 1.05,
		"notified after s, worst: within one renewal interval"},
	{exclusives, "stop", "lock-s", "<=", 1.05, "Lock, s: within 50 ms of the context's end"},
	{exclusives, "stop", "unlock-s", "<=", 1.55,
		"Unlock, s: within 50 ms of the half second that Release goes on after it"},
	{"redis, etcd, builtin", "crash", "beyond-ms", "<=", 300, "ms beyond one TTL after the kill, worst"},

	{"etcd", "trouble-auth trouble-nospace trouble-txnops", "lost", "<=", 0, "locks lost"},
	{"etcd", "trouble-auth", "auths", "<=", 2, "Authenticates per minute"},
	{"etcd", "trouble-proxy", "refused", ">=", 1, "the proxy is refused, since its answers prove nothing"},
	{"etcd", "trouble-wiped", "history", ">=", 1, "locks whose loss is reported as lost history, of all"},
	{"in process", "core", "beside-ns", "<=", 2000, "ns beside the driver"},
	{"in process", "core", "allocs", "<=", 10.1, "allocations"},
}
