package data

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tandem-go/tandem/data/bpe"
	"github.com/tandem-go/tandem/internal/durable"
)

// The files that Prepare writes. The first two are nanoGPT's; the last says
// what their tokens mean.
const (
	TrainFile = "train.bin"
	ValFile   = "val.bin"
	MetaFile  = "meta.json"
)

// Meta is what MetaFile holds.
type Meta struct {
	// Version is 1.
	Version int `json:"version"`
	Vocab
	// TrainTokens and ValTokens are the lengths of the two files.
	TrainTokens int `json:"train_tokens"`
	ValTokens   int `json:"val_tokens"`
}

const (
	metaVersion  = 1
	maxMetaBytes = 8 << 20
)

// Prepare encodes the UTF-8 text file into dir, which is made: train.bin,
// val.bin (the last tenth of the characters) and meta.json. All three are on
// disk before the first gets its name; a reader sees the old ones, the new ones
// or an error. Memory is bounded whatever the size of the text.
func Prepare(ctx context.Context, file, dir string, o *Options) (*Meta, error) {
	opts, err := o.validate()
	if err != nil {
		return nil, err
	}
	var m *Meta
	err = withText(ctx, file, func(c *corpus) error {
		t, err := c.tokenizer(opts.Tokenizer)
		if err != nil {
			return err
		}
		if t.VocabSize() > maxBinVocab {
			return fmt.Errorf("a vocabulary of %d characters, but two bytes hold only %d; use --tokenizer %s", t.VocabSize(), maxBinVocab, GPT2Tokenizer)
		}
		m = &Meta{Version: metaVersion, Vocab: VocabOf(t)}
		return c.write(ctx, t, dir, m, opts.Progress)
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// write puts all files aside and then gives them their names.
func (c *corpus) write(ctx context.Context, t Tokenizer, dir string, m *Meta, progress func(done, total int64)) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var aside []string
	defer func() {
		for _, path := range aside {
			err = errors.Join(err, os.Remove(path+durable.Suffix))
		}
	}()
	put := func(name string, content func(io.Writer) error) error {
		path := filepath.Join(dir, name)
		err := durable.Aside(path, content)
		if err == nil {
			aside = append(aside, path)
		}
		return err
	}
	for i, name := range []string{TrainFile, ValFile} {
		count := []*int{&m.TrainTokens, &m.ValTokens}[i]
		err := put(name, func(w io.Writer) error {
			return c.encode(ctx, t, i == 1, func(ids []int32) error {
				*count += len(ids)
				return writeTokens(w, ids)
			}, progress)
		})
		if err != nil {
			return err
		}
	}
	if err := put(MetaFile, func(w io.Writer) error { return json.NewEncoder(w).Encode(m) }); err != nil {
		return err
	}
	// While there are new tokens beside an old description there is none.
	if err := os.Remove(filepath.Join(dir, MetaFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for len(aside) > 0 {
		if err := durable.Rename(aside[0]); err != nil {
			return err
		}
		aside = aside[1:]
	}
	return durable.SyncDir(dir)
}

func writeTokens(w io.Writer, ids []int32) error {
	raw := make([]byte, 0, 2*len(ids))
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint16(raw, uint16(id))
	}
	_, err := w.Write(raw)
	return err
}

// openPrepared opens what Prepare or nanoGPT wrote. path is the directory or
// the training part. tokenizer may be empty where there is a description.
func openPrepared(path, tokenizer string) (*Source, error) {
	dir, train := path, TrainFile
	if filepath.Ext(path) == ".bin" {
		dir, train = filepath.Split(path)
	}
	if train == ValFile {
		return nil, fmt.Errorf("%s is the validation part; pass the training part, %s", path, filepath.Join(dir, TrainFile))
	}
	m, err := readMeta(filepath.Join(dir, MetaFile), tokenizer)
	if err != nil {
		return nil, err
	}
	t, err := m.Open()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, MetaFile), err)
	}
	s := &Source{Tokenizer: t}
	for _, p := range []struct {
		name string
		want int
		seq  *Seq
	}{{train, m.TrainTokens, &s.Train}, {ValFile, m.ValTokens, &s.Val}} {
		b, err := OpenBin(filepath.Join(dir, p.name), m.Size)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.close = append(s.close, b.Close)
		*p.seq = b
		if m.Version > 0 && b.Len() != p.want {
			err := fmt.Errorf("%s has %d tokens, but %s beside it says %d: prepare the text again", b.path, b.Len(), MetaFile, p.want)
			return nil, errors.Join(err, s.Close())
		}
	}
	return s, nil
}

// readMeta reads a description, or assumes one for nanoGPT's files, which have
// none that can be read here. Version is 0 then.
func readMeta(path, tokenizer string) (*Meta, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && tokenizer == GPT2Tokenizer {
		m := &Meta{Vocab: Vocab{Tokenizer: tokenizer, Size: bpe.VocabSize}}
		return m, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no %s, which says what the tokens mean; if nanoGPT's prepare.py made them with GPT-2's encoding, pass --tokenizer %s", path, GPT2Tokenizer)
	}
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	defer f.Close()
	m, err := parseMeta(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if tokenizer != "" && tokenizer != m.Tokenizer {
		return nil, fmt.Errorf("%s: tokenizer %s made these tokens, not %s; leave --tokenizer out or prepare the text again", path, m.Tokenizer, tokenizer)
	}
	return m, nil
}

// parseMeta reads a description and checks what can be checked without the files.
func parseMeta(r io.Reader) (*Meta, error) {
	raw, err := io.ReadAll(io.LimitReader(r, maxMetaBytes+1))
	if err != nil {
		return nil, err
	}
	if len(raw) > maxMetaBytes {
		return nil, fmt.Errorf("more than %d MiB, which is no description of tokens", maxMetaBytes>>20)
	}
	m := &Meta{}
	if err := json.Unmarshal(raw, m); err != nil {
		return nil, err
	}
	switch {
	case m.Version != metaVersion:
		return nil, fmt.Errorf("version %d, want %d", m.Version, metaVersion)
	case m.Size < 1 || m.Size > maxBinVocab:
		return nil, fmt.Errorf("vocab_size %d, want 1 to %d", m.Size, maxBinVocab)
	case m.TrainTokens < 0 || m.ValTokens < 0:
		return nil, fmt.Errorf("train_tokens %d and val_tokens %d, want none below 0", m.TrainTokens, m.ValTokens)
	}
	return m, checkName(m.Tokenizer)
}
