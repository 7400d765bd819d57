package cpu

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/device/devicetest"
	"github.com/tandem-go/tandem/internal/simd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open starts a device that is closed with the test.
func open(t testing.TB, o *Options) *Device {
	t.Helper()
	d, err := New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// Without it streams and events could break any promise of package device.
func TestConformance(t *testing.T) {
	for _, threads := range []int{1, 3} {
		t.Run(fmt.Sprint(threads), func(t *testing.T) {
			devicetest.Run(t, func(t *testing.T) device.Device { return open(t, &Options{Threads: threads}) })
		})
	}
}

// Without it Close could leave goroutines behind.
func TestCloseLeaksNothing(t *testing.T) {
	before := goleak.IgnoreCurrent()
	d, err := New(&Options{Threads: 3})
	require.NoError(t, err)
	for range 3 {
		_, err := d.NewStream(device.High)
		require.NoError(t, err)
	}
	require.NoError(t, d.Close())
	goleak.VerifyNone(t, before)
}

// Without it a mistyped option would be taken for something else.
func TestOptions(t *testing.T) {
	for _, o := range []Options{{Threads: -1}, {Threads: maxThreads + 1}, {ISA: "mmx"}} {
		_, err := New(&o)
		require.Error(t, err, "%+v", o)
	}
	d := open(t, nil)
	require.Equal(t, AllowedCores(), d.Threads())
	for _, isa := range simd.Supported() {
		d := open(t, &Options{Threads: 1, ISA: isa.String()})
		require.Equal(t, "cpu (1 thread, "+isa.String()+")", d.Name())
	}
	_, err := d.NewStream(device.High + 1)
	require.Error(t, err)
}
