package trainer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/parity"
	"github.com/tandem-go/tandem/optim"
)

// parityFile names the reference to a rank process; unset, this is no rank.
const parityFile = "TANDEM_TEST_PARITY_FILE"

// Without it training over real processes and sockets could differ from
// PyTorch although training over goroutines doesn't.
func TestParityOverRingProcesses(t *testing.T) {
	files, err := parity.Files()
	require.NoError(t, err)
	require.NotEmpty(t, files)
	exe, err := os.Executable()
	require.NoError(t, err)
	for _, path := range files {
		path, err := filepath.Abs(path)
		require.NoError(t, err)
		f, err := parity.Load(path)
		require.NoError(t, err)
		for _, ranks := range []int{1, 2, 4} {
			if f.Config.Batch%ranks != 0 {
				continue
			}
			t.Run(fmt.Sprintf("%s/%d", filepath.Base(path), ranks), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
				defer cancel()
				var out bytes.Buffer
				err := launch.Launch(ctx, launch.Options{
					NProc: ranks, Args: []string{exe, "-test.run=^TestParityRank$", "-test.v"}, Threads: 1,
					Env: []string{parityFile + "=" + path}, Stdout: &out, Stderr: &out,
				})
				require.NoError(t, err, out.String())
				require.Contains(t, out.String(), "--- PASS: TestParityRank")
			})
		}
	}
}

// TestParityRank is one rank of the test above, in a process of its own.
func TestParityRank(t *testing.T) {
	path := os.Getenv(parityFile)
	if path == "" {
		t.Skip("runs as a rank of TestParityOverRingProcesses")
	}
	f, err := parity.Load(path)
	require.NoError(t, err)
	ctx := context.Background()
	g, err := tandem.Init(ctx, nil)
	require.NoError(t, err)
	var first uint64
	for i, caps := range []bucket.Caps{bucket.Each(), {}, bucket.One()} {
		for _, micro := range []int{1, 2} {
			if f.Config.Batch%(g.WorldSize*micro) != 0 {
				continue
			}
			hash, err := trainLike(ctx, g, f, caps, micro)
			require.NoError(t, err, "caps %d, %d micro-steps", i, micro)
			if micro == 1 && i == 0 {
				first = hash
			}
			// With two ranks a sum has one order, whatever the buckets.
			if micro == 1 && g.WorldSize <= 2 {
				require.Equal(t, first, hash, "caps must not change a bit")
			}
		}
	}
	require.NoError(t, g.Comm.Barrier(ctx))
	require.NoError(t, g.Close())
}

// trainLike trains as the reference did, checks losses, norms and parameters,
// and returns a hash of the parameters' bits.
func trainLike(ctx context.Context, g *tandem.Group, f *parity.File, caps bucket.Caps, micro int) (uint64, error) {
	c := f.Config
	c.Batch /= g.WorldSize * micro
	m, err := gpt2mini.New(c)
	if err != nil {
		return 0, err
	}
	for name, p := range f.Params {
		if err := m.SetParam(name, p.Data); err != nil {
			return 0, err
		}
	}
	loss := m.Loss
	if micro > 1 {
		loss = gorgonia.Must(gorgonia.Mul(loss, gorgonia.NewConstant(1/float32(micro))))
	}
	d, err := ddp.New(ctx, g.Comm, loss, m.Params, &ddp.Options{
		Device: g.Device, Caps: caps, MaxNorm: 1,
		Optimizer: optim.AdamW{LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1},
	})
	if err != nil {
		return 0, err
	}
	defer d.Close()
	n := c.Batch * c.Seq
	for step := range f.Steps {
		for i := range micro {
			at := (g.Rank*micro + i) * n
			if err := m.SetBatch(f.Tokens[step][at:at+n], f.Targets[step][at:at+n]); err != nil {
				return 0, err
			}
			run := func() error { return d.Step(ctx) }
			if i < micro-1 {
				err = d.NoSync(run)
			} else {
				err = run()
			}
			if err != nil {
				return 0, err
			}
		}
		s := d.Stats()
		if math.Abs(s.Loss-f.Losses[step]) > 1e-4 || math.Abs(s.Norm/f.Norms[step]-1) > 1e-5 {
			return 0, fmt.Errorf("step %d: loss %v and norm %v, PyTorch has %v and %v", step, s.Loss, s.Norm, f.Losses[step], f.Norms[step])
		}
	}
	if err := d.Sync(ctx); err != nil {
		return 0, err
	}
	return checkAfter(m, f)
}

func checkAfter(m *gpt2mini.Model, f *parity.File) (uint64, error) {
	hash := fnv.New64a()
	var errs []error
	for _, p := range m.Params {
		v := p.Value().Data().([]float32)
		if diff := parity.Compare(p.Name(), v, f.After[p.Name()]); !(diff.Abs <= 1e-4) {
			errs = append(errs, fmt.Errorf("%s is off by %v after training", p.Name(), diff.Abs))
		}
		for _, x := range v {
			fmt.Fprintf(hash, "%08x", math.Float32bits(x))
		}
	}
	return hash.Sum64(), errors.Join(errs...)
}
