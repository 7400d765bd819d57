package trainer

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Metrics is one step's line in metrics.jsonl. Times are milliseconds on rank
// 0's clock, over all micro-steps of the step.
type Metrics struct {
	// Step counts finished optimizer steps, from 1.
	Step int `json:"step"`
	// Loss is the mean cross entropy in nats, over all ranks and micro-steps.
	Loss float64 `json:"loss"`
	// ValLoss is the mean over all fixed windows of the validation part, in the
	// steps that were evaluated.
	ValLoss *float64 `json:"val_loss,omitempty"`
	LR      float64  `json:"lr"`
	// GradNorm is the global norm of the averaged gradient before clipping.
	GradNorm float64 `json:"grad_norm"`
	StepMS   float64 `json:"step_ms"`
	// ForwardMS and BackwardMS are compute; OptimizerMS is the update's kernels.
	ForwardMS   float64 `json:"forward_ms"`
	BackwardMS  float64 `json:"backward_ms"`
	OptimizerMS float64 `json:"optimizer_ms"`
	// CommMS is the time with a bucket at the head of the queue and bytes still
	// to move; ExposedCommMS the part of it after the last gradient.
	CommMS        float64 `json:"comm_ms"`
	ExposedCommMS float64 `json:"exposed_comm_ms"`
	// TokensPerS counts the tokens of all ranks.
	TokensPerS float64 `json:"tokens_per_s"`
	WorldSize  int     `json:"world_size"`
	Buckets    int     `json:"buckets"`
	// BucketCapMB is the cap of the middle buckets in MiB.
	BucketCapMB float64 `json:"bucket_cap_mb"`
	// CheckpointStallMS is the time that a checkpoint held the step up, on steps
	// that took one. It is not in StepMS.
	CheckpointStallMS *float64 `json:"checkpoint_stall_ms,omitempty"`
}

// HiddenShare is the share of the communication that ran under the backward
// pass: 1 − exposed/comm. It is 1 where there is none.
func (m *Metrics) HiddenShare() float64 {
	if m.CommMS <= 0 {
		return 1
	}
	return max(0, 1-m.ExposedCommMS/m.CommMS)
}

// Result is how a run ended.
type Result struct {
	Steps int `json:"steps"`
	// Stopped says that Config.Stop, of some rank, ended the run before its last step.
	Stopped bool    `json:"stopped,omitempty"`
	Loss    float64 `json:"loss"`
	ValLoss float64 `json:"val_loss"`
	// TokensPerS is the median over the steps, all ranks.
	TokensPerS float64 `json:"tokens_per_s"`
	// Sample is generated text, empty when none was asked for.
	Sample string `json:"sample,omitempty"`
}

// metricsFile appends one object a line; each line is written whole, so that a
// reader of a running job never sees half of one.
type metricsFile struct {
	f    *os.File
	w    *bufio.Writer
	last int64 // where the last line begins
}

// PrepareOut makes dir and proves that files can be made in it.
func PrepareOut(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("--out: %w; pass a directory that you can write to", err)
	}
	f, err := os.CreateTemp(dir, ".probe-")
	if err != nil {
		return fmt.Errorf("--out: %w; pass a directory that you can write to", err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// openMetrics opens the file in dir to append steps after step: what it has of
// those, from a run that came further before it ended, is dropped.
func openMetrics(dir string, step int) (*metricsFile, error) {
	path := filepath.Join(dir, "metrics.jsonl")
	if err := keepMetrics(path, step); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return &metricsFile{f: f, w: bufio.NewWriter(f)}, nil
}

func (m *metricsFile) write(v *Metrics) error {
	if m.f == nil {
		return nil
	}
	var err error
	if m.last, err = m.f.Seek(0, io.SeekEnd); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	if err := json.NewEncoder(m.w).Encode(v); err != nil {
		return fmt.Errorf("metrics: step %d: %w", v.Step, err)
	}
	if err := m.w.Flush(); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}

// amend writes the last line anew, with what has become known of its step.
func (m *metricsFile) amend(v *Metrics) error {
	if m.f == nil {
		return nil
	}
	if err := m.f.Truncate(m.last); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	return m.write(v)
}

func (m *metricsFile) close() error {
	if m.f == nil {
		return nil
	}
	return errors.Join(m.w.Flush(), m.f.Close())
}
