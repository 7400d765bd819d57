//go:build !linux && !darwin

package main

import "os"

// hasSize can't be told here.
func hasSize(*os.File) bool { return true }
