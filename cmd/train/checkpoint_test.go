package main

import (
	"bytes"
	le "encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nlpodyssey/safetensors"
	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/trainer"
)

// latest is the newest checkpoint of a run.
func latest(t *testing.T, out string) checkpoint.Checkpoint {
	t.Helper()
	c, err := checkpoint.Find(out)
	require.NoError(t, err)
	return c
}

// requireSameEnd compares two runs bit for bit: the loss of every step, and all
// tensors of their last checkpoints.
func requireSameEnd(t *testing.T, a, b string) {
	t.Helper()
	ma, mb := metrics(t, a), metrics(t, b)
	require.Len(t, mb, len(ma))
	for i := range ma {
		require.Equal(t, i+1, mb[i].Step)
		require.Equal(t, ma[i].Loss, mb[i].Loss, "step %d", i+1)
		require.Equal(t, ma[i].GradNorm, mb[i].GradNorm, "step %d", i+1)
	}
	require.Equal(t, *ma[len(ma)-1].ValLoss, *mb[len(mb)-1].ValLoss)
	for _, file := range []string{checkpoint.ModelFile, checkpoint.OptimizerFile} {
		x, err := os.ReadFile(latest(t, a).Path(file))
		require.NoError(t, err)
		y, err := os.ReadFile(latest(t, b).Path(file))
		require.NoError(t, err)
		require.True(t, bytes.Equal(x, y), "%s differs", file)
	}
}

// killed starts the program and kills it, ranks and all, at a random moment after
// it has written lines of metrics. It reports whether the run ended before.
func killed(t *testing.T, rng *rand.Rand, lines int, out string, args ...string) (ended bool) {
	t.Helper()
	cmd := exec.Command(binary, args...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for {
		select {
		case err := <-done:
			require.NoError(t, err, errs.String())
			return true
		case <-time.After(2 * time.Millisecond):
		}
		if raw, _ := os.ReadFile(filepath.Join(out, "metrics.jsonl")); bytes.Count(raw, []byte("\n")) >= lines {
			break
		}
	}
	time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
	var pids []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", cmd.Process.Pid))
	for _, task := range tasks {
		b, _ := os.ReadFile(task)
		for f := range strings.FieldsSeq(string(b)) {
			pid, err := strconv.Atoi(f)
			require.NoError(t, err)
			pids = append(pids, pid)
		}
	}
	_ = cmd.Process.Kill()
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	err := <-done
	waitFor(t, func() bool {
		for _, pid := range pids {
			if syscall.Kill(pid, 0) == nil {
				return false
			}
		}
		return true
	})
	return err == nil
}

// Without it a job that machines or people kill would end elsewhere than one that
// nobody disturbs: 300 steps, killed about every 40, at any moment.
func TestKilledJobEndsAsUninterrupted(t *testing.T) {
	data := text(t)
	whole, broken := t.TempDir(), t.TempDir()
	flags := func(out string) []string {
		return tiny(data, out, "--steps", "300", "--batch", "4", "--dropout", "0.1", "--grad-accum", "2", "--checkpoint-every", "7", "--eval-every", "50")
	}
	_, stderr, code := train(t, nil, flags(whole)...)
	require.Zero(t, code, stderr)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	kills, lines := 0, 0
	for !killed(t, rng, lines+20+rng.IntN(40), broken, append(flags(broken), "--resume", "auto")...) {
		kills++
		require.Less(t, kills, 60, "no progress")
		// The lines after the last checkpoint are there until the next run drops them.
		raw, err := os.ReadFile(filepath.Join(broken, "metrics.jsonl"))
		require.NoError(t, err)
		lines = bytes.Count(raw, []byte("\n"))
	}
	require.Greater(t, kills, 3)
	t.Logf("%d kills", kills)
	requireSameEnd(t, whole, broken)
}

// Without it an interrupted run would lose its last steps, and one that goes on
// to another end could not be told from one that went there at once.
func TestInterruptedRunLeavesACheckpoint(t *testing.T) {
	data, out := text(t), t.TempDir()
	flags := tiny(data, out, "--batch", "4", "--resume", "auto", "--checkpoint-every", "1000000", "--eval-every", "1000000")
	cmd := exec.Command(binary, append(flags, "--steps", "1000000")...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }()
	waitFor(t, func() bool {
		b, err := os.ReadFile(filepath.Join(out, "metrics.jsonl"))
		return err == nil && len(b) > 4000
	})
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.Error(t, cmd.Wait())
	all := metrics(t, out)
	last := all[len(all)-1]
	c := latest(t, out)
	require.Equal(t, last.Step, c.Step, errs.String())
	require.NotNil(t, last.CheckpointStallMS)

	stdout, stderr, code := train(t, nil, append(flags, "--steps", strconv.Itoa(c.Step+5))...)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, fmt.Sprintf("resumed: %s, after step %d", c.Dir, c.Step))
	require.Contains(t, stdout, "note: --steps was 1000000")
	require.Equal(t, c.Step+5, latest(t, out).Step)
	require.Len(t, metrics(t, out), c.Step+5)

	stdout, stderr, code = train(t, nil, append(flags, "--steps", strconv.Itoa(c.Step+5))...)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, fmt.Sprintf("after %d steps", c.Step+5), "nothing is left to do")
	require.Len(t, metrics(t, out), c.Step+5)
}

// Without it a run could not move to another number of ranks, or would see
// samples twice there.
func TestResumeAtAnotherWorldSize(t *testing.T) {
	data, whole := text(t), t.TempDir()
	_, stderr, code := train(t, nil, tiny(data, whole, "--steps", "30", "--nproc", "2", "--batch", "4")...)
	require.Zero(t, code, stderr)
	want := metrics(t, whole)
	half := t.TempDir()
	_, stderr, code = train(t, nil, tiny(data, half, "--steps", "30", "--nproc", "2", "--batch", "4", "--checkpoint-every", "15", "--keep", "99")...)
	require.Zero(t, code, stderr)
	from := filepath.Join(half, "checkpoint", "step-00000015")
	for _, s := range [][]string{{"--nproc", "1", "--batch", "8"}, {"--nproc", "4", "--batch", "2"}} {
		out := t.TempDir()
		stdout, stderr, code := train(t, nil, tiny(data, out, append(s, "--steps", "30", "--resume", from)...)...)
		require.Zero(t, code, stderr)
		require.Contains(t, stdout, "2 ranks then, "+s[1]+" now")
		require.NotContains(t, stdout, "global batch")
		got := metrics(t, out)
		require.Len(t, got, 15)
		for i, m := range got {
			require.Equal(t, 16+i, m.Step)
			require.InDelta(t, want[15+i].Loss, m.Loss, 1e-3, "%v, step %d", s, m.Step)
		}
		require.InDelta(t, *want[29].ValLoss, *got[14].ValLoss, 1e-3)
	}
	out := t.TempDir()
	stdout, stderr, code := train(t, nil, tiny(data, out, "--nproc", "1", "--batch", "4", "--steps", "16", "--resume", from)...)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "the global batch was 8 windows and is 4 now")
	_, stderr, code = train(t, nil, tiny(data, half, "--steps", "30", "--batch", "4", "--resume", from)...)
	require.NotZero(t, code)
	require.Contains(t, stderr, "step-00000030 is later than")
}

// Without it checkpoints could fill the disk, the best be thrown away, or other
// programs be unable to read them.
func TestCheckpointsOnDisk(t *testing.T) {
	data, out := text(t), t.TempDir()
	_, stderr, code := train(t, nil, tiny(data, out, "--steps", "40", "--batch", "4", "--checkpoint-every", "4", "--eval-every", "20", "--keep", "2")...)
	require.Zero(t, code, stderr)
	cs, err := checkpoint.List(filepath.Join(out, "checkpoint"))
	require.NoError(t, err)
	require.LessOrEqual(t, len(cs), 3)
	last := cs[len(cs)-1]
	require.Equal(t, 40, last.Step)
	var s trainer.State
	require.NoError(t, last.State(&s))
	require.Equal(t, 40, s.Best.Step, "the loss falls")
	require.Equal(t, 2, s.Plan.WorldSize)
	require.NotEmpty(t, s.Vocab.Chars)

	raw, err := os.ReadFile(last.Path(checkpoint.ModelFile))
	require.NoError(t, err)
	st, err := safetensors.Deserialize(raw)
	require.NoError(t, err)
	for name, shape := range map[string][]uint64{
		"transformer.wte.weight": {uint64(s.Vocab.Size), 32}, "transformer.wpe.weight": {16, 32},
		"transformer.h.1.attn.c_attn.weight": {32, 96}, "transformer.ln_f.bias": {32},
	} {
		v, ok := st.Tensor(name)
		require.True(t, ok, name)
		require.Equal(t, shape, v.Shape())
		require.Equal(t, safetensors.F32, v.DType())
	}
	_, meta, err := safetensors.ReadMetadata(raw)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"format": "pt"}, meta.Metadata())

	stalls := 0
	for _, m := range metrics(t, out) {
		if m.CheckpointStallMS != nil {
			require.Positive(t, *m.CheckpointStallMS)
			stalls++
		}
	}
	require.Positive(t, stalls)
	none := t.TempDir()
	_, stderr, code = train(t, nil, tiny(data, none, "--steps", "4", "--batch", "4", "--checkpoint-every", "0")...)
	require.Zero(t, code, stderr)
	require.NoDirExists(t, filepath.Join(none, "checkpoint"))
}

// Without it a damaged or foreign checkpoint would be a crash, a hang or, worse,
// trained on: each is one line that names the file, and nothing is started.
func TestBadCheckpoints(t *testing.T) {
	data, out := text(t), t.TempDir()
	_, stderr, code := train(t, nil, tiny(data, out, "--steps", "2", "--batch", "4")...)
	require.Zero(t, code, stderr)
	good := latest(t, out)
	rewrite := func(file string, change func([]byte) []byte) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, file)
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, change(raw), 0o600))
		}
	}
	cut := func(b []byte) []byte { return b[:len(b)-3] }
	other := filepath.Join(t.TempDir(), "other.txt")
	require.NoError(t, os.WriteFile(other, bytes.Repeat([]byte("zyx wvu\n"), 500), 0o600))
	for name, c := range map[string]struct {
		damage func(t *testing.T, dir string)
		flags  []string
		want   []string
	}{
		"no DONE":           {damage: func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "DONE"))) }, want: []string{"step-00000002", "DONE"}},
		"missing":           {damage: func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(dir)) }, want: []string{"step-00000002", "no complete checkpoint"}},
		"truncated model":   {damage: rewrite(checkpoint.ModelFile, cut), want: []string{checkpoint.ModelFile, "truncated"}},
		"truncated moments": {damage: rewrite(checkpoint.OptimizerFile, cut), want: []string{checkpoint.OptimizerFile, "truncated"}},
		"bad header": {damage: rewrite(checkpoint.ModelFile, func(b []byte) []byte {
			return append(le.LittleEndian.AppendUint64(nil, 1<<60), b[8:]...)
		}), want: []string{checkpoint.ModelFile, "header"}},
		"bad state":       {damage: rewrite(checkpoint.StateFile, cut), want: []string{checkpoint.StateFile}},
		"other format":    {damage: rewrite(checkpoint.StateFile, func(b []byte) []byte { return bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 9`), 1) }), want: []string{"format 9"}},
		"lying state":     {damage: rewrite(checkpoint.StateFile, func(b []byte) []byte { return bytes.Replace(b, []byte(`"step": 2`), []byte(`"step": 7`), 1) }), want: []string{"says step 7"}},
		"fewer layers":    {flags: []string{"--layers", "1"}, want: []string{"--layers is 2 there and 1 here"}},
		"other heads":     {flags: []string{"--heads", "4"}, want: []string{"--heads is 2 there and 4 here"}},
		"wider":           {flags: []string{"--d-model", "64"}, want: []string{"--d-model is 32 there and 64 here"}},
		"shorter block":   {flags: []string{"--block", "8"}, want: []string{"--block is 16 there and 8 here"}},
		"other alphabet":  {flags: []string{"--data", other}, want: []string{"vocabulary of", "wte.weight"}},
		"other shapes":    {damage: rewrite(checkpoint.ModelFile, func(b []byte) []byte { return bytes.Replace(b, []byte(`[16,32]`), []byte(`[32,16]`), 1) }), want: []string{`"transformer.wpe.weight" has the shape [32 16]`}},
		"other parameter": {damage: rewrite(checkpoint.ModelFile, func(b []byte) []byte { return bytes.Replace(b, []byte(`ln_f.bias`), []byte(`ln_g.bias`), 1) }), want: []string{`no "ln_f.bias"`}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "step-00000002")
			require.NoError(t, os.CopyFS(dir, os.DirFS(good.Dir)))
			if c.damage != nil {
				c.damage(t, dir)
			}
			fresh := filepath.Join(t.TempDir(), "out")
			_, stderr, code := train(t, nil, append(tiny(data, fresh, "--steps", "4", "--batch", "4", "--resume", dir), c.flags...)...)
			require.NotZero(t, code)
			for _, want := range c.want {
				require.Contains(t, stderr, want)
			}
			require.Equal(t, 1, strings.Count(strings.TrimSpace(stderr), "\n")+1, "one line: %s", stderr)
			require.NoDirExists(t, fresh)
		})
	}
	_, stderr, code = train(t, nil, tiny(data, out, "--steps", "4", "--batch", "4")...)
	require.NotZero(t, code)
	require.Contains(t, stderr, "--resume auto", "a run does not write over another")
}

// Without it a rank that rank 0's files refuse would be left waiting, or a moment
// that is damaged where the header doesn't show it be taken for zero.
func TestRankRefusesWhatTheParentCannotSee(t *testing.T) {
	data, out := text(t), t.TempDir()
	_, stderr, code := train(t, nil, tiny(data, out, "--steps", "2", "--batch", "4", "--nproc", "1")...)
	require.Zero(t, code, stderr)
	path := latest(t, out).Path(checkpoint.OptimizerFile)
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, bytes.Replace(raw, []byte(`"h.0.ln_1.bias.exp_avg"`), []byte(`"h.0.ln_1.bias.exp_xvg"`), 1), 0o600))
	_, stderr, code = train(t, nil, tiny(data, out, "--steps", "4", "--batch", "4", "--nproc", "3", "--resume", "auto")...)
	require.NotZero(t, code)
	require.Contains(t, stderr, `lacks "h.0.ln_1.bias.exp_avg"`)
}

// Without it a model of others, or of an earlier run, could not be fine-tuned.
func TestInitFrom(t *testing.T) {
	data, out := text(t), t.TempDir()
	_, stderr, code := train(t, nil, tiny(data, out, "--steps", "30", "--batch", "8")...)
	require.Zero(t, code, stderr)
	all := metrics(t, out)
	file := latest(t, out).Path(checkpoint.ModelFile)
	// A learning rate of next to nothing leaves the parameters where they are.
	still := []string{"--steps", "1", "--batch", "8", "--lr", "1e-30", "--warmup", "0", "--weight-decay", "0"}
	tuned := t.TempDir()
	_, stderr, code = train(t, nil, tiny(data, tuned, append(still, "--init-from", file)...)...)
	require.Zero(t, code, stderr)
	require.Equal(t, *all[29].ValLoss, *metrics(t, tuned)[0].ValLoss)

	short := t.TempDir()
	_, stderr, code = train(t, nil, tiny(data, short, append(still, "--init-from", file, "--block", "8")...)...)
	require.Zero(t, code, stderr)
	require.InDelta(t, *all[29].ValLoss, *metrics(t, short)[0].ValLoss, 0.5, "the first positions are used")
	for flag, want := range map[string]string{"--block=32": "wpe.weight", "--layers=3": "layers", "--data=" + longText(t): "wte.weight"} {
		_, stderr, code = train(t, nil, append(tiny(data, filepath.Join(t.TempDir(), "out"), "--steps", "1", "--init-from", file), flag)...)
		require.NotZero(t, code)
		require.Contains(t, stderr, want)
		require.Equal(t, 1, strings.Count(strings.TrimSpace(stderr), "\n")+1, "one line: %s", stderr)
	}
}

// longText has more characters than text.
func longText(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "long")
	var b strings.Builder
	for i := range 5000 {
		b.WriteRune(rune('!' + i%90))
	}
	require.NoError(t, os.WriteFile(path, []byte(b.String()), 0o600))
	return path
}

// Without it the configuration in a checkpoint would be something else than JSON
// that other programs can read.
func TestStateIsPlainJSON(t *testing.T) {
	data, out := text(t), t.TempDir()
	_, stderr, code := train(t, nil, tiny(data, out, "--steps", "1", "--batch", "4")...)
	require.Zero(t, code, stderr)
	raw, err := os.ReadFile(latest(t, out).Path(checkpoint.StateFile))
	require.NoError(t, err)
	var v map[string]any
	require.NoError(t, json.Unmarshal(raw, &v))
	for _, key := range []string{"step", "seed", "optimizer_steps", "model", "vocabulary", "text", "comm_plan", "config", "loss", "val_loss"} {
		require.Contains(t, v, key)
	}
}
