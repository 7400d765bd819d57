package asmsim

import (
	"math"
	"math/big"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// program parses one function f with a body, and data behind it.
func program(t *testing.T, args, body, data string) (*Program, error) {
	t.Helper()
	return Parse(map[string]string{"f.s": "TEXT ·f(SB), NOSPLIT, $0-" + args + "\n" + body + "\nRET\n" + data})
}

const one = "DATA c<>+0(SB)/4, $0x3f800000\nGLOBL c<>(SB), RODATA|NOPTR, $4\n"

// A kernel that strays must not pass: this is what bounds checks are for.
func TestFaults(t *testing.T) {
	load := "MOVQ p_base+0(FP), AX\n"
	for name, c := range map[string]struct{ body, want string }{
		"read behind":        {load + "VMOVUPS 4(AX), Y0", "28 bytes before the end of region 0 (32 bytes)"},
		"read before":        {load + "VMOVUPS -4(AX), Y0", "4 bytes before region 0"},
		"write behind":       {load + "VXORPS Y0, Y0, Y0\nVMOVUPS Y0, 8(AX)", "no memory of 32 bytes"},
		"masked in":          {load + "MOVQ $0x1ff, BX\nKMOVW BX, K1\nVMOVUPS.Z (AX), K1, Z0", "no memory of 4 bytes"},
		"write to constants": {"VXORPS X0, X0, X0\nVMOVSS X0, c<>+0(SB)", "no memory of 4 bytes"},
		"beyond arguments":   {"MOVQ p+24(FP), AX", "8 bytes at 24 of 24 bytes"},
	} {
		p, err := program(t, "24", c.body, one)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		func() {
			defer func() {
				if err, _ := recover().(error); err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: %v, want %q", name, err, c.want)
				}
			}()
			f, err := p.Func("f", reflect.TypeFor[func([]float32)]())
			if err != nil {
				t.Fatal(err)
			}
			f.Interface().(func([]float32))(make([]float32, 8))
		}()
	}
}

// What the interpreter doesn't know is refused when it reads it, not when a
// test happens to come by.
func TestParseRefuses(t *testing.T) {
	for name, c := range map[string]struct{ body, want string }{
		"unknown instruction": {"VPERMT2PS Z0, Z1, Z2", "unknown instruction"},
		"unknown suffix":      {"VADDPS.BCST (AX), Z1, Z2", "unknown instruction"},
		"operands":            {"VADDPS Z0, Z1, K1, Z2", "operands"},
		"no label":            {"JMP nowhere", "no label nowhere"},
		"no symbol":           {"VMOVSS d<>+0(SB), X0", "no symbol d"},
	} {
		if _, err := program(t, "0", c.body, one); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// Lanes that a mask excludes touch no memory and keep or clear the register, and
// narrow writes clear the upper lanes.
func TestMasksAndUpperLanes(t *testing.T) {
	p, err := program(t, "48", `
		MOVQ dst_base+0(FP), AX
		MOVQ src_base+24(FP), BX
		MOVQ $5, CX
		KMOVW CX, K1
		VBROADCASTSS c<>+0(SB), Z0
		VMOVUPS (BX), K1, Z0
		VMOVUPS Z0, (AX)
		VMOVUPS.Z (BX), K1, Z0
		VMOVUPS Z0, 64(AX)
		VBROADCASTSS c<>+0(SB), Z1
		VADDPS X1, X1, X1
		VMOVUPS Z1, 128(AX)`, one)
	if err != nil {
		t.Fatal(err)
	}
	f, err := p.Func("f", reflect.TypeFor[func(dst, src []float32)]())
	if err != nil {
		t.Fatal(err)
	}
	dst, want := make([]float32, 48), make([]float32, 48)
	f.Interface().(func(dst, src []float32))(dst, []float32{7, 8, 9})
	for i := range 16 {
		want[i] = 1
	}
	want[0], want[2], want[16], want[18] = 7, 9, 7, 9
	for i := range 4 {
		want[32+i] = 2
	}
	if !reflect.DeepEqual(dst, want) {
		t.Errorf("got %v, want %v", dst, want)
	}
}

// The multiply-add rounds once. Rounding twice goes wrong about once in 2^29.
func TestFMARoundsOnce(t *testing.T) {
	exact := func(x, y, z float32) float32 {
		p := new(big.Float).SetPrec(600).Mul(big.NewFloat(float64(x)), big.NewFloat(float64(y)))
		f, _ := p.Add(p.SetPrec(600), big.NewFloat(float64(z))).Float32()
		return f
	}
	check := func(t interface{ Fatalf(string, ...any) }, x, y, z float32) {
		got := math.Float32frombits(fma32(math.Float32bits(x), math.Float32bits(y), math.Float32bits(z)))
		if want := exact(x, y, z); got != want {
			t.Fatalf("%g·%g + %g = %g, want %g", x, y, z, got, want)
		}
	}
	// Halfway between two floats in float64, but for a bit that is lost there.
	check(t, 1+0x1p-12, 1+0x1p-12, 0x1p-60)
	check(t, 1+0x1p-12, 1+0x1p-12, -0x1p-60)
	check(t, 0x1p-100, 0x1p-49, 0x1p-149)
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.Float32Range(-1e6, 1e6)
		check(t, f.Draw(t, "x"), f.Draw(t, "y"), f.Draw(t, "z"))
	})
}

// Every float16 survives the way to float32 and back, and what lies between two
// of them goes to the nearer one, ties to even.
func TestHalves(t *testing.T) {
	for h := range 1 << 16 {
		x := widen16(uint16(h))
		if isNaN(x) {
			continue
		}
		if got := narrow16(x); got != uint16(h) {
			t.Fatalf("%#04x became %#04x", h, got)
		}
		f, next := math.Float32frombits(x), math.Float32frombits(widen16(uint16(h+1)))
		if h&0x7fff >= 0x7bff {
			continue // the largest and what follows it
		}
		mid := math.Float32bits(f + (next-f)/2)
		if got, want := narrow16(mid), uint16(h+h&1); got != want {
			t.Fatalf("halfway between %#04x and the next became %#04x", h, got)
		}
		if got := narrow16(mid + 1); got != uint16(h+1) {
			t.Fatalf("just above halfway from %#04x became %#04x", h, got)
		}
	}
}
