package auth

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func soon() time.Time { return time.Now().Add(10 * time.Second) }

// shake runs both halves over a pipe and returns what each saw.
func shake(t testing.TB, cs, ss Secret, ch, sh Hello) (seenByClient, seenByServer Hello, cerr, serr error) {
	t.Helper()
	c, s := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		seenByServer, serr = Server(s, ss, sh, soon())
		if serr != nil {
			_ = s.Close()
		}
	}()
	seenByClient, cerr = Client(c, cs, ch, soon())
	if cerr != nil {
		_ = c.Close()
	}
	<-done
	return
}

// Without it two ranks of one job could not connect.
func TestBothSidesLearnTheOther(t *testing.T) {
	ch := Hello{"job", 3, "ring", 5}
	sh := Hello{"job", 3, "ring", 2}
	s := NewSecret()
	gotS, gotC, cerr, serr := shake(t, s, s, ch, sh)
	require.NoError(t, cerr)
	require.NoError(t, serr)
	require.Equal(t, sh, gotS)
	require.Equal(t, ch, gotC)
}

// Without it a process of another job, an old generation or another service
// could join, or a stranger without the secret.
func TestRefusals(t *testing.T) {
	base := Hello{"job", 1, "ring", 0}
	for name, tc := range map[string]struct {
		cs, ss Secret
		ch     Hello
		want   error
	}{
		"secret":     {"a", "b", base, ErrDenied},
		"no secret":  {"", "b", base, ErrDenied},
		"job":        {"a", "a", Hello{"other", 1, "ring", 0}, ErrForeign},
		"generation": {"a", "a", Hello{"job", 0, "ring", 0}, ErrForeign},
		"purpose":    {"a", "a", Hello{"job", 1, "store", 0}, ErrForeign},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, cerr, serr := shake(t, tc.cs, tc.ss, tc.ch, base)
			require.ErrorIs(t, cerr, tc.want)
			require.Error(t, serr)
		})
	}
}

// Without roles in the proof, a stranger could send a server's own proof back
// to it and be believed.
func TestReflectionFails(t *testing.T) {
	h := Hello{JobID: "job"}
	c, s := net.Pipe()
	done := make(chan error, 1)
	go func() { _, err := Server(s, "secret", h, soon()); _ = s.Close(); done <- err }()
	mine, err := opening(h)
	require.NoError(t, err)
	_, err = c.Write(mine)
	require.NoError(t, err)
	_, _, err = readOpening(c)
	require.NoError(t, err)
	proof := make([]byte, proofSize)
	_, err = io.ReadFull(c, proof)
	require.NoError(t, err)
	_, err = c.Write(proof)
	require.NoError(t, err)
	require.ErrorIs(t, <-done, ErrDenied)
	_ = c.Close()
}

// recorder keeps what was written, so that a test can replay it.
type recorder struct {
	net.Conn
	w bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) { r.w.Write(p); return r.Conn.Write(p) }

// Without fresh nonces a recorded exchange would open the door.
func TestReplayFails(t *testing.T) {
	h := Hello{JobID: "job"}
	c, s := net.Pipe()
	rec := &recorder{Conn: c}
	done := make(chan error, 1)
	go func() { _, err := Server(s, "secret", h, soon()); done <- err }()
	_, err := Client(rec, "secret", h, soon())
	require.NoError(t, err)
	require.NoError(t, <-done)

	c, s = net.Pipe()
	go func() { _, err := Server(s, "secret", h, soon()); _ = s.Close(); done <- err }()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	_, _ = c.Write(rec.w.Bytes())
	require.ErrorIs(t, <-done, ErrDenied)
	_ = c.Close()
}

// Without it a silent peer would block a rank for ever.
func TestDeadline(t *testing.T) {
	c, s := net.Pipe()
	defer s.Close()
	go func() { _, _ = io.Copy(io.Discard, s) }()
	_, err := Client(c, "secret", Hello{}, time.Now().Add(20*time.Millisecond))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

type farConn struct{ net.Conn }

func (farConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 9} }

// Without it gradients of a job without a secret could come from any host.
func TestNoSecretOnlyOnLoopback(t *testing.T) {
	c, s := net.Pipe()
	defer s.Close()
	_, err := Client(farConn{c}, "", Hello{}, soon())
	require.ErrorIs(t, err, ErrNoSecret)
	_, err = Server(farConn{c}, "", Hello{}, soon())
	require.ErrorIs(t, err, ErrNoSecret)
	_, _, cerr, serr := shake(t, "", "", Hello{}, Hello{})
	require.NoError(t, errors.Join(cerr, serr))
}

type ends struct {
	net.Conn
	l, r string
}

func (e ends) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.ParseIP(e.l), Port: 1} }
func (e ends) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(e.r), Port: 2} }

// Without it a job on one machine would need a secret when it meets at the
// machine's own name, or one on two machines would need none.
func TestLoopback(t *testing.T) {
	for _, tc := range []struct {
		l, r string
		want bool
	}{
		{"127.0.0.1", "127.0.0.1", true}, {"127.0.0.1", "127.0.1.1", true}, {"::1", "::1", true},
		{"10.0.0.1", "10.0.0.1", true}, {"10.0.0.1", "10.0.0.2", false}, {"10.0.0.1", "127.0.0.1", false}, {"", "", false},
	} {
		require.Equal(t, tc.want, Loopback(ends{nil, tc.l, tc.r}), tc)
	}
}

// Without it the secret would land in logs, errors and JSON files.
func TestSecretIsRedacted(t *testing.T) {
	s := Secret("hunter2")
	hex := fmt.Sprintf("%x", "hunter2")
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "secret", s, "in", struct{ S Secret }{s})
	j, err := json.Marshal(map[string]any{"s": s})
	require.NoError(t, err)
	all := fmt.Sprintf("%v %s %q %x %#v %+v %d", s, s, s, s, s, struct{ S Secret }{s}, s) + log.String() + string(j)
	require.NotContains(t, all, "hunter2")
	require.NotContains(t, strings.ToLower(all), hex)
	require.Contains(t, all, redacted)
	require.Equal(t, "hunter2", s.Reveal())
	require.Len(t, NewSecret().Reveal(), 64)
	require.NotEqual(t, NewSecret(), NewSecret())
}

// Without it a hello could come back as something else than was sent.
func TestHelloRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := Hello{
			JobID:      rapid.StringN(0, 60, maxText).Draw(t, "job"),
			Generation: rapid.IntRange(-5, 1<<40).Draw(t, "generation"),
			Purpose:    rapid.StringN(0, 60, maxText).Draw(t, "purpose"),
			Rank:       rapid.IntRange(-1, 1<<30).Draw(t, "rank"),
		}
		got, err := parseHello(h.marshal())
		require.NoError(t, err)
		require.Equal(t, h, got)
	})
	_, err := opening(Hello{JobID: strings.Repeat("x", maxText+1)})
	require.Error(t, err)
}

// Without it bytes from a stranger could crash a rank or make it allocate.
func FuzzOpening(f *testing.F) {
	good, _ := opening(Hello{"job", 1, "ring", 2})
	f.Add(good)
	f.Add([]byte(magic))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		raw, h, err := readOpening(bytes.NewReader(b))
		if err != nil {
			return
		}
		if !bytes.HasPrefix(b, raw) {
			t.Fatal("the proof would cover other bytes than were sent")
		}
		if !bytes.Equal(h.marshal(), raw[len(magic)+nonceSize+2:]) {
			t.Fatalf("%v has two encodings", h)
		}
	})
}
