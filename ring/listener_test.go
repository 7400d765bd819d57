package ring

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
)

// Without this a rank whose connection is turned away for want of room would
// find no trace of why.
func TestListenerSaysThatItIsFull(t *testing.T) {
	var text bytes.Buffer
	o := Options{Logger: slog.New(slog.NewTextHandler(&text, nil)), Secret: "s"}
	hello := func(rank int) auth.Hello { return auth.Hello{JobID: "job", Purpose: purpose, Rank: rank} }
	l, err := listen([]net.IP{net.IPv4(127, 0, 0, 1)}, &o, hello(0))
	if err != nil {
		t.Fatal(err)
	}
	a, b := net.Pipe()
	defer b.Close()
	l.mu.Lock()
	for i := range maxUnclaimed {
		l.arrived[connKey{connDirect, uint64(i), 1}] = a
	}
	l.mu.Unlock()
	c, err := dial(t.Context(), l.addrs(), &o, hello(1), connKey{connDirect, maxUnclaimed, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end", err)
	}
	l.close() // waits for whoever logs
	if s := text.String(); !strings.Contains(s, "4096 connections wait") || !strings.Contains(s, "rank=1") {
		t.Errorf("%q does not say why", s)
	}
}
