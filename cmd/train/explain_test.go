package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it --explain could train after all, write files, or describe another
// model than the flags say.
func TestExplain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	stdout, stderr, code := train(t, nil, tiny(text(t), dir, "--batch", "3", "--nproc", "2", "--explain")...)
	require.Zero(t, code, stderr)
	require.Regexp(t, `^cpu \(1 thread, .*\), one micro-step\nplan: \d+ steps`, stdout)
	require.Regexp(t, `attention .* of float32\[48 96\] → float32\[48 32\] .* µs .* roof \d+%`, stdout)
	require.Regexp(t, `× all .* 100\.0%`, stdout)
	_, err := os.Stat(dir)
	require.ErrorIs(t, err, os.ErrNotExist)
}
