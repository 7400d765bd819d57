package bucket

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/dtype"
)

// params makes float32 vectors of the given sizes in MiB.
func params(sizes ...float64) []Param {
	var ps []Param
	for i, s := range sizes {
		ps = append(ps, Param{Name: string(rune('a' + i)), Shape: []int{int(s * mib / 4)}, Type: dtype.Float32})
	}
	return ps
}

func groups(l *Layout) [][]int {
	var g [][]int
	for _, b := range l.Buckets {
		g = append(g, b.Params)
	}
	return g
}

func forward(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	return order
}

// Without it a change of the rule would shift every layout unnoticed; the first
// case is the one that PyTorch's documentation of the rule implies.
func TestAssignExact(t *testing.T) {
	f64 := params(0.25)
	f64[0].Type, f64[0].Name = dtype.Float64, "d"
	cases := map[string]struct {
		params []Param
		order  []int
		caps   Caps
		want   [][]int
	}{
		"1 and 25 MiB":             {params(0.5, 0.6, 30, 1), nil, Caps{First: mib, Cap: []int{25 * mib}}, [][]int{{0, 1}, {2}, {3}}},
		"production order":         {params(1, 30, 0.6, 0.5), []int{3, 2, 1, 0}, Caps{First: mib, Cap: []int{25 * mib}}, [][]int{{3, 2}, {1}, {0}}},
		"last value repeats":       {params(1, 1, 1, 1, 1, 1, 1), nil, Caps{First: mib, Cap: []int{2 * mib, mib}, Last: 9 * mib}, [][]int{{0}, {1, 2}, {3}, {4}, {5}, {6}}},
		"last kept small":          {params(1, 2, 2, 1), nil, Caps{First: mib, Cap: []int{9 * mib}, Last: mib}, [][]int{{0}, {1, 2}, {3}}},
		"last takes what fits":     {params(1, 2, 0.5, 0.5), nil, Caps{First: mib, Cap: []int{9 * mib}, Last: mib}, [][]int{{0}, {1}, {2, 3}}},
		"last never splits":        {params(1, 2, 5), nil, Caps{First: mib, Cap: []int{9 * mib}, Last: mib}, [][]int{{0}, {1}, {2}}},
		"everything in one":        {params(1, 2, 5), nil, One(), [][]int{{0, 1, 2}}},
		"one each":                 {params(1, 2, 5), []int{1, 0, 2}, Each(), [][]int{{1}, {0}, {2}}},
		"types never mix":          {append(params(1, 1), f64[0]), []int{2, 0, 1}, One(), [][]int{{2}, {0, 1}}},
		"ordered by completion":    {append(params(1, 1), f64[0]), []int{0, 2, 1}, One(), [][]int{{2}, {0, 1}}},
		"no parameter":             {nil, nil, Caps{}, nil},
		"zero elements ride":       {params(0, 1, 0), nil, Caps{First: mib, Cap: []int{mib}}, [][]int{{0, 1}, {2}}},
		"only zero elements":       {params(0, 0), nil, Caps{}, [][]int{{0, 1}}},
		"default of a small model": {params(1, 1, 1, 1, 1, 1, 1, 1), nil, Caps{}, [][]int{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			order := c.order
			if order == nil {
				order = forward(len(c.params))
			}
			l, err := Assign(c.params, order, c.caps)
			require.NoError(t, err)
			require.Equal(t, c.want, groups(l))
		})
	}
}

// Without it a wrong order or type would surface as a corrupted gradient.
func TestAssignRefuses(t *testing.T) {
	two := params(1, 1)
	for name, c := range map[string]struct {
		params []Param
		order  []int
		caps   Caps
		want   string
	}{
		"short order":    {two, []int{0}, Caps{}, "1 entries for 2 parameters"},
		"repeated order": {two, []int{1, 1}, Caps{}, "entry 1 is 1"},
		"out of range":   {two, []int{0, 2}, Caps{}, "entry 1 is 2"},
		"no type":        {[]Param{{Name: "w"}}, []int{0}, Caps{}, `0 "w" has no valid type`},
		"negative":       {[]Param{{Name: "w", Shape: []int{-1}, Type: dtype.Float32}}, []int{0}, Caps{}, "negative dimension"},
		"zero cap":       {two, []int{0, 1}, Caps{Cap: []int{1, 0}}, "cap 1 is 0 bytes"},
		"negative first": {two, []int{0, 1}, Caps{First: -1}, "first -1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Assign(c.params, c.order, c.caps)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// anything draws parameters of mixed types and sizes, zero elements among them,
// with a production order and caps.
func anything(t *rapid.T) ([]Param, []int, Caps) {
	n := rapid.IntRange(0, 40).Draw(t, "n")
	ps := make([]Param, n)
	for i := range ps {
		ps[i] = Param{
			Name:  rapid.StringN(0, 4, -1).Draw(t, "name"),
			Shape: rapid.SliceOfN(rapid.IntRange(0, 9), 0, 3).Draw(t, "shape"),
			Type:  rapid.SampledFrom(dtype.All()).Draw(t, "type"),
		}
	}
	order := rapid.Permutation(forward(n)).Draw(t, "order")
	caps := Caps{
		First: rapid.IntRange(0, 3000).Draw(t, "first"),
		Cap:   rapid.SliceOfN(rapid.IntRange(1, 9000), 0, 3).Draw(t, "cap"),
		Last:  rapid.IntRange(0, 3000).Draw(t, "last"),
	}
	return ps, order, caps
}

// Without it a layout could lose, overlap or mix gradients for some rare shape.
func TestAssignProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ps, order, caps := anything(t)
		l, err := Assign(ps, order, caps)
		require.NoError(t, err)
		position := make([]int, len(ps))
		for i, p := range order {
			position[p] = i
		}
		seen, last := make([]bool, len(ps)), -1
		for k, b := range l.Buckets {
			require.NotEmpty(t, b.Params)
			require.Zero(t, b.Bytes%Align)
			end := 0
			for _, p := range b.Params {
				require.False(t, seen[p], "parameter %d is in two buckets", p)
				seen[p] = true
				s := l.Slots[p]
				require.Equal(t, k, s.Bucket)
				require.Equal(t, b.Type, ps[p].Type, "types mixed")
				require.Equal(t, ps[p].Bytes(), s.Bytes)
				require.Zero(t, s.Offset%Align)
				require.GreaterOrEqual(t, s.Offset, end, "slots overlap")
				end = s.Offset + s.Bytes
			}
			require.LessOrEqual(t, end, b.Bytes)
			require.True(t, slices.IsSortedFunc(b.Params, func(a, b int) int { return position[a] - position[b] }))
			complete := position[b.Params[len(b.Params)-1]]
			require.Greater(t, complete, last, "buckets are not in completion order")
			last = complete
		}
		require.NotContains(t, seen, false)
	})
}

// Without it the caps could be ignored: no bucket goes on after reaching its
// cap, and the last one is within Caps.Last unless it is a single gradient.
func TestCapsProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ps, order, caps := anything(t)
		l, err := Assign(ps, order, caps)
		require.NoError(t, err)
		caps, err = caps.Resolve(ps, order)
		require.NoError(t, err)
		count := map[dtype.Type]int{}
		for k, b := range l.Buckets {
			bytes := 0
			for i, p := range b.Params {
				goesOn := i > 0 && bytes >= caps.at(count[b.Type])
				require.False(t, goesOn && k < len(l.Buckets)-1, "bucket %d goes on after its cap", k)
				bytes += ps[p].Bytes()
			}
			count[b.Type]++
			if k == len(l.Buckets)-1 && len(b.Params) > 1 {
				require.LessOrEqual(t, bytes, caps.Last)
			}
		}
	})
}

// Without it the promise in --help, at least 8 buckets by default, is only words,
// and the caps that are shown would not be those in use.
func TestDefaultCapGivesEightBuckets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// From a fraction of a percent to most of the model in one tensor.
		sizes := rapid.SliceOfN(rapid.IntRange(1, 1000), 1, 60).Draw(t, "sizes")
		var ps []Param
		for _, s := range sizes {
			ps = append(ps, Param{Shape: []int{s, 1 << 10}, Type: dtype.Float32})
		}
		order := rapid.Permutation(forward(len(ps))).Draw(t, "order")
		l, err := Assign(ps, order, Caps{})
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(l.Buckets), min(MinBuckets, len(ps)))
		caps, err := Caps{}.Resolve(ps, order)
		require.NoError(t, err)
		same, err := Assign(ps, order, caps)
		require.NoError(t, err)
		require.Equal(t, l.Hash(), same.Hash(), "caps %v are not those in use", caps)
	})
	require.Equal(t, 25*mib, DefaultCap(math.MaxInt))
	require.Equal(t, 1, DefaultCap(0))
	_, err := Caps{}.Resolve(params(1, 2), []int{0})
	require.Error(t, err)
}

// Without it ranks with different models would agree, or equal ones differ.
func TestHashAndDiff(t *testing.T) {
	base := func() *Layout {
		l, err := Assign(params(1, 2, 3), forward(3), Each())
		require.NoError(t, err)
		return l
	}
	require.Equal(t, base().Hash(), base().Hash())
	require.Empty(t, Diff(base(), base()))
	for want, change := range map[string]func([]Param) ([]Param, []int, Caps){
		`parameter 1 is "x" float32[524288], not "b" float32[524288]`: func(p []Param) ([]Param, []int, Caps) {
			p[1].Name = "x"
			return p, forward(3), Each()
		},
		`parameter 2 is "c" float64[786432], not "c" float32[786432]`: func(p []Param) ([]Param, []int, Caps) {
			p[2].Type = dtype.Float64
			return p, forward(3), Each()
		},
		`parameter 0 is "a" float32[2 131072], not "a" float32[262144]`: func(p []Param) ([]Param, []int, Caps) {
			p[0].Shape = []int{2, 131072}
			return p, forward(3), Each()
		},
		`2 parameters, fewer than 3: the first extra one is "c" float32[786432]`: func(p []Param) ([]Param, []int, Caps) {
			return p[:2], forward(2), Each()
		},
		`parameter 1 "b" lies in bucket 2 at offset 0, not in bucket 1 at offset 0`: func(p []Param) ([]Param, []int, Caps) {
			return p, []int{0, 2, 1}, Each()
		},
	} {
		ps, order, caps := change(params(1, 2, 3))
		l, err := Assign(ps, order, caps)
		require.NoError(t, err)
		require.Equal(t, want, Diff(l, base()))
		require.NotEqual(t, base().Hash(), l.Hash())
	}
}

// Without it the rank that differs could not be told how, or a broken peer could
// panic this one.
func FuzzDecode(f *testing.F) {
	l, err := Assign(params(1, 2), []int{1, 0}, Caps{})
	require.NoError(f, err)
	f.Add(l.Encode())
	f.Add([]byte(`{"Params":[{}],"Slots":[{},{}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := Decode(b)
		if err != nil {
			return
		}
		again, err := Decode(got.Encode())
		require.NoError(t, err)
		require.Empty(t, Diff(got, again))
		_ = Diff(got, l)
		_ = Diff(l, got)
	})
}

// Without it --bucket-cap-mb 0 or NaN would reach the arithmetic.
func TestMiB(t *testing.T) {
	got, err := MiB([]float64{25, 0.5, 1e-9})
	require.NoError(t, err)
	require.Equal(t, []int{25 * mib, mib / 2, 1}, got)
	for _, bad := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		_, err := MiB([]float64{1, bad})
		require.Error(t, err)
	}
}

// Without it a change of caps would mix parameters up, or leave old values
// between them.
func TestMove(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ps, order, caps := anything(t)
		from, err := Assign(ps, order, caps)
		require.NoError(t, err)
		to, err := Assign(ps, rapid.Permutation(order).Draw(t, "to"), Caps{Cap: []int{rapid.IntRange(1, 9000).Draw(t, "cap")}})
		require.NoError(t, err)
		arena := make([]byte, from.Bytes())
		for p, s := range from.Slots {
			for i := range s.Bytes {
				arena[from.offset(p)+i] = byte(1 + (p+i)%200)
			}
		}
		require.NoError(t, Move(arena, from, to))
		left := 0
		for p, s := range to.Slots {
			for i := range s.Bytes {
				require.Equal(t, byte(1+(p+i)%200), arena[to.offset(p)+i])
				arena[to.offset(p)+i] = 0
			}
		}
		for _, b := range arena {
			left += int(b)
		}
		require.Zero(t, left, "padding isn't zero")
	})
	a, err := Assign(params(1), []int{0}, Caps{})
	require.NoError(t, err)
	require.Error(t, Move(make([]byte, 8), a, a))
}
