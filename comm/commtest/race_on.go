//go:build race

package commtest

// raced says that the race detector is on: everything takes ten times as long
// and allocates.
const raced = true
