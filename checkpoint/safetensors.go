// Package checkpoint writes and reads the state of a training run: tensors in
// the safetensors format, whole or absent, in directories that are complete
// when they hold a file called DONE.
package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sort"

	"github.com/tandem-go/tandem/dtype"
)

// ErrFormat is in the chain of errors about a file that is not what it claims
// to be: truncated, inconsistent, or of another kind.
var ErrFormat = errors.New("not a valid safetensors file")

// maxHeader bounds the header before it is read, as the reference
// implementation does (100 MB).
const maxHeader = 100_000_000

// Tensor is a named array, row major, little endian.
type Tensor struct {
	Name  string
	Type  dtype.Type
	Shape []int // nil or empty for a scalar
	Data  []byte
}

// names maps element types to the format's names.
var names = map[dtype.Type]string{
	dtype.Float64: "F64", dtype.Float32: "F32", dtype.Float16: "F16", dtype.BFloat16: "BF16",
	dtype.Int64: "I64", dtype.Int32: "I32", dtype.Uint8: "U8",
}

func typeOf(name string) dtype.Type {
	for t, n := range names {
		if n == name {
			return t
		}
	}
	return dtype.Invalid
}

// entry is a tensor's line in the header.
type entry struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// Write writes tensors, in the order given, with metadata.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string) error {
	header := make(map[string]any, len(tensors)+1)
	if len(metadata) > 0 {
		header["__metadata__"] = metadata
	}
	var at int64
	for _, t := range tensors {
		n, err := t.bytes()
		if err != nil {
			return err
		}
		if _, twice := header[t.Name]; twice || t.Name == "__metadata__" {
			return fmt.Errorf("checkpoint: tensor name %q is used twice or reserved", t.Name)
		}
		shape := t.Shape
		if shape == nil {
			shape = []int{}
		}
		header[t.Name] = entry{names[t.Type], shape, [2]int64{at, at + n}}
		at += n
	}
	h, err := json.Marshal(header)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	h = append(h, bytes.Repeat([]byte{' '}, -len(h)&7)...) // data starts aligned
	if _, err := w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(h)))); err != nil {
		return err
	}
	if _, err := w.Write(h); err != nil {
		return err
	}
	for _, t := range tensors {
		if _, err := w.Write(t.Data); err != nil {
			return err
		}
	}
	return nil
}

// bytes is the size that shape and type ask for; Data must have it.
func (t *Tensor) bytes() (int64, error) {
	if names[t.Type] == "" {
		return 0, fmt.Errorf("checkpoint: tensor %q has type %v, which the format lacks", t.Name, t.Type)
	}
	n, ok := size(t.Shape, t.Type)
	if !ok || n != int64(len(t.Data)) {
		return 0, fmt.Errorf("checkpoint: tensor %q of shape %v %v comes with %d bytes", t.Name, t.Shape, t.Type, len(t.Data))
	}
	return n, nil
}

// size multiplies a shape out without overflow.
func size(shape []int, t dtype.Type) (int64, bool) {
	n := int64(t.Size())
	for _, d := range shape {
		if d < 0 || d > 0 && n > math.MaxInt64/int64(d) {
			return 0, false
		}
		n *= int64(d)
	}
	return n, true
}

// File is an open safetensors file whose header has been checked.
type File struct {
	// Metadata is the file's free-form part.
	Metadata map[string]string
	f        *os.File
	start    int64
	entries  map[string]entry
	order    []string // by offset
}

// Open reads and checks the header: its size against the file's, each
// tensor's extent against its shape and type, and that the tensors cover the
// data exactly, without gaps or overlaps. No tensor is read yet.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	st, err := f.Stat()
	if err == nil {
		var file *File
		if file, err = parse(f, st.Size()); err == nil {
			file.f = f
			return file, nil
		}
	}
	f.Close()
	return nil, fmt.Errorf("checkpoint: %s: %w", path, err)
}

func parse(r io.Reader, total int64) (*File, error) {
	var n uint64
	if err := binary.Read(r, binary.LittleEndian, &n); err != nil {
		return nil, fmt.Errorf("%w: %d bytes are too few for a header", ErrFormat, total)
	}
	if n > maxHeader || int64(n) > total-8 {
		return nil, fmt.Errorf("%w: its header claims %d bytes, the file has %d", ErrFormat, n, total)
	}
	raw := make([]byte, n)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrFormat, err)
	}
	var header map[string]json.RawMessage
	if err := json.Unmarshal(raw, &header); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrFormat, err)
	}
	file := &File{start: 8 + int64(n), entries: make(map[string]entry, len(header))}
	for name, msg := range header {
		if name == "__metadata__" {
			if err := json.Unmarshal(msg, &file.Metadata); err != nil {
				return nil, fmt.Errorf("%w: metadata: %w", ErrFormat, err)
			}
			continue
		}
		if err := file.add(name, msg); err != nil {
			return nil, err
		}
	}
	return file, file.checkCover(total - file.start)
}

func (f *File) add(name string, msg json.RawMessage) error {
	var e entry
	d := json.NewDecoder(bytes.NewReader(msg))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		return fmt.Errorf("%w: tensor %q: %w", ErrFormat, name, err)
	}
	if want, ok := size(e.Shape, typeOf(e.DType)); typeOf(e.DType) != dtype.Invalid &&
		(!ok || e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] || e.Offsets[1]-e.Offsets[0] != want) {
		return fmt.Errorf("%w: tensor %q of shape %v %s has offsets %v", ErrFormat, name, e.Shape, e.DType, e.Offsets)
	}
	f.entries[name] = e
	f.order = append(f.order, name)
	return nil
}

func (f *File) checkCover(data int64) error {
	sort.Slice(f.order, func(i, j int) bool {
		a, b := f.entries[f.order[i]].Offsets, f.entries[f.order[j]].Offsets
		return a[0] < b[0] || a[0] == b[0] && (a[1] < b[1] || a[1] == b[1] && f.order[i] < f.order[j])
	})
	var at int64
	for _, name := range f.order {
		e := f.entries[name]
		if e.Offsets[0] != at || e.Offsets[1] < at {
			return fmt.Errorf("%w: tensor %q starts at %d where %d was expected", ErrFormat, name, e.Offsets[0], at)
		}
		at = e.Offsets[1]
	}
	if at != data {
		return fmt.Errorf("%w: its tensors take %d bytes, the file has %d (truncated?)", ErrFormat, at, data)
	}
	return nil
}

// Names lists the tensors in the order of their data.
func (f *File) Names() []string { return slices.Clone(f.order) }

// Tensor describes one tensor, without its data. ok is false when the file
// doesn't have it. The type is dtype.Invalid when it is one that tandem lacks
// (a boolean mask, say).
func (f *File) Tensor(name string) (t Tensor, ok bool) {
	e, ok := f.entries[name]
	return Tensor{Name: name, Type: typeOf(e.DType), Shape: e.Shape}, ok
}

// Read reads a tensor's data into dst, which has exactly its size.
func (f *File) Read(name string, dst []byte) error {
	e, ok := f.entries[name]
	if !ok {
		return fmt.Errorf("checkpoint: %s has no tensor %q", f.f.Name(), name)
	}
	if n := e.Offsets[1] - e.Offsets[0]; n != int64(len(dst)) {
		return fmt.Errorf("checkpoint: tensor %q has %d bytes (%s %v), not %d", name, n, e.DType, e.Shape, len(dst))
	}
	if _, err := f.f.ReadAt(dst, f.start+e.Offsets[0]); err != nil {
		return fmt.Errorf("checkpoint: %s: tensor %q: %w", f.f.Name(), name, err)
	}
	return nil
}

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }
