//go:build !unix

package data

import (
	"errors"
	"os"
)

// mapFile maps nothing: tokens are read from the file.
func mapFile(*os.File, int) ([]byte, func() error, error) {
	return nil, nil, errors.ErrUnsupported
}
