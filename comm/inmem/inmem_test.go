package inmem_test

import (
	"testing"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/commtest"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/device"
)

// Without this the backend that all tests of the floors above rest on could
// break any promise of comm.
func TestConformance(t *testing.T) {
	commtest.Run(t, func(t testing.TB, dev device.Device, n int, c commtest.Config) []comm.Communicator {
		all, err := inmem.New(dev, n, &inmem.Options{Timeout: c.Timeout})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}, 13, 16)
}
