package main

// mutants are the faults that the promises of docs/design.md forbid.
var mutants = []mutant{
	{
		Name: "ready is not awaited", File: "overlap/overlap.go",
		Old:      "if err := r.comm.Wait(e.ready); err != nil {",
		New:      "if err := error(nil); err != nil {",
		Packages: []string{"./ddp"}, Run: "TestOverlapChangesNoBit|TestRanksEqualJoinedBatch",
	},
	{
		Name: "done is not awaited by updates", File: "overlap/overlap.go",
		Old:      "error { return r.update.Wait(r.cur.buckets[k].done) }",
		New:      "error { return nil }",
		Packages: []string{"./ddp"}, Run: "TestOverlapChangesNoBit|TestAccumulation",
	},
	{
		Name: "done is not awaited by the caller", File: "overlap/overlap.go",
		Old:      "	return r.cur.buckets[len(r.buckets)-1].done.Sync(ctx)",
		New:      "	return nil",
		Packages: []string{"./overlap", "./ddp"}, Run: "TestGoldenOrder|TestNonFinite",
	},
	{
		Name: "update before the last read", File: "overlap/overlap.go",
		Old:      "if err := r.update.Wait(e.lastRead); err != nil {",
		New:      "if err := error(nil); err != nil {",
		Packages: []string{"./ddp"}, Run: "TestUpdateWaitsForLastReader",
	},
	{
		Name: "the next step reads before the update", File: "overlap/overlap.go",
		Old:      "	return r.compute.Wait(e)",
		New:      "	_ = e\n	return nil",
		Packages: []string{"./ddp"}, Run: "TestOverlapChangesNoBit|TestRanksEqualJoinedBatch",
	},
	{
		Name: "buckets start in the order of readiness", File: "overlap/overlap.go",
		Old:      "	if !r.sync || r.schedule == NoOverlap {\n		return nil\n	}\n	return r.launchFull()",
		New:      "	if !r.sync || r.schedule == NoOverlap || r.buckets[k].pending > 0 {\n		return nil\n	}\n	r.next = len(r.buckets)\n	return r.launch(k)",
		Packages: []string{"./overlap"}, Run: "TestGoldenOrder",
	},
	{
		Name: "a stale bucket after NoSync is added to", File: "ddp/step.go",
		Old:      "	d.micro = 0\n",
		New:      "",
		Packages: []string{"./ddp"}, Run: "TestAccumulation",
	},
	{
		Name: "gradients of NoSync are lost", File: "ddp/step.go",
		Old:      "d.plan.Accumulate(d.micro > 0)",
		New:      "d.plan.Accumulate(false)",
		Packages: []string{"./ddp"}, Run: "TestAccumulation|TestStepOverwritesOldGradients",
	},
	{
		Name: "buckets of NoSync still count as full", File: "overlap/overlap.go",
		Old:      "		r.buckets[k].pending = len(b.Params)\n",
		New:      "		if sync {\n			r.buckets[k].pending = len(b.Params)\n		}\n",
		Packages: []string{"./overlap", "./ddp"}, Run: "TestGoldenOrder|TestAccumulation",
	},
	{
		Name: "divided by the ranks twice", File: "ddp/step.go",
		Old:      "		return comm.Avg, nil",
		New:      "		s.on = d.prepareScaling() == nil\n		s.shared.set(1 / float64(h.ranks))\n		return comm.Avg, nil",
		Packages: []string{"./ddp"}, Run: "TestRanksEqualJoinedBatch",
	},
	{
		Name: "never divided by the ranks", File: "ddp/step.go",
		Old:      "		return comm.Avg, nil",
		New:      "		return comm.Sum, nil",
		Packages: []string{"./ddp"}, Run: "TestRanksEqualJoinedBatch",
	},
	{
		Name: "clipped before the reduction", File: "ddp/new.go",
		Old:      "		cfg.Reduced = d.norm.Squares",
		New:      "		cfg.Prepare = d.norm.Squares",
		Packages: []string{"./ddp"}, Run: "TestNormIsThatOfTheAverage|TestRanksEqualJoinedBatch",
	},
	{
		Name: "parameters are not broadcast", File: "ddp/new.go",
		Old:      `if err := d.broadcast(ctx, 0, comm.Tag{Name: "parameters", Bucket: -1}); err != nil {`,
		New:      "if err := error(nil); err != nil {",
		Packages: []string{"./ddp"}, Run: "TestInitialWeightsAreRankZeros",
	},
	{
		Name: "a solver's zeroing is lost", File: "ddp/grads.go",
		Old:      "(gorgonia.Value, error) { return v.grad, nil }",
		New:      "(gorgonia.Value, error) { return gorgonia.CloneValue(v.grad) }",
		Packages: []string{"./ddp"}, Run: "TestStockSolvers",
	},
	{
		Name: "ranks that disagree go on", File: "ddp/step.go",
		Old:      "	if err := h.check(); err != nil {",
		New:      "	if err := error(nil); err != nil {",
		Packages: []string{"./ddp"}, Run: "TestContradictionsAreErrorsEverywhere",
	},
	{
		Name: "batches depend on the rank's own seed", File: "trainer/run.go",
		Old:      "Block: c.Block, Seed: c.Seed}",
		New:      "Block: c.Block, Seed: c.Seed + int64(r.g.Rank)}",
		Packages: []string{"./cmd/train"}, Run: "TestWorldSizesTrainAlike",
	},
	{
		Name: "micro-steps of ranks overlap", File: "trainer/run.go",
		Old:      "first := r.g.Rank*perRank + micro*r.c.Batch",
		New:      "first := r.g.Rank*perRank/r.c.GradAccum + micro*r.c.Batch",
		Packages: []string{"./cmd/train"}, Run: "TestWorldSizesTrainAlike",
	},
	{
		Name: "fewer than 8 buckets", File: "bucket/caps.go",
		Old:      "len(cut(params, order, try)) >= MinBuckets",
		New:      "true",
		Packages: []string{"./bucket"}, Run: "TestDefaultCapGivesEightBuckets",
	},
	{
		Name: "parameters that differ go unnoticed", File: "ddp/check.go",
		Old: "same = same && h.get(r, laneHash) == h.get(first, laneHash)",
		New: "_ = r",
		Packages: []string{"./ddp"}, Run: "TestCheckParams",
	},
	{
		Name: "parameters are hashed before their updates", File: "ddp/check.go",
		Old: "if err := d.red.Sync(d.watch); err != nil {",
		New: "if err := error(nil); err != nil {",
		Packages: []string{"./ddp"}, Run: "TestCheckParams",
	},
	{
		Name: "fingerprints are not compared", File: "ddp/fingerprint.go",
		Old: "!bytes.Equal(p, first)",
		New: "len(p) != len(first)",
		Packages: []string{"./ddp"}, Run: "TestFingerprints",
	},
}
