//go:build !linux

package netns

import (
	"context"
	"net"
)

// Listen needs Linux.
func (n *Net) Listen(context.Context, int) (net.Listener, error) { return nil, ErrUnsupported }
