package tandem

import (
	"errors"
	"fmt"
	"path/filepath"
)

// ErrNoNCCL is in the chain when Backend is NCCL and this machine or this
// build can't.
var ErrNoNCCL = errors.New("tandem: backend nccl is not available")

// machine is what choosing a backend depends on.
type machine struct {
	gpus []string // device files of NVIDIA GPUs
	cgo  bool     // how this binary was built
}

func thisMachine() machine {
	gpus, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is well-formed
	return machine{gpus: gpus, cgo: builtWithCgo}
}

// choose returns the backend for a wish, and one line to tell people; loud
// says that it is a warning.
func (m machine) choose(wish string) (backend, line string, loud bool, err error) {
	why := m.whyNot()
	switch {
	case wish == Ring:
		return Ring, "", false, nil
	case wish == NCCL:
		return "", "", false, fmt.Errorf("%w: %s; use --backend ring", ErrNoNCCL, why)
	}
	return Ring, why + ": using the CPU", len(m.gpus) > 0, nil
}

// whyNot says what keeps this process from using GPUs.
func (m machine) whyNot() string {
	switch {
	case len(m.gpus) == 0:
		return "no NVIDIA GPU found (/dev/nvidia0)"
	case !m.cgo:
		return fmt.Sprintf("this machine has NVIDIA GPUs (%s), but this binary was built without cgo: "+
			"install a C compiler (apt install gcc) and build with CGO_ENABLED=1", m.gpus[0])
	}
	return fmt.Sprintf("this machine has NVIDIA GPUs (%s), but this version of tandem has no GPU backend", m.gpus[0])
}

// Accelerators says in one line what this machine has besides the CPU, and what
// keeps this process from using it.
func Accelerators() string { return thisMachine().whyNot() }
