package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"
)

const (
	blockBytes = 1 << 20  // read at once while characters are counted
	chunkBytes = 64 << 10 // encoded at once
	wordBytes  = 1 << 20  // the longest stretch of text without a place to cut
	fraction   = 10       // one in so many characters validates
	maxRunes   = 0x10ffff + 1
)

// corpus is a text that is read in pieces, and what a first look at it says.
type corpus struct {
	r     io.ReaderAt
	bytes int64
	runes int64
	split int64  // byte at which the validation part begins
	chars []rune // that occur, ascending
}

// survey reads the text once for its characters and once up to the split.
// Text that is empty or not UTF-8 is an error.
func survey(ctx context.Context, r io.ReaderAt, bytes int64) (*corpus, error) {
	if bytes == 0 {
		return nil, errors.New("the text is empty; pass a UTF-8 text of at least some thousand characters")
	}
	c := &corpus{r: r, bytes: bytes}
	seen := make([]bool, maxRunes)
	err := c.blocks(ctx, func(at int64, p []byte) (bool, error) {
		for i := 0; i < len(p); {
			if b := p[i]; b < utf8.RuneSelf {
				seen[b] = true
				i++
				c.runes++
				continue
			}
			v, n := utf8.DecodeRune(p[i:])
			if v == utf8.RuneError && n == 1 {
				return false, fmt.Errorf("not UTF-8: byte %d is %#02x; convert the file, e.g. with iconv -t UTF-8", at+int64(i), p[i])
			}
			seen[v] = true
			i += n
			c.runes++
		}
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	for r, ok := range seen {
		if ok {
			c.chars = append(c.chars, rune(r))
		}
	}
	return c, c.findSplit(ctx)
}

// findSplit looks for the byte behind the first nine tenths of the characters.
func (c *corpus) findSplit(ctx context.Context) error {
	left := c.runes * (fraction - 1) / fraction
	return c.blocks(ctx, func(at int64, p []byte) (bool, error) {
		n := int64(utf8.RuneCount(p))
		if n <= left {
			left -= n
			c.split = at + int64(len(p))
			return left > 0, nil
		}
		i := 0
		for ; left > 0; left-- {
			_, n := utf8.DecodeRune(p[i:])
			i += n
		}
		c.split = at + int64(i)
		return false, nil
	})
}

// blocks calls f for consecutive pieces of whole characters until it returns
// false or an error.
func (c *corpus) blocks(ctx context.Context, f func(at int64, p []byte) (bool, error)) error {
	r := io.NewSectionReader(c.r, 0, c.bytes)
	buf := make([]byte, min(blockBytes, c.bytes))
	kept, at := 0, int64(0)
	for at+int64(kept) < c.bytes {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		n, err := io.ReadFull(r, buf[kept:min(int64(len(buf)), c.bytes-at)])
		if err != nil {
			return fmt.Errorf("reading at byte %d: %w", at, err)
		}
		p := buf[:kept+n]
		whole := len(p)
		if at+int64(len(p)) < c.bytes {
			whole -= partial(p)
		}
		more, err := f(at, p[:whole])
		if err != nil || !more {
			return err
		}
		kept = copy(buf, p[whole:])
		at += int64(whole)
	}
	return nil
}

// part says where the training or the validation part lies.
func (c *corpus) part(val bool) (from, n int64) {
	if val {
		return c.split, c.bytes - c.split
	}
	return 0, c.split
}

// encode passes the tokens of a part to emit, in order, in pieces that emit may
// not keep. Several chunks are encoded at once, few enough that memory stays
// bounded. Progress, unless nil, is told the bytes done of the whole text.
func (c *corpus) encode(ctx context.Context, t Tokenizer, val bool, emit func([]int32) error, progress func(done, total int64)) error {
	from, n := c.part(val)
	type result struct {
		ids   []int32
		err   error
		bytes int
	}
	queue := make(chan chan result, runtime.GOMAXPROCS(0))
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(queue)
		return chunks(io.NewSectionReader(c.r, from, n), t.Cut, func(text string) error {
			out := make(chan result, 1)
			select {
			case queue <- out:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			g.Go(func() error {
				ids, err := t.Encode(text)
				out <- result{ids, err, len(text)}
				return nil
			})
			return nil
		})
	})
	g.Go(func() error {
		at := from
		for out := range queue {
			r := <-out
			if r.err != nil {
				return fmt.Errorf("encoding at byte %d: %w", at, r.err)
			}
			if err := emit(r.ids); err != nil {
				return err
			}
			at += int64(r.bytes)
			if progress != nil {
				progress(at, c.bytes)
			}
		}
		return nil
	})
	return g.Wait()
}

// chunks passes r's text to f in pieces that end where cut allows.
func chunks(r io.Reader, cut func([]byte) int, f func(string) error) error {
	buf := make([]byte, 0, chunkBytes)
	for at := 0; ; {
		n, err := io.ReadFull(r, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			if len(buf) == 0 {
				return nil
			}
			return f(string(buf))
		}
		if err != nil {
			return fmt.Errorf("reading at byte %d: %w", at+len(buf), err)
		}
		n = cut(buf)
		if n == 0 {
			if cap(buf) >= wordBytes {
				return fmt.Errorf("no place to cut the text in %d MiB from byte %d on: a word that long is no text", wordBytes>>20, at)
			}
			buf = slices.Grow(buf, cap(buf))
			continue
		}
		if err := f(string(buf[:n])); err != nil {
			return err
		}
		at += n
		buf = buf[:copy(buf, buf[n:])]
	}
}
