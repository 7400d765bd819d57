package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// lineHandler writes records as lines for people: the message, and its
// attributes behind it. Warnings say that they are.
type lineHandler struct {
	out   io.Writer
	level slog.Level
	attrs []slog.Attr
	mu    sync.Mutex
}

// Enabled passes what people should read.
func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

// Handle writes one line.
func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	if r.Level >= slog.LevelWarn {
		b.WriteString(strings.ToLower(r.Level.String()) + ": ")
	}
	b.WriteString(r.Message)
	attr := func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
		return true
	}
	for _, a := range h.attrs {
		attr(a)
	}
	r.Attrs(attr)
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := fmt.Fprintln(h.out, b.String())
	return err
}

// WithAttrs and WithGroup make it a slog.Handler; groups have no use here.
func (h *lineHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return &lineHandler{out: h.out, level: h.level, attrs: append(h.attrs[:len(h.attrs):len(h.attrs)], a...)}
}

// WithGroup ignores the name.
func (h *lineHandler) WithGroup(string) slog.Handler { return h }
