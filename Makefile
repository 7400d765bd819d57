# Bare `make` prints the targets.
GO ?= go
# The packages whose concurrency the race detector watches; the rest is arithmetic.
RACE = ./comm/... ./ring/... ./overlap/... ./ddp/... ./launch/... ./rendezvous/... ./cpu/...

.PHONY: help build test race lint bench mutants chaos generate test-net cross

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## ./train, the program
	$(GO) build -o train ./cmd/train

test: ## all tests that need no privileges
	$(GO) test -timeout 10m ./...

race: ## the concurrent packages under the race detector (needs cgo and a C compiler)
	$(GO) test -race -short -timeout 12m $(RACE)

lint: ## gofmt, go vet and the rules of the house; fetches nothing
	@bad=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); if [ -n "$$bad" ]; then echo "gofmt -w these:"; echo "$$bad"; exit 1; fi
	$(GO) vet ./...
	$(GO) test -count=1 ./internal/lint

bench: ## micro-benchmarks of kernels and collectives
	$(GO) test -run '^$$' -bench . ./internal/simd ./cpu ./comm/... ./ring ./ddp ./bench

mutants: ## plant one fault each; the tests must notice every one
	$(GO) run ./internal/mutants

chaos: ## 200 jobs of real processes, disturbed: kills, pauses, strangers (SEED=1 ROUNDS=200)
	$(GO) run ./internal/chaos -seed $(or $(SEED),1) -rounds $(or $(ROUNDS),200)

generate: ## regenerate the assembly kernels (fetches avo)
	$(GO) generate ./internal/simd

test-net: ## tests in network namespaces (root, ip and tc)
	$(GO) test -count=1 -timeout 10m -tags netns ./internal/netns ./internal/chaos ./bench

cross: ## the builds without cgo and for other systems
	CGO_ENABLED=0 $(GO) build ./...
	GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 $(GO) vet ./...
