package checkpoint

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/nlpodyssey/safetensors"
	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/dtype"
)

func sample() []Tensor {
	return []Tensor{
		{"b.weight", dtype.Float32, []int{2, 3}, bytes.Repeat([]byte{1, 2, 3, 4}, 6)},
		{"a.bias", dtype.BFloat16, []int{3}, []byte{1, 2, 3, 4, 5, 6}},
		{"empty", dtype.Int64, []int{0, 4}, nil},
		{"scalar", dtype.Float64, nil, []byte{1, 2, 3, 4, 5, 6, 7, 8}},
	}
}

func writeSample(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, Write(&b, sample(), map[string]string{"format": "pt"}))
	return b.Bytes()
}

func open(t testing.TB, raw []byte) (*File, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.safetensors")
	require.NoError(t, os.WriteFile(path, raw, 0o600))
	f, err := Open(path)
	if err == nil {
		t.Cleanup(func() { f.Close() })
	}
	return f, err
}

// Without it what is written might not be what is read, here or by others.
func TestRoundTripAndIndependentReader(t *testing.T) {
	raw := writeSample(t)
	f, err := open(t, raw)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"format": "pt"}, f.Metadata)
	require.Equal(t, []string{"b.weight", "a.bias", "empty", "scalar"}, f.Names())
	other, err := safetensors.Deserialize(raw)
	require.NoError(t, err)
	for _, want := range sample() {
		got, ok := f.Tensor(want.Name)
		require.True(t, ok)
		require.Equal(t, want.Type, got.Type)
		require.ElementsMatch(t, want.Shape, got.Shape)
		data := make([]byte, len(want.Data))
		require.NoError(t, f.Read(want.Name, data))
		require.Equal(t, append([]byte{}, want.Data...), data)
		v, ok := other.Tensor(want.Name)
		require.True(t, ok)
		require.Equal(t, data, append([]byte{}, v.Data()...))
	}
	require.ErrorContains(t, f.Read("b.weight", make([]byte, 3)), "24 bytes")
	require.ErrorContains(t, f.Read("missing", nil), "missing")
}

// Without it a file of another library might not open here.
func TestReadsIndependentWriter(t *testing.T) {
	view, err := safetensors.NewTensorView(safetensors.F32, []uint64{1, 2}, []byte{1, 2, 3, 4, 5, 6, 7, 8})
	require.NoError(t, err)
	raw, err := safetensors.Serialize(map[string]safetensors.TensorView{"x": view}, map[string]string{"k": "v"})
	require.NoError(t, err)
	f, err := open(t, raw)
	require.NoError(t, err)
	data := make([]byte, 8)
	require.NoError(t, f.Read("x", data))
	require.Equal(t, []byte{1, 2, 3, 4, 5, 6, 7, 8}, data)
}

func withHeader(h string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
	return append(append(b, h...), make([]byte, data)...)
}

// Without it a broken or lying file would be believed, or crash the reader.
func TestBadFiles(t *testing.T) {
	good := writeSample(t)
	for name, raw := range map[string][]byte{
		"empty":         {},
		"truncated":     good[:len(good)-1],
		"trailing":      append(bytes.Clone(good), 0),
		"huge header":   binary.LittleEndian.AppendUint64(nil, 1<<62),
		"not json":      withHeader("nonsense", 0),
		"gap":           withHeader(`{"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2),
		"overlap":       withHeader(`{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3),
		"wrong extent":  withHeader(`{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4),
		"negative":      withHeader(`{"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}}`, 0),
		"overflow":      withHeader(`{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0),
		"backwards":     withHeader(`{"x":{"dtype":"BOOL","shape":[2],"data_offsets":[2,0]}}`, 0),
		"unknown field": withHeader(`{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1],"code":1}}`, 1),
	} {
		_, err := open(t, raw)
		require.ErrorIs(t, err, ErrFormat, name)
	}
	f, err := open(t, withHeader(`{"mask":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}`, 2))
	require.NoError(t, err, "a type that we lack may be in the file")
	m, ok := f.Tensor("mask")
	require.True(t, ok)
	require.Equal(t, dtype.Invalid, m.Type)
	require.Error(t, Write(io.Discard, []Tensor{{"x", dtype.Float32, []int{2}, make([]byte, 4)}}, nil))
	require.Error(t, Write(io.Discard, []Tensor{{Name: "x", Type: dtype.Uint8, Shape: []int{0}}, {Name: "x", Type: dtype.Uint8, Shape: []int{0}}}, nil))
}

// Without it bytes from outside could panic the reader or make it allocate without bound.
func FuzzOpen(f *testing.F) {
	var b bytes.Buffer
	if err := Write(&b, sample(), nil); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add(withHeader(`{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1))
	f.Fuzz(func(t *testing.T, raw []byte) {
		file, err := parse(bytes.NewReader(raw), int64(len(raw)))
		if err != nil {
			return
		}
		for _, n := range file.Names() {
			e := file.entries[n]
			if e.Offsets[0] < 0 || file.start+e.Offsets[1] > int64(len(raw)) {
				t.Fatalf("%q lies outside the file: %v", n, e.Offsets)
			}
		}
	})
}

func save(t *testing.T, root string, step int) Checkpoint {
	t.Helper()
	c, err := Save(root, step, func(create func(string, func(io.Writer) error) error) error {
		return create(StateFile, func(w io.Writer) error {
			_, err := w.Write([]byte(`{"step":1}`))
			return err
		})
	})
	require.NoError(t, err)
	return c
}

// Without it a checkpoint that was cut short could be resumed from.
func TestWholeOrAbsent(t *testing.T) {
	root := filepath.Join(t.TempDir(), "checkpoint")
	_, err := Find(root)
	require.ErrorIs(t, err, ErrNone)
	c := save(t, root, 10)
	boom := errors.New("disk full")
	_, err = Save(root, 20, func(create func(string, func(io.Writer) error) error) error {
		return create(ModelFile, func(io.Writer) error { return boom })
	})
	require.ErrorIs(t, err, boom)
	left, err := os.ReadDir(filepath.Join(root, "step-00000020"))
	require.NoError(t, err)
	require.Empty(t, left, "no half-written file may stay")
	for _, path := range []string{root, filepath.Dir(root), c.Dir} {
		got, err := Find(path)
		require.NoError(t, err, path)
		require.Equal(t, c, got)
	}
	_, err = Find(filepath.Join(root, "step-00000020"))
	require.ErrorIs(t, err, ErrNone)
	require.ErrorContains(t, err, "DONE")
	var st struct{ Step int }
	require.NoError(t, c.State(&st))
	require.Equal(t, 1, st.Step)
}

// Without it old checkpoints fill the disk, or the best one is thrown away.
func TestPrune(t *testing.T) {
	root := t.TempDir()
	for step := 1; step <= 5; step++ {
		save(t, root, step)
	}
	half := filepath.Join(root, "step-00000003", doneFile)
	require.NoError(t, os.Remove(half))
	other := filepath.Join(root, "step-by-step.txt")
	require.NoError(t, os.WriteFile(other, nil, 0o600))
	require.NoError(t, Prune(root, 2, 2))
	require.FileExists(t, other, "not ours")
	require.NoDirExists(t, filepath.Dir(half), "half a checkpoint is of no use")
	cs, err := List(root)
	require.NoError(t, err)
	var steps []int
	for _, c := range cs {
		steps = append(steps, c.Step)
	}
	require.Equal(t, []int{2, 4, 5}, steps)
}
