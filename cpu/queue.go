package cpu

import "github.com/tandem-go/tandem/device"

// itemKind says what an item of a stream's queue does.
type itemKind uint8

const (
	itemLaunch itemKind = iota
	itemHost
	itemCopy
	itemRecord
	itemWait
	itemStop
)

// item is one piece of work, a plain struct so that enqueuing allocates nothing.
type item struct {
	kind itemKind
	k    *kernel         // launch
	args []device.Buffer // launch
	host func() error    // host function
	dst  []byte          // copy
	src  []byte          // copy
	ev   *event          // record
	on   mark            // wait
}

// ring is a queue in a circular array that grows by doubling.
type ring struct {
	items []item
	head  int
	n     int
}

func (r *ring) push(it item) {
	if r.n == len(r.items) {
		grown := make([]item, max(64, 2*r.n))
		m := copy(grown, r.items[r.head:])
		copy(grown[m:], r.items[:r.head])
		r.items, r.head = grown, 0
	}
	r.items[(r.head+r.n)&(len(r.items)-1)] = it
	r.n++
}

// pop takes the oldest item; there must be one. Its slot forgets what it
// pointed to.
func (r *ring) pop() item {
	it := r.items[r.head]
	r.items[r.head] = item{}
	r.head = (r.head + 1) & (len(r.items) - 1)
	r.n--
	return it
}
