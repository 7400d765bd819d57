package ddp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// consentBytes is the length of what a rank says in consent: a flag and text.
const consentBytes = 512

// consent makes one rank's error everybody's, so that nobody goes on alone.
func (d *DDP) consent(ctx context.Context, s device.Stream, refused error) error {
	mine := make([]byte, consentBytes)
	if refused != nil {
		mine[0] = 1
		copy(mine[1:], refused.Error())
	}
	all, err := d.gather(ctx, s, mine, "consent")
	if refused != nil {
		return refused
	}
	if err != nil {
		return err
	}
	for r := range d.Size() {
		if m := all[r*consentBytes : (r+1)*consentBytes]; m[0] != 0 {
			return fmt.Errorf("rank %d refused: %s", r, bytes.TrimRight(m[1:], "\x00"))
		}
	}
	return nil
}

// compareAll compares options and layouts of all ranks.
func (d *DDP) compareAll(ctx context.Context, s device.Stream) error {
	err := d.compare(ctx, s, "options", []byte(d.opts.signature(lossType(d.plan))), func(a, b []byte) string {
		return fmt.Sprintf("%s, not %s", a, b)
	})
	if err != nil {
		return err
	}
	if err := d.compareBranches(ctx, s); err != nil {
		return err
	}
	err = d.compare(ctx, s, "list of buffers", []byte(d.describeBuffers()), func(a, b []byte) string {
		return fmt.Sprintf("%s, not %s", a, b)
	})
	if err != nil {
		return err
	}
	err = d.compare(ctx, s, "batch", []byte(d.describeSplits()), func(a, b []byte) string {
		return fmt.Sprintf("the embedding looks up %snot %sset WholeEmbeddings for batches that differ", a, b)
	})
	if err != nil {
		return err
	}
	return d.compare(ctx, s, "layout", d.layout.Encode(), diffLayouts)
}

// diffLayouts says where two encoded layouts differ.
func diffLayouts(a, b []byte) string {
	la, err1 := bucket.Decode(a)
	lb, err2 := bucket.Decode(b)
	if err := errors.Join(err1, err2); err != nil {
		return err.Error()
	}
	return bucket.Diff(la, lb)
}

// compareBranches compares the graphs where there are several; of one alone the
// layout says all there is to agree on.
func (d *DDP) compareBranches(ctx context.Context, s device.Stream) error {
	mine, err := d.describeBranches()
	if err != nil {
		return err
	}
	if len(d.branches) == 1 && !d.opts.FindUnused {
		mine = nil
	}
	return d.compare(ctx, s, "set of graphs", mine, func(a, b []byte) string {
		return fmt.Sprintf("gradients in the order %s, not %s", a, b)
	})
}

// compare fails on every rank when mine is not the same everywhere: hashes
// first, then, from rank 0 and the first rank that differs, the thing itself.
func (d *DDP) compare(ctx context.Context, s device.Stream, what string, mine []byte, diff func(a, b []byte) string) error {
	hash := sha256.Sum256(mine)
	const size = len(hash) + 8
	card := binary.NativeEndian.AppendUint64(hash[:], uint64(len(mine)))
	all, err := d.gather(ctx, s, card, what)
	if err != nil {
		return err
	}
	for r := range d.Size() {
		if bytes.Equal(all[r*size:(r+1)*size], all[:size]) {
			continue
		}
		theirs, err := d.fetch(ctx, s, r, all[r*size:], mine, what)
		if err != nil {
			return err
		}
		first, err := d.fetch(ctx, s, 0, all, mine, what)
		if err != nil {
			return err
		}
		return fmt.Errorf("%s of rank %d differs from that of rank 0: %s; every rank must build the same graph with the same options", what, r, diff(theirs, first))
	}
	return nil
}

// maxDocument bounds what a rank is believed to have to say, in bytes.
const maxDocument = 1 << 28

// fetch is what rank r compares, whose length card tells.
func (d *DDP) fetch(ctx context.Context, s device.Stream, r int, card, mine []byte, what string) ([]byte, error) {
	n := binary.NativeEndian.Uint64(card[sha256.Size:])
	if n > maxDocument {
		return nil, fmt.Errorf("%s of rank %d has %d bytes", what, r, n)
	}
	buf, host, err := hostMemory(d.comm, int(n))
	if err != nil {
		return nil, err
	}
	if r == d.Rank() {
		copy(host, mine)
	}
	if err := d.comm.Broadcast(s, buf, dtype.Uint8, r, comm.Tag{Name: what, Bucket: -1}); err != nil {
		return nil, err
	}
	return host, s.Sync(ctx)
}

// gather is what all ranks have in mine, which has one length everywhere.
func (d *DDP) gather(ctx context.Context, s device.Stream, mine []byte, what string) ([]byte, error) {
	src, out, err := hostMemory(d.comm, len(mine))
	if err != nil {
		return nil, err
	}
	dst, in, err := hostMemory(d.comm, len(mine)*d.Size())
	if err != nil {
		return nil, err
	}
	copy(out, mine)
	if err := d.comm.AllGather(s, dst, src, dtype.Uint8, comm.Tag{Name: what, Bucket: -1}); err != nil {
		return nil, err
	}
	return in, s.Sync(ctx)
}
