# One command per line of `make help`. The versions of the tools are here and nowhere else.
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
BACKEND ?= redis
ROUNDS ?= 2
DURATION ?= 10m
FUZZTIME ?= 10s

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What `make quick` runs besides a driver, and what it leaves to `go test ./...`: tests that measure what many thousand
# calls cost. Of the simulated hours of the machine's replicas it runs one.
QUICK := . ./backend/... ./conformance ./internal/machine
COSTLY := ^(TestLeaseMemory|TestShedEventsAreCounted|TestTenThousandLeasesShareRenewals|TestGarbageAllocatesLittle)$$
# Of the driver's conformance suite it runs the groups that are through in a few seconds: 43 clauses, side by side.
FAST := (ownership|ambiguity|names|fencing|permits|multi|tier)

.PHONY: quick
quick: ## what to run after every save, in ten seconds: the core, the memory driver, and DRIVER=redis, redlock, etcd, zookeeper, postgres or builtin
	FENCELOCK_SIM_HOURS=1 go test -short -skip '$(COSTLY)' $(QUICK)
	$(if $(DRIVER),go test -short -run '^TestConformance$$/^New$$/^$(FAST)$$' ./$(DRIVER))

.PHONY: test
test: ## run all tests but those of the deep tier, and list what was skipped and why
	@go test -json ./... 2>&1 | go run ./internal/testreport packages

.PHONY: times
times: ## where the time of the tests goes: the slowest packages and tests of PKG (all)
	go test -count=1 -json $(or $(PKG),./...) | go run ./internal/testreport slow

.PHONY: race
race: ## what make quick runs, with two drivers, with the race detector; make deep runs all with it
	@go test -race -short $(FLAGS) $(QUICK) ./conformance/check ./fencing ./locktest ./redis ./builtin ./internal/server/...

.PHONY: deep
deep: deep-tools ## everything, three quarters of an hour on servers that must be there: with the race detector, broken clusters, soaks, long simulations
	$(MAKE) systems
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all go test -race -timeout 60m ./...
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all go test -timeout 60m . ./internal/machine ./internal/server ./conformance ./conformance/simulation ./conformance/check
	cd observe/pagetest && FENCELOCK_REQUIRE=all go test -race ./...

.PHONY: deep-tools
deep-tools:
	@command -v ip >/dev/null && command -v strace >/dev/null && command -v chromium >/dev/null || \
		{ echo "make deep: apt-get install iproute2 strace chromium"; exit 1; }
	@[ "$$(id -u)" = 0 ] || { echo "make deep: network namespaces need root"; exit 1; }

.PHONY: vet
vet: ## go vet, and whether gofmt would change anything
	go vet ./...
	cd conformance/containers/runner && go vet ./...
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "run gofmt -w $$unformatted"; exit 1; }

.PHONY: systems
systems: ## check the other systems: vet everything for darwin, build for windows, where no test of a service runs
	GOOS=darwin go vet ./... && GOOS=windows go build ./...
	cd observe && GOOS=darwin go vet ./... && GOOS=windows go build ./...
	cd conformance/containers/runner && GOOS=darwin go vet ./... && GOOS=windows go build -o /dev/null ./...

.PHONY: lint
lint: ## golangci-lint; the first run builds it
	go run $(GOLANGCI) run --allow-parallel-runners ./...
	cd conformance/containers/runner && go run $(GOLANGCI) run --allow-parallel-runners ./...

.PHONY: vulnerabilities
vulnerabilities: ## known vulnerabilities of what the code calls; asks vuln.go.dev
	go run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...
	cd conformance/containers/runner && go run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

.PHONY: conformance
conformance: ## the conformance suite on real servers: BACKEND=redis, redlock, etcd, zookeeper, postgres, builtin or memory
	FENCELOCK_REQUIRE=all go test -count=1 -v -run Conformance $(if $(filter memory,$(BACKEND)),./conformance,./$(BACKEND)/...)

.PHONY: faults
faults: ## break a cluster under contending clients: BACKEND=etcd, zookeeper or builtin, ROUNDS=2 of each fault
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all FENCELOCK_ROUNDS=$(ROUNDS) go test -count=1 -v -timeout 0 -parallel 4 -run 'ClusterFaults' ./$(BACKEND)

.PHONY: soak
soak: ## break a service at random: BACKEND=redis, redlock, etcd, zookeeper, postgres or builtin, DURATION=10m, SEED= (else random)
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all FENCELOCK_SOAK=$(DURATION) FENCELOCK_SEED=$(or $(SEED),random) go test -count=1 -v -timeout 0 -run 'TestSoak$$' ./$(BACKEND)

.PHONY: soak-server
soak-server: ## break the bundled server as machines and operators do, in network namespaces: DURATION=10m, SEED= (else random). Root; apt-get install iproute2 strace
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all FENCELOCK_SOAK=$(DURATION) FENCELOCK_SEED=$(or $(SEED),random) go test -count=1 -v -timeout 0 -run 'TestServer$$' ./internal/soak

.PHONY: versions
versions: DURATION = 60s
versions: ## let clients of the previous release and of this tree contend on each service, in both orders: DURATION=60s
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all FENCELOCK_SOAK=$(DURATION) go test -count=1 -v -timeout 0 -run 'TestVersions$$' ./internal/soak

.PHONY: report
report: ## break every driver for two hours and write docs/RELIABILITY.md; FROM=DIR writes it again from kept output, ONLY=soak-server one section
	go run ./internal/reliability -o docs/RELIABILITY.md $(if $(ONLY),-only $(ONLY) -soak $(DURATION)) $(if $(FROM),-from $(FROM)) $(if $(KEEP),-keep $(KEEP))

.PHONY: fuzz
fuzz: ## run every fuzz test for FUZZTIME (10s)
	@grep -rl --include='*_test.go' '^func Fuzz' . | xargs -r -n1 dirname | sort -u | while read -r dir; do \
		go test -list '^Fuzz' "$$dir" | grep '^Fuzz' | while read -r name; do \
			echo "$$dir $$name"; go test -run '^$$' -fuzz "^$$name$$" -fuzztime $(FUZZTIME) "$$dir" || exit 1; \
		done || exit 1; \
	done

.PHONY: measure
measure: ## print the size of each package (lines, comments, exported names, long functions, repeated blocks) the program's start-up time, and what scrapes of /metrics cost
	@go run ./internal/measure
	@go run ./internal/measure -start
	@go run ./internal/measure -scrape

.PHONY: prose
prose: ## count the phrases that make our English hard to read; PATHS=folders or files (all), FLAGS=-where for each place
	@go run ./internal/prose $(FLAGS) $(PATHS)

.PHONY: site
site: ## write the documentation as a website to the folder TO (site)
	cd docs/site && go run . -root ../.. -o $(abspath $(or $(TO),site))

.PHONY: bench
bench: ## run the benchmarks beside the peers (module bench)
	cd bench && go run .

.PHONY: generate
generate: ## write the Go code of the wire protocol anew; needs protoc 3.21.12 (Debian: protobuf-compiler)
	go generate ./builtin/lockpb

.PHONY: images
images: ## build the server images for machines without an image registry; prints their environment
	@.ci/images/build

.PHONY: ci
ci: ## all that the CI runs
	.ci/run
