package launch

import (
	"bytes"
	"io"
	"os"
	"sync"
	"unicode/utf8"

	"github.com/tandem-go/tandem/internal/auth"
)

const (
	maxLine   = 64 << 10 // a longer line is forwarded in pieces
	tailLines = 20
	tailWidth = 500 // bytes of a line that the error report keeps
)

// redactor replaces the secret in a stream, also where it is cut by chunks.
type redactor struct {
	secret []byte
	held   []byte // the end of the stream so far, if it may begin the secret
}

var redacted = []byte(auth.Secret("x").String())

// feed returns what of the stream can be shown after p has come.
func (r *redactor) feed(p []byte) []byte {
	if len(r.secret) == 0 {
		return p
	}
	b := append(r.held, p...)
	b = bytes.ReplaceAll(b, r.secret, redacted)
	keep := 0
	for n := min(len(r.secret)-1, len(b)); n > 0; n-- {
		if bytes.HasSuffix(b, r.secret[:n]) {
			keep = n
			break
		}
	}
	show := b[:len(b)-keep]
	r.held = append([]byte(nil), b[len(b)-keep:]...)
	return show
}

// rest is what was held back when the stream ends.
func (r *redactor) rest() []byte { return r.held }

// lines splits a stream at \n, \r and \r\n.
type lines struct {
	part []byte
	cr   bool // the last byte was \r: an \n belongs to it
	emit func(line []byte)
}

func (l *lines) write(p []byte) {
	for len(p) > 0 {
		if l.cr && p[0] == '\n' {
			l.cr = false
			p = p[1:]
			continue
		}
		l.cr = false
		i := bytes.IndexAny(p, "\r\n")
		if i < 0 {
			l.part = append(l.part, p...)
			l.overflow()
			return
		}
		l.part = append(l.part, p[:i]...)
		l.overflow()
		l.cr = p[i] == '\r'
		if !l.cr || len(l.part) > 0 { // a bar returns to the margin without a word
			l.emit(l.part)
		}
		l.part = l.part[:0]
		p = p[i+1:]
	}
}

// overflow emits the beginning of a line that is too long, not inside a rune.
func (l *lines) overflow() {
	for len(l.part) > maxLine {
		n := maxLine
		for n > maxLine-utf8.UTFMax && !utf8.RuneStart(l.part[n]) {
			n--
		}
		l.emit(l.part[:n])
		l.part = append(l.part[:0], l.part[n:]...)
	}
}

func (l *lines) flush() {
	if len(l.part) > 0 {
		l.emit(l.part)
		l.part = l.part[:0]
	}
}

// logWriter copies a stream to the rank's log in whole lines: standard output
// and standard error share the file, and neither may land within a line of the
// other. Nothing is changed or left out.
type logWriter struct {
	to     *os.File // nil without a log
	part   []byte
	failed func(error) // called once
	dead   bool
}

func (l *logWriter) write(p []byte) {
	if l.to == nil {
		return
	}
	l.part = append(l.part, p...)
	if i := bytes.LastIndexAny(l.part, "\r\n"); i >= 0 {
		l.put(i + 1)
	} else if len(l.part) > maxLine {
		l.put(len(l.part))
	}
}

// flush writes what has no end of line.
func (l *logWriter) flush() { l.put(len(l.part)) }

func (l *logWriter) put(n int) {
	if n == 0 {
		return
	}
	if _, err := l.to.Write(l.part[:n]); err != nil && !l.dead {
		l.dead = true
		l.failed(err)
	}
	l.part = append(l.part[:0], l.part[n:]...)
}

// tail keeps the last lines of a stream.
type tail struct {
	mu    sync.Mutex
	lines []string
}

func (t *tail) add(line []byte) {
	if len(line) > tailWidth {
		line = append(append([]byte(nil), line[:tailWidth]...), " …"...)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == tailLines {
		t.lines = append(t.lines[:0], t.lines[1:]...)
	}
	t.lines = append(t.lines, string(bytes.ToValidUTF8(line, []byte("?"))))
}

func (t *tail) last() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.lines...)
}

// mux lets one rank write at a time, whole lines. Each destination is written
// with one call a line.
type mux struct {
	mu  sync.Mutex
	buf []byte
}

func (m *mux) line(w io.Writer, prefix string, line []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.buf = append(append(append(m.buf[:0], prefix...), line...), '\n')
	_, _ = w.Write(m.buf) // nobody is left to tell
}

func (m *mux) raw(w io.Writer, p []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _ = w.Write(p)
}
