package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
)

// maxBinVocab is how many different tokens two bytes can hold.
const maxBinVocab = math.MaxUint16 + 1

// Bin is a Seq on disk, in nanoGPT's format: nothing but tokens, each two
// bytes, little-endian. The file is mapped into memory where the system can do
// that, so only what is read costs memory; it must not be shortened meanwhile.
type Bin struct {
	path  string
	vocab int
	n     int
	raw   []byte // the mapping; nil where tokens are read from file
	unmap func() error

	file    *os.File
	mu      sync.Mutex // guards scratch
	scratch []byte
}

// mapping maps size bytes of a file; errors.ErrUnsupported where that can't be done.
type mapping func(f *os.File, size int) ([]byte, func() error, error)

// OpenBin opens a file of tokens of a vocabulary of vocab. Tokens are checked
// when they are copied, some of them now.
func OpenBin(path string, vocab int) (*Bin, error) { return openBin(path, vocab, mapFile) }

func openBin(path string, vocab int, m mapping) (*Bin, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	b := &Bin{path: path, vocab: vocab, file: f}
	if err := b.open(m); err != nil {
		return nil, errors.Join(fmt.Errorf("tokens: %s: %w", path, err), b.Close())
	}
	return b, nil
}

func (b *Bin) open(m mapping) error {
	st, err := b.file.Stat()
	if err != nil {
		return err
	}
	size := st.Size()
	switch {
	case !st.Mode().IsRegular():
		return errors.New("is no regular file")
	case b.vocab < 1 || b.vocab > maxBinVocab:
		return fmt.Errorf("a vocabulary of %d, want 1 to %d: tokens have two bytes", b.vocab, maxBinVocab)
	case size == 0:
		return errors.New("is empty")
	case size%2 != 0:
		return fmt.Errorf("has %d bytes, an odd number: tokens have two; the file is cut short or no .bin", size)
	case size > math.MaxInt:
		return fmt.Errorf("has %d bytes, more than this system can address", size)
	}
	b.n = int(size / 2)
	b.raw, b.unmap, err = m(b.file, int(size))
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("mapping it: %w", err)
	}
	return b.probe()
}

// probe looks at both ends, where a wrong file or vocabulary shows.
func (b *Bin) probe() error {
	ids := make([]int, min(b.n, 1<<16))
	if err := b.copy(ids, 0); err != nil {
		return err
	}
	return b.copy(ids, b.n-len(ids))
}

// Len is the number of tokens.
func (b *Bin) Len() int { return b.n }

// Copy implements Seq. It may be called from several goroutines, but not once
// Close was.
func (b *Bin) Copy(dst []int, at int) error {
	if err := b.copy(dst, at); err != nil {
		return fmt.Errorf("tokens: %s: %w", b.path, err)
	}
	return nil
}

func (b *Bin) copy(dst []int, at int) error {
	if err := checkRange(len(dst), at, b.n); err != nil {
		return err
	}
	if b.raw != nil {
		return b.decode(dst, b.raw[2*at:2*(at+len(dst))], at)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if need := 2 * len(dst); len(b.scratch) < need {
		b.scratch = make([]byte, need)
	}
	raw := b.scratch[:2*len(dst)]
	if _, err := b.file.ReadAt(raw, 2*int64(at)); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("token %d: %w", at, err)
	}
	return b.decode(dst, raw, at)
}

// decode turns bytes into tokens and looks at the vocabulary once for all.
func (b *Bin) decode(dst []int, raw []byte, at int) error {
	top := 0
	raw = raw[:2*len(dst)]
	for i := range dst {
		id := int(binary.LittleEndian.Uint16(raw[2*i:]))
		dst[i] = id
		top = max(top, id)
	}
	if top < b.vocab {
		return nil
	}
	for i, id := range dst {
		if id >= b.vocab {
			return fmt.Errorf("token %d is %d, not in a vocabulary of %d; another tokenizer made this file, or it is damaged", at+i, id, b.vocab)
		}
	}
	return nil
}

// Close releases the mapping and the file.
func (b *Bin) Close() error {
	var err error
	if b.unmap != nil {
		err = b.unmap()
	}
	b.raw, b.unmap, b.n = nil, nil, 0
	return errors.Join(err, b.file.Close())
}
