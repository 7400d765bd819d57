package launch

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// memory is what a Linux control group says of itself; -1 is unknown.
type memory struct {
	peak, limit int64 // bytes
	kills       int64 // processes killed for lack of memory
}

// readMemory reads the group of this process, in which its ranks are, too.
// root is "/", or a test's.
func readMemory(root string) memory {
	m := memory{-1, -1, -1}
	b, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return m
	}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		switch {
		case f[0] == "0" && f[1] == "":
			// Inside a container the path may be the host's: try the mount itself.
			for _, d := range []string{filepath.Join(root, "sys/fs/cgroup", f[2]), filepath.Join(root, "sys/fs/cgroup")} {
				if m.readV2(d); m.limit >= 0 || m.peak >= 0 {
					return m
				}
			}
		case f[1] == "memory":
			for _, d := range []string{filepath.Join(root, "sys/fs/cgroup/memory", f[2]), filepath.Join(root, "sys/fs/cgroup/memory")} {
				m.peak = number(filepath.Join(d, "memory.max_usage_in_bytes"))
				m.limit = number(filepath.Join(d, "memory.limit_in_bytes"))
				m.kills = field(filepath.Join(d, "memory.oom_control"), "oom_kill")
				if m.peak >= 0 {
					return m
				}
			}
		}
	}
	return m
}

func (m *memory) readV2(dir string) {
	m.peak = number(filepath.Join(dir, "memory.peak"))
	m.limit = number(filepath.Join(dir, "memory.max"))
	m.kills = field(filepath.Join(dir, "memory.events"), "oom_kill")
}

func number(file string) int64 {
	b, err := os.ReadFile(file)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1 // "max"
	}
	return n
}

func field(file, name string) int64 {
	f, err := os.Open(file)
	if err != nil {
		return -1
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if v, ok := strings.CutPrefix(s.Text(), name+" "); ok {
			if n, err := strconv.ParseInt(v, 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}

// hint says what a SIGKILL that nobody here sent may mean.
func (m memory) hint(before memory) string {
	s := "possibly out of memory"
	if before.kills >= 0 && m.kills > before.kills {
		s = "out of memory: the kernel killed it"
	}
	const gib = 1 << 30
	switch {
	case m.peak >= 0 && m.limit >= 0 && m.limit < 1<<60: // the old groups write "no limit" as a huge number
		s += fmt.Sprintf(" (cgroup peak %.1f GiB, limit %.1f GiB)", float64(m.peak)/gib, float64(m.limit)/gib)
	case m.peak >= 0:
		s += fmt.Sprintf(" (cgroup peak %.1f GiB, no limit)", float64(m.peak)/gib)
	}
	return s
}
