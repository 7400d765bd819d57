//go:build !race

package commtest

// raced says that the race detector is on.
const raced = false
