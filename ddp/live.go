package ddp

import (
	"fmt"
	"sync"
	"weak"

	"gorgonia.org/gorgonia"
)

// live are the parameter nodes of the DDPs of this process that are open. A node
// is bound to one memory, so a second DDP would take it away from the first,
// which would go on averaging what nobody reads. Nodes carry no mark of ours:
// this table, of weak pointers, is the only place to see it.
var live sync.Map // weak.Pointer[gorgonia.Node] → *DDP

// claim makes nodes d's until release, or fails when one is another's.
func (d *DDP) claim(nodes gorgonia.Nodes) error {
	for _, n := range nodes {
		if n == nil {
			continue // the engine says so
		}
		p := weak.Make(n)
		if owner, taken := live.LoadOrStore(p, d); taken && owner != d {
			return fmt.Errorf("parameter %q belongs to another DDP that is still open: wrap a model once, or Close the other first", n.Name())
		}
		d.claimed = append(d.claimed, p)
	}
	return nil
}

// release gives the nodes up.
func (d *DDP) release() {
	for _, p := range d.claimed {
		live.CompareAndDelete(p, d)
	}
	d.claimed = nil
}
