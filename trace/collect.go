package trace

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const (
	maxPart     = 8 << 20   // bytes of a rank's part in the store, which takes no more
	maxUnpacked = 512 << 20 // bytes that a part may unpack to
)

// Collect aligns the clocks once more and merges the slices of all ranks at
// rank 0; the others return nil. All ranks call it. One part at a time is in
// the store. It ends when ctx does; rank 0 then returns what it has, without the
// rank that the error names and those behind it.
func Collect(ctx context.Context, s Store, r *Recorder) (*Timeline, error) {
	if r == nil {
		return nil, nil
	}
	aligned := r.Align(ctx, s)
	if r.opts.Rank != 0 {
		if aligned != nil {
			return nil, aligned
		}
		return nil, r.send(ctx, s)
	}
	parts := []*part{r.part()}
	err := aligned
	for k := 1; k < r.opts.Size && err == nil; k++ {
		var p *part
		if p, err = receive(ctx, s, k); err == nil {
			parts = append(parts, p)
		}
	}
	return merge(parts), err
}

func partKey(rank int, what string) string { return fmt.Sprintf("trace/part/%d/%s", rank, what) }

// send hands this rank's part over once rank 0 wants it.
func (r *Recorder) send(ctx context.Context, s Store) error {
	raw, err := pack(r.part(), maxPart)
	if err != nil {
		return fmt.Errorf("trace: rank %d: %w", r.opts.Rank, err)
	}
	want := partKey(r.opts.Rank, "want")
	if err := s.Wait(ctx, want); err != nil {
		return fmt.Errorf("trace: rank %d: waiting for rank 0 to want the timeline: %w", r.opts.Rank, err)
	}
	err = s.Set(ctx, partKey(r.opts.Rank, "data"), raw)
	if err == nil {
		err = s.Delete(ctx, want)
	}
	if err != nil {
		return fmt.Errorf("trace: rank %d: sending the timeline: %w", r.opts.Rank, err)
	}
	return nil
}

// pack drops the oldest slices until the part fits into limit bytes.
func pack(p *part, limit int) ([]byte, error) {
	for {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		if err := errors.Join(json.NewEncoder(z).Encode(p), z.Close()); err != nil {
			return nil, err
		}
		if b.Len() <= limit {
			return b.Bytes(), nil
		}
		n := (len(p.Slices) + 1) / 2
		if n == 0 {
			return nil, fmt.Errorf("a timeline of no slices takes %d bytes, at most %d fit", b.Len(), limit)
		}
		p.Slices, p.Dropped = p.Slices[n:], p.Dropped+n
	}
}

func receive(ctx context.Context, s Store, rank int) (*part, error) {
	data := partKey(rank, "data")
	err := s.Set(ctx, partKey(rank, "want"), []byte{1})
	if err == nil {
		err = s.Wait(ctx, data)
	}
	var raw []byte
	if err == nil {
		raw, err = s.Get(ctx, data)
	}
	if err == nil {
		err = s.Delete(ctx, data)
	}
	var p *part
	if err == nil {
		p, err = unpack(raw)
	}
	if err == nil && p.Rank != rank {
		err = fmt.Errorf("it is rank %d's", p.Rank)
	}
	if err != nil {
		return nil, fmt.Errorf("trace: getting the timeline of rank %d: %w", rank, err)
	}
	return p, nil
}

func unpack(raw []byte) (*part, error) {
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	p := &part{}
	if err := json.NewDecoder(io.LimitReader(z, maxUnpacked)).Decode(p); err != nil {
		return nil, err
	}
	return p, nil
}
