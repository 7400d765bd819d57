//go:build cgo

package tandem

const builtWithCgo = true
