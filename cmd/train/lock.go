package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/rendezvous"
)

// lockFile is in the output directory while a job writes there, and after it.
const lockFile = ".lock"

// ownsFiles says that this process answers for what the job writes: the one that
// starts the ranks, or rank 0 of somebody else's.
func ownsFiles() bool {
	if launch.Launched() {
		return false
	}
	e, err := rendezvous.FromEnv(os.LookupEnv)
	return err == nil && (e.Source == rendezvous.SourceNone || e.Rank == 0)
}

// lockOut keeps other jobs out of dir until the file is closed, or the process
// ends, however that happens.
func lockOut(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		who, _ := os.ReadFile(f.Name())
		return nil, errors.Join(fmt.Errorf("--out %s: process %s is writing there; pass another directory, or wait for its end",
			dir, strings.TrimSpace(string(who))), f.Close())
	}
	if err != nil { // a file system without locks keeps nobody out
		return f, nil
	}
	if err := f.Truncate(0); err != nil {
		return nil, errors.Join(fmt.Errorf("--out: %w", err), f.Close())
	}
	if _, err := fmt.Fprintln(f, os.Getpid()); err != nil {
		return nil, errors.Join(fmt.Errorf("--out: %w", err), f.Close())
	}
	return f, nil
}

// probeFile proves that a file can be made at path, long before it is.
func probeFile(flag, path string) error {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return fmt.Errorf("%s: %s is a directory; pass the name of a file", flag, path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".probe-")
	if err != nil {
		return fmt.Errorf("%s: %w; pass a file in a directory that you can write to", flag, err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}
