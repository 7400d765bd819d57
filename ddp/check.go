package ddp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/tandem-go/tandem/overlap"
)

// ParamsDifferError says that ranks no longer hold the same parameters. All
// ranks get the same one, in the same step.
type ParamsDifferError struct {
	// Step is the number of synchronised steps after which it was noticed.
	Step int
	// Param is the first parameter, in the order given to New, that differs.
	Param string
	// Ranks are those whose values are not the ones that most ranks hold; where
	// two values are equally frequent, that of the lower rank counts as right.
	Ranks []int
}

func (e *ParamsDifferError) Error() string {
	return fmt.Sprintf("ddp: after step %d: parameter %q is not the same on all ranks: it differs on %v; "+
		"every rank must apply the same updates, and nothing else may change parameters", e.Step, e.Param, e.Ranks)
}

// isVerdict says that all ranks came to the same error by themselves, so nobody
// waits for this one.
func isVerdict(err error) bool {
	var nf *NonFiniteError
	var pd *ParamsDifferError
	var et *EarlyTerminationError
	return errors.As(err, &nf) || errors.As(err, &pd) || errors.As(err, &et)
}

// castagnoli is CRC-32C, which processors have an instruction for.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checkDue says whether parameters are compared in the step that begins: from
// counts and settings that all ranks share.
func (d *DDP) checkDue() bool {
	k := d.opts.CheckParams
	return k > 0 && d.step > 0 && d.step%k == 0 && !d.drifted
}

// hashParams puts the hash of the parameters, where one is due, in the header:
// 32 bits, which a float64 holds exactly.
func (d *DDP) hashParams() error {
	d.drifted = d.drifted || d.schedule == overlap.NoComm
	d.hash = 0
	if !d.checkDue() {
		return nil
	}
	// Updates of the step before may still be under way.
	if err := d.red.Sync(d.watch); err != nil {
		return err
	}
	d.takeTimes(d.step)
	all, err := d.paramHashes()
	if err != nil {
		return err
	}
	d.hash = float64(crc32.Checksum(all, castagnoli))
	return nil
}

// paramHashes is the checksum of each parameter, eight bytes each.
func (d *DDP) paramHashes() ([]byte, error) {
	d.hashes = d.hashes[:0]
	for p, b := range d.paramBufs {
		mem, ok := b.HostBytes()
		if !ok {
			return nil, fmt.Errorf("CheckParams: the memory of parameter %q cannot be read by the host", d.paramName(p))
		}
		d.hashes = binary.NativeEndian.AppendUint64(d.hashes, uint64(crc32.Checksum(mem, castagnoli)))
	}
	return d.hashes, nil
}

// sameParams compares what the headers say of the parameters.
func (d *DDP) sameParams() error {
	if !d.checkDue() {
		return nil
	}
	h := &d.header
	first, same := -1, true
	for r := range h.ranks {
		// With an external optimizer a rank without data misses updates until Join ends.
		if d.opt == nil && h.get(r, laneJoin) == joinDone {
			continue
		}
		if first < 0 {
			first = r
		}
		same = same && h.get(r, laneHash) == h.get(first, laneHash)
	}
	if same {
		return nil
	}
	return d.findDifference()
}

// findDifference is collective: it names the first parameter that differs.
func (d *DDP) findDifference() error {
	mine, err := d.paramHashes()
	if err != nil {
		return err
	}
	all, err := d.gather(d.watch, d.red.Comm(), mine, "parameter hashes")
	if err != nil {
		return err
	}
	of := func(r, p int) uint64 { return binary.NativeEndian.Uint64(all[len(mine)*r+8*p:]) }
	for p := range d.paramBufs {
		votes, best := map[uint64]int{}, 0
		for r := range d.Size() {
			votes[of(r, p)]++
			best = max(best, votes[of(r, p)])
		}
		right := 0
		for votes[of(right, p)] < best {
			right++
		}
		e := &ParamsDifferError{Step: d.step, Param: d.paramName(p)}
		for r := range d.Size() {
			if of(r, p) != of(right, p) {
				e.Ranks = append(e.Ranks, r)
			}
		}
		if e.Ranks != nil {
			return e
		}
	}
	return errors.New("the hashes of the parameters differ, and those of each parameter do not: parameters changed while they were compared")
}
