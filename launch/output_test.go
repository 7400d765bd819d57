package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Without it a secret cut by a chunk's end would be shown, or output lost.
func TestRedactor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const secret = "aabaac"
		text := strings.Join(rapid.SliceOf(rapid.SampledFrom([]string{"a", "b", "x", "aab", secret})).Draw(t, "text"), "")
		r := &redactor{secret: []byte(secret)}
		var got strings.Builder
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "chunk")
			got.Write(r.feed([]byte(rest[:n])))
			rest = rest[n:]
		}
		got.Write(r.rest())
		require.Equal(t, strings.ReplaceAll(text, secret, "[redacted]"), got.String())
	})
}

// Without it lines would be cut, joined or lost, wherever chunks end.
func TestLines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOf(rapid.SampledFrom([]string{"a", "ä", "\n", "\r", "\r\n", strings.Repeat("x", maxLine), "ö€"})).Draw(t, "parts")
		text := strings.Join(parts, "")
		split := func(chunks func(rest string) int) (got []string) {
			l := &lines{emit: func(b []byte) { got = append(got, string(b)) }}
			for rest := text; rest != ""; {
				n := chunks(rest)
				l.write([]byte(rest[:n]))
				rest = rest[n:]
			}
			l.flush()
			return got
		}
		whole := split(func(rest string) int { return len(rest) })
		require.Equal(t, whole, split(func(rest string) int { return rapid.IntRange(1, len(rest)).Draw(t, "chunk") }))
		for _, l := range whole {
			require.LessOrEqual(t, len(l), maxLine)
			require.True(t, utf8.ValidString(l), "a rune was cut")
			require.False(t, strings.ContainsAny(l, "\r\n"))
		}
		require.Equal(t, strings.NewReplacer("\r", "", "\n", "").Replace(text), strings.Join(whole, ""))
	})
	var got []string
	l := &lines{emit: func(b []byte) { got = append(got, string(b)) }}
	l.write([]byte("a\n\nb\r\r\nc"))
	l.flush()
	require.Equal(t, []string{"a", "", "b", "c"}, got, "an empty line is a line, a bare return is none")
}

// Without it the report would be flooded, or lack the end.
func TestTail(t *testing.T) {
	var x tail
	for i := range 50 {
		x.add([]byte(strings.Repeat("y", i*20)))
	}
	last := x.last()
	require.Len(t, last, tailLines)
	require.Len(t, last[tailLines-1], tailWidth+len(" …"))
}

// Without it "killed" would not say that memory ran out, nor how much there was.
func TestMemoryHint(t *testing.T) {
	write := func(root, name, text string) {
		p := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		require.NoError(t, os.WriteFile(p, []byte(text), 0o600))
	}
	v2 := t.TempDir()
	write(v2, "proc/self/cgroup", "0::/a/b\n")
	write(v2, "sys/fs/cgroup/a/b/memory.peak", "3221225472\n")
	write(v2, "sys/fs/cgroup/a/b/memory.max", "4294967296\n")
	write(v2, "sys/fs/cgroup/a/b/memory.events", "low 0\noom 1\noom_kill 1\n")
	now := readMemory(v2)
	require.Equal(t, "possibly out of memory (cgroup peak 3.0 GiB, limit 4.0 GiB)", now.hint(now))
	require.Equal(t, "out of memory: the kernel killed it (cgroup peak 3.0 GiB, limit 4.0 GiB)", now.hint(memory{kills: 0}))

	v1 := t.TempDir()
	write(v1, "proc/self/cgroup", "5:cpu:/x\n4:memory:/elsewhere\n")
	write(v1, "sys/fs/cgroup/memory/memory.max_usage_in_bytes", "1073741824\n")
	write(v1, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
	now = readMemory(v1)
	require.Equal(t, "possibly out of memory (cgroup peak 1.0 GiB, no limit)", now.hint(now))
	require.Equal(t, "possibly out of memory", readMemory(t.TempDir()).hint(memory{}))
}
