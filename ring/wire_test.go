package ring

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
)

func drawHeader(t *rapid.T) header {
	return header{
		call: comm.Call{
			Kind:  comm.Kind(rapid.IntRange(int(comm.KindAllReduce), int(comm.KindSplit)).Draw(t, "kind")),
			Op:    comm.Op(rapid.IntRange(0, int(comm.Prod)).Draw(t, "op")),
			Type:  dtype.Type(rapid.IntRange(0, int(dtype.Uint8)).Draw(t, "type")),
			Count: rapid.IntRange(0, 1<<56).Draw(t, "count"),
			Root:  rapid.IntRange(0, maxWorld-1).Draw(t, "root"),
			Tag:   comm.Tag{Bucket: rapid.IntRange(-1, math.MaxInt32).Draw(t, "bucket")},
		},
		algorithm:  uint8(rapid.IntRange(algoExchange, algoDirect).Draw(t, "algorithm")),
		job:        rapid.Uint64().Draw(t, "job"),
		generation: rapid.Uint64().Draw(t, "generation"),
		group:      rapid.Uint64().Draw(t, "group"),
		seq:        rapid.Uint64().Draw(t, "seq"),
		from:       rapid.IntRange(0, maxWorld-1).Draw(t, "from"),
	}
}

// Without this a field could be cut or lie where another begins: counts beyond
// 2³², negative buckets.
func TestHeaderRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHeader(t)
		var b [headerSize]byte
		h.marshal(b[:])
		got, err := parseHeader(b[:])
		if err != nil || got != h {
			t.Fatalf("%+v became %+v, %v", h, got, err)
		}
	})
}

// Without this two headers that differ could be taken for equal, or a
// difference be reported as something else than a disagreement or a stray.
func TestHeaderDisagrees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawHeader(t)
		got := want
		got.call.Count++
		got.call.Count %= 1 << 56
		var b [headerSize]byte
		got.marshal(b[:])
		err := want.disagree(0, b[:])
		if !errors.Is(err, comm.ErrMismatch) {
			t.Fatalf("other count: %v", err)
		}
		got = want
		got.generation++
		got.marshal(b[:])
		if err := want.disagree(0, b[:]); err == nil || errors.Is(err, comm.ErrMismatch) {
			t.Fatalf("other generation: %v", err)
		}
		got = want
		got.seq++
		got.marshal(b[:])
		if err := want.disagree(0, b[:]); !errors.Is(err, comm.ErrMismatch) || !strings.Contains(err.Error(), "seq") {
			t.Fatalf("other seq: %v", err)
		}
	})
}

// Without this bytes from outside could make the parser panic, or be accepted
// in two spellings.
func FuzzHeader(f *testing.F) {
	var b [headerSize]byte
	(&header{call: comm.Call{Kind: comm.KindAllReduce, Type: dtype.Float32, Count: 7}, algorithm: algoRing}).marshal(b[:])
	f.Add(b[:])
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		h, err := parseHeader(in)
		if err != nil {
			return
		}
		h.marshal(b[:])
		if !bytes.Equal(b[:], in) {
			t.Fatalf("% x was read as %+v, which is % x", in, h, b)
		}
	})
}

// Without this a message from outside could make a rank panic, allocate
// without bound, or be read as another.
func FuzzMessage(f *testing.F) {
	for _, m := range []message{
		{kind: msgHeartbeat}, {kind: msgBye}, {kind: msgQuery, group: 3}, {kind: msgStatus, group: 3, started: 9},
		{kind: msgReport, failure: &failure{code: codeMismatch, culprit: 1, tag: comm.Tag{Name: "b", Bucket: 2}, text: "why"}},
	} {
		f.Add(m.append(nil)[4:])
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := parseMessage(in)
		if err != nil {
			return
		}
		if out := m.append(nil)[4:]; !bytes.Equal(out, in) {
			t.Fatalf("% x was read as %+v, which is % x", in, m, out)
		}
	})
}

// Without this a rank could claim to be another in the first bytes after it
// has authenticated, or break the parser.
func FuzzAttach(f *testing.F) {
	f.Add(appendAttach(nil, connKey{connData, 7, 3}, 4))
	f.Fuzz(func(t *testing.T, in []byte) {
		k, to, err := parseAttach(in)
		if err == nil && !bytes.Equal(appendAttach(nil, k, to), in) {
			t.Fatalf("% x was read as %v to %d", in, k, to)
		}
	})
}

// Without this a verdict could lose its culprit, operation or wording on the
// way, or a long text break the message.
func TestFailureRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := &failure{
			code: code(rapid.IntRange(int(codeLost), int(codeEnd)-1).Draw(t, "code")), weak: rapid.Bool().Draw(t, "weak"),
			culprit: rapid.IntRange(-1, maxWorld-1).Draw(t, "culprit"), reporter: rapid.IntRange(0, maxWorld-1).Draw(t, "reporter"),
			kind: comm.Kind(rapid.IntRange(0, int(comm.KindSplit)).Draw(t, "kind")), group: rapid.Uint64().Draw(t, "group"),
			seq:  rapid.Uint64().Draw(t, "seq"),
			tag:  comm.Tag{Name: rapid.StringN(0, 50, 200).Draw(t, "name"), Bucket: rapid.IntRange(-1, 1<<30).Draw(t, "bucket")},
			text: strings.Repeat("x", rapid.IntRange(0, 2*maxText).Draw(t, "text")),
		}
		b := (&message{kind: msgVerdict, failure: f}).append(nil)
		m, err := readMessage(bytes.NewReader(b), make([]byte, maxMessage))
		if err != nil {
			t.Fatal(err)
		}
		f.text = f.text[:min(len(f.text), maxText)]
		if !reflect.DeepEqual(m.failure, f) {
			t.Fatalf("%+v became %+v", f, m.failure)
		}
	})
}

// Without this blocks could overlap, leave elements out, cut an element in two
// or wrap beyond 2³¹ and 2³² bytes.
func TestBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 64).Draw(t, "size")
		n := rapid.OneOf(rapid.IntRange(0, 5000), rapid.IntRange(1<<31-100, 1<<31+100),
			rapid.IntRange(1<<32-100, 1<<32+100), rapid.IntRange(1<<40, 1<<41)).Draw(t, "elements") * 8
		end := 0
		for b := range size {
			lo, hi := blockRange(n, size, b)
			if lo != end || hi < lo || lo%blockAlign != 0 && lo != n {
				t.Fatalf("block %d of %d in %d bytes is [%d, %d), the last ended at %d", b, size, n, lo, hi, end)
			}
			end = hi
		}
		if end != n {
			t.Fatalf("blocks end at %d of %d", end, n)
		}
	})
}
