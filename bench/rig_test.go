package bench

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it a measurement that failed would be reported as a perfect one.
func TestHiddenShare(t *testing.T) {
	require.InDelta(t, 0.75, float64(hiddenShare(2, 110, 100, 140)), 1e-12)
	require.Equal(t, Share(1), hiddenShare(1, 110, 100, 140))
	unknown := hiddenShare(2, 110, 100, 90)
	require.True(t, math.IsNaN(float64(unknown)))
	require.Equal(t, "n/a", unknown.String())
	require.Equal(t, "75 %", Share(0.75).String())
	for _, s := range []Share{0.75, unknown} {
		b, err := json.Marshal(s)
		require.NoError(t, err)
		var back Share
		require.NoError(t, json.Unmarshal(b, &back))
		require.Equal(t, s.String(), back.String())
	}
}
