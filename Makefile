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
COSTLY := ^(TestWhatLeasesCost|TestEventsThatAreShedAreCounted|TestTenThousandLeasesShareRenewals|TestGarbageAllocatesLittle)$$
# Of the driver's conformance suite it runs the groups that are through in a few seconds: 43 clauses, side by side.
FAST := (ownership|ambiguity|names|fencing|permits|multi|tier)

.PHONY: quick
quick: ## what to run after every save, in ten seconds: the core, the memory driver, and DRIVER=redis, redlock, etcd, zookeeper, postgres or builtin
	FENCELOCK_SIM_HOURS=1 go test -short -skip '$(COSTLY)' $(QUICK)
	$(if $(DRIVER),go test -short -run '^TestConformance$(if $(filter builtin,$(DRIVER)),Process$$,$$/^New$$)/^$(FAST)$$' ./$(DRIVER))

.PHONY: test
test: ## run all tests but those of the deep tier; says what it skips for lack of a server
	go test ./...

.PHONY: times
times: ## where the time of the tests goes: the slowest packages and tests of PKG (all)
	go test -count=1 -json $(or $(PKG),./...) | go run .ci/failed/main.go slow

.PHONY: race
race: ## what make quick runs, with two drivers, with the race detector; make deep runs all with it
	@go test -race -short $(FLAGS) $(QUICK) ./conformance/check ./fencing ./locktest ./redis ./builtin ./internal/server/...

.PHONY: deep
deep: ## everything, three quarters of an hour on servers that must be there: with the race detector, broken clusters, soaks, long simulations
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all go test -race -timeout 60m ./...
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all go test -timeout 60m . ./internal/machine ./internal/server ./conformance ./conformance/simulation ./conformance/check

.PHONY: vet
vet: ## go vet, and whether gofmt would change anything
	go vet ./...
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "run gofmt -w $$unformatted"; exit 1; }

.PHONY: lint
lint: ## golangci-lint; the first run builds it
	go run $(GOLANGCI) run --allow-parallel-runners ./...

.PHONY: conformance
conformance: ## the conformance suite on real servers: BACKEND=redis, redlock, etcd, zookeeper, postgres, builtin or memory
	FENCELOCK_REQUIRE=all go test -count=1 -v -run Conformance $(if $(filter memory,$(BACKEND)),./conformance,./$(BACKEND)/...)

.PHONY: faults
faults: ## break a cluster under contending clients: BACKEND=etcd, zookeeper or builtin, ROUNDS=2 of each fault
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all FENCELOCK_ROUNDS=$(ROUNDS) go test -count=1 -v -timeout 0 -parallel 4 -run 'ClusterFaults' ./$(BACKEND)

.PHONY: soak
soak: ## break a service at random: BACKEND=redis, redlock, etcd, zookeeper, postgres or builtin, DURATION=10m, SEED= (else random)
	FENCELOCK_DEEP=1 FENCELOCK_REQUIRE=all FENCELOCK_SOAK=$(DURATION) FENCELOCK_SEED=$(or $(SEED),random) go test -count=1 -v -timeout 0 -run 'TestSoak$$' ./$(BACKEND)

.PHONY: report
report: ## break every driver for half an hour and write docs/RELIABILITY.md; FROM=DIR writes it again from kept output
	go run ./internal/reliability -o docs/RELIABILITY.md $(if $(FROM),-from $(FROM)) $(if $(KEEP),-keep $(KEEP))

.PHONY: fuzz
fuzz: ## run every fuzz test for FUZZTIME (10s)
	@grep -rl --include='*_test.go' '^func Fuzz' . | xargs -r -n1 dirname | sort -u | while read -r dir; do \
		go test -list '^Fuzz' "$$dir" | grep '^Fuzz' | while read -r name; do \
			echo "$$dir $$name"; go test -run '^$$' -fuzz "^$$name$$" -fuzztime $(FUZZTIME) "$$dir" || exit 1; \
		done || exit 1; \
	done

.PHONY: measure
measure: ## print the size of each package: lines, comments, exported names, long functions, wide lines, repeated blocks
	@go run ./internal/measure

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
