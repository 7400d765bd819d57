// Package durable writes files that are whole or absent, whatever happens to
// the process or the machine meanwhile.
package durable

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// Suffix is that of a file which is still being written.
const Suffix = ".tmp"

// Write makes path whole or not at all: content goes to a file beside it, which
// is fsynced and renamed. What path held before is kept on an error.
func Write(path string, content func(io.Writer) error) error {
	if err := Aside(path, content); err != nil {
		return err
	}
	if err := Rename(path); err != nil {
		return errors.Join(err, os.Remove(path+Suffix))
	}
	return SyncDir(filepath.Dir(path))
}

// Aside does the first half of Write: content is on disk as path+Suffix. It
// removes that file on an error. Writers of several files that belong together
// put all of them aside before they Rename the first.
func Aside(path string, content func(io.Writer) error) error {
	f, err := os.Create(path + Suffix)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	w := bufio.NewWriterSize(f, 1<<20)
	err = content(w)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("writing %s: %w", path, err), os.Remove(f.Name()))
	}
	return nil
}

// Rename moves what Aside wrote to path. SyncDir makes it last.
func Rename(path string) error {
	if err := os.Rename(path+Suffix, path); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// SyncDir makes renames in dir survive a power failure, where the system can.
func SyncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // directories can't be synced there
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
