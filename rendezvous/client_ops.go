package rendezvous

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
)

// Set implements Store.
func (c *Client) Set(ctx context.Context, key string, value []byte) error {
	if err := check(ctx, checkKey(key), checkValue(key, value)); err != nil {
		return err
	}
	_, err := c.do(ctx, opSet, func(b []byte) []byte { return putText(putText(b, key), value) })
	return c.wrap(err, "set", key)
}

// Get implements Store.
func (c *Client) Get(ctx context.Context, key string) ([]byte, error) {
	if err := check(ctx, checkKey(key)); err != nil {
		return nil, err
	}
	v, err := c.do(ctx, opGet, func(b []byte) []byte { return putText(b, key) })
	return v, c.wrap(err, "get", key)
}

// Wait implements Store.
func (c *Client) Wait(ctx context.Context, keys ...string) error {
	if len(keys) == 0 {
		return check(ctx)
	}
	if err := check(ctx, checkWait(keys)); err != nil {
		return err
	}
	_, err := c.do(ctx, opWait, func(b []byte) []byte {
		b = binary.BigEndian.AppendUint32(b, uint32(len(keys)))
		for _, k := range keys {
			b = putText(b, k)
		}
		return b
	})
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return waitError(ctx, keys)
	}
	return c.wrap(err, "wait for", keys[0])
}

// Add implements Store.
func (c *Client) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := check(ctx, checkKey(key)); err != nil {
		return 0, err
	}
	v, err := c.do(ctx, opAdd, func(b []byte) []byte {
		return binary.BigEndian.AppendUint64(putText(b, key), uint64(delta))
	})
	if err == nil && len(v) != 8 {
		err = errFrame
	}
	if err != nil {
		return 0, c.wrap(err, "add to", key)
	}
	return int64(binary.BigEndian.Uint64(v)), nil
}

// CompareAndSet implements Store.
func (c *Client) CompareAndSet(ctx context.Context, key string, old, new []byte) ([]byte, error) {
	if err := check(ctx, checkKey(key), checkSwap(key, old, new)); err != nil {
		return nil, err
	}
	v, err := c.do(ctx, opCAS, func(b []byte) []byte {
		return putText(putOptional(putText(b, key), old), new)
	})
	if err != nil {
		return nil, c.wrap(err, "compare-and-set", key)
	}
	p := &parser{b: v}
	got := optional(p)
	return got, c.wrap(p.end(), "compare-and-set", key)
}

// Delete implements Store.
func (c *Client) Delete(ctx context.Context, key string) error {
	if err := check(ctx, checkKey(key)); err != nil {
		return err
	}
	_, err := c.do(ctx, opDelete, func(b []byte) []byte { return putText(b, key) })
	return c.wrap(err, "delete", key)
}

// wrap names the operation, the key and the server.
func (c *Client) wrap(err error, what, key string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("store at %s: %s %q: %w", c.o.Addr, what, key, err)
}
