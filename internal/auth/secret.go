// Package auth lets two ends of a connection prove to one another that they
// know their job's secret, before a byte of what follows is believed.
package auth

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
)

// Secret is a job's shared secret. Formatting, logging or marshalling one
// yields a fixed word; Reveal is the only way to the value.
type Secret string

const redacted = "[redacted]"

// NewSecret returns 32 random bytes in hexadecimal.
func NewSecret() Secret {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return Secret(hex.EncodeToString(b[:]))
}

// Reveal is the value itself, for a child's environment.
func (s Secret) Reveal() string { return string(s) }

// String says whether there is a secret, never which.
func (s Secret) String() string {
	if s == "" {
		return "[none]"
	}
	return redacted
}

// GoString is String, for %#v.
func (s Secret) GoString() string { return s.String() }

// Format covers every other verb: %x and %q would otherwise show the value.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// LogValue keeps the value out of log/slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText keeps the value out of JSON and the like.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Loopback says whether both ends of c are on this machine, the only place
// where a job may go without a secret: a loopback address, one and the same
// address at both ends (which the kernel routes inside), or no network at all.
func Loopback(c net.Conn) bool {
	l, r := c.LocalAddr(), c.RemoteAddr()
	if a, ok := l.(*net.TCPAddr); ok {
		if b, ok := r.(*net.TCPAddr); ok && len(a.IP) > 0 && a.IP.Equal(b.IP) {
			return true
		}
	}
	return loopback(l) && loopback(r)
}

func loopback(a net.Addr) bool {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.IP.IsLoopback()
	case *net.UnixAddr:
		return true
	}
	return a != nil && a.Network() == "pipe"
}
