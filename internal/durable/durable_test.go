package durable

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it a failed write could destroy the file that was there, or leave
// half of a new one.
func TestWholeOrAsBefore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	text := func(s string, err error) func(io.Writer) error {
		return func(w io.Writer) error {
			_, werr := io.WriteString(w, s)
			return errors.Join(werr, err)
		}
	}
	require.NoError(t, Write(path, text("old", nil)))
	boom := errors.New("disk full")
	require.ErrorIs(t, Write(path, text("new", boom)), boom)
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(raw))
	left, err := filepath.Glob(path + "*")
	require.NoError(t, err)
	require.Equal(t, []string{path}, left)
	require.NoError(t, Write(path, text("new", nil)))
	raw, err = os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "new", string(raw))
	require.Error(t, Write(filepath.Join(path, "y"), text("", nil)), "a file is no directory")
}
