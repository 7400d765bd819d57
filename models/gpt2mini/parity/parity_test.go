package parity_test

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/models/gpt2mini/parity"
)

// Without it a comparison could pass on values that are missing, NaN or off.
func TestCompare(t *testing.T) {
	want := parity.Tensor{Shape: []int{3}, Data: []float32{1, -2, 0.5}}
	require.Zero(t, parity.Compare("w", []float64{1, -2, 0.5}, want))
	require.Equal(t, parity.Difference{Abs: 0.5, Rel: 0.25}, parity.Compare("w", []float32{1, -2, 0}, want))
	require.Equal(t, parity.Difference{Abs: 0.5, Rel: 0.5}, parity.Compare("h.0.attn.c_attn.bias", []float64{1, 7, 0}, want), "the key third doesn't count")
	require.True(t, math.IsInf(parity.Compare("w", []float64{1, -2}, want).Abs, 1))
	require.True(t, math.IsInf(parity.Compare("w", []float64{1, math.NaN(), 0.5}, want).Rel, 1))
}

// Without it TANDEM_PARITY could be misspelt and the further files go unread.
func TestFilesHonourTheEnvironment(t *testing.T) {
	t.Setenv(parity.Env, "")
	own, err := parity.Files()
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(own), 2)
	t.Setenv(parity.Env, own[0])
	all, err := parity.Files()
	require.NoError(t, err)
	require.Equal(t, append(own, own[0]), all)
	t.Setenv(parity.Env, filepath.Join(t.TempDir(), "*.safetensors"))
	_, err = parity.Files()
	require.ErrorContains(t, err, "matches no file")
}

// Without it a damaged or foreign file could be read as zeros, or panic.
func TestLoadRefusesOtherFiles(t *testing.T) {
	t.Setenv(parity.Env, "")
	own, err := parity.Files()
	require.NoError(t, err)
	good, err := os.ReadFile(own[0])
	require.NoError(t, err)
	for want, raw := range map[string][]byte{
		"spoilt.safetensors":                      good[:len(good)/2],
		"metadata vocab is \"\", want a positive": bytes.Replace(good, []byte(`"vocab"`), []byte(`"vocaa"`), 1),
		`no tensor "grad/wte.weight"`:             bytes.Replace(good, []byte(`"grad/wte.weight"`), []byte(`"grad/wtf.weight"`), 1),
		`tensor "losses" is`:                      bytes.Replace(good, []byte(`"losses": {"dtype": "F64", "shape": [`), []byte(`"losses": {"dtype": "I64", "shape": [`), 1),
	} {
		require.NotEqual(t, good, raw, want)
		path := filepath.Join(t.TempDir(), "spoilt.safetensors")
		require.NoError(t, os.WriteFile(path, raw, 0o600))
		_, err := parity.Load(path)
		require.ErrorContains(t, err, want)
	}
	_, err = parity.Load(filepath.Join(t.TempDir(), "absent"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Without it the copies of the references could drift from their source.
func TestReferencesAreTheSharedOnes(t *testing.T) {
	t.Setenv(parity.Env, "")
	own, err := parity.Files()
	require.NoError(t, err)
	for _, path := range own {
		shared := filepath.Join("..", "..", "..", "..", "shared", "parity", filepath.Base(path))
		want, err := os.ReadFile(shared)
		if err != nil {
			t.Skipf("no originals: %v", err)
		}
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), path)
	}
}
