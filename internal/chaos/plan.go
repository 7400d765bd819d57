package main

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"time"
)

// disturbance is what happens to a job.
type disturbance string

const (
	nothing    disturbance = "nothing"
	kill       disturbance = "kill"        // SIGKILL in a chosen phase of a step
	killTwo    disturbance = "kill-two"    // two ranks at once
	killJoin   disturbance = "kill-join"   // while ranks still meet
	pauseShort disturbance = "pause-short" // SIGSTOP and SIGCONT before any clock ends
	pauseLong  disturbance = "pause-long"  // SIGSTOP until the others have given up
	skip       disturbance = "skip"        // a rank lives, but launches no more
	mismatch   disturbance = "mismatch"    // a rank calls something else
	abort      disturbance = "abort"       // a rank calls Abort
	leave      disturbance = "leave"       // a rank closes its communicator
	strangers  disturbance = "strangers"   // garbage, silence and slow bytes at every port
	impostors  disturbance = "impostors"   // wrong secret, other job, old generation

	// In network namespaces.
	slowLink disturbance = "slow-link" // slower than the job would like, and nothing else
	linkDown disturbance = "link-down" // a host is cut off
	linkFlap disturbance = "link-flap" // and comes back before any clock ends
)

var disturbances = []disturbance{nothing, kill, kill, killTwo, killJoin, pauseShort, pauseLong, skip, mismatch, abort, leave, strangers, impostors}

var netDisturbances = []disturbance{slowLink, linkDown, linkDown, linkFlap}

// phase is where in a step the victim acts, on its bucket.
type phase int

const (
	beforeQueue phase = iota
	afterQueue        // its collective is queued, or runs
	inFlight          // a moment later
	afterStep
	phases
)

// round is one job and its disturbance; everything in it follows from a seed.
type round struct {
	Seed      uint64
	What      disturbance
	Size      int
	Victims   []int
	Transport string
	Buckets   []int // elements of each
	Steps     int
	// Step, Bucket and Phase are when victims act; Delay is how long after that
	// they die in flight, or how long a pause or the wait before it is.
	Step, Bucket int
	Phase        phase
	Delay        time.Duration
	// The clocks.
	Heartbeat, DeadAfter, Timeout time.Duration
}

// draw makes the round of a seed, of one of the disturbances that only admits.
func draw(seed uint64, among []disturbance, only *regexp.Regexp) (round, error) {
	rng := rand.New(rand.NewPCG(seed, 1))
	var can []disturbance
	for _, d := range among {
		if only == nil || only.MatchString(string(d)) {
			can = append(can, d)
		}
	}
	if len(can) == 0 {
		return round{}, fmt.Errorf("-run %v matches none of %v", only, among)
	}
	r := round{Seed: seed, What: can[int(seed%uint64(len(can)))], Size: 2 + rng.IntN(3), Steps: 12,
		Transport: []string{"auto", "tcp"}[rng.IntN(2)],
		Heartbeat: 200 * time.Millisecond, DeadAfter: 2500 * time.Millisecond, Timeout: 8 * time.Second}
	for range 2 + rng.IntN(4) {
		r.Buckets = append(r.Buckets, []int{1, 1000, 30_000, 300_000}[rng.IntN(4)])
	}
	r.Victims = []int{rng.IntN(r.Size)}
	r.Step, r.Bucket, r.Phase = 1+rng.IntN(r.Steps-2), rng.IntN(len(r.Buckets)), phase(rng.IntN(int(phases)))
	r.Delay = time.Duration(rng.IntN(3000)) * time.Microsecond
	r.last(rng)
	return r, nil
}

// last settles what depends on the disturbance.
func (r *round) last(rng *rand.Rand) {
	if slices.Contains(netDisturbances, r.What) { // 200 Mbit/s carry 300 steps of these in time
		for i := range r.Buckets {
			r.Buckets[i] = min(r.Buckets[i], 30_000)
		}
	}
	switch r.What { // what comes from outside needs a job that lasts
	case pauseShort, strangers, impostors, linkFlap:
		r.Steps = 300
	case linkDown: // of two, nobody could say who is cut off
		r.Size, r.Steps = 3+rng.IntN(2), 5000
	case pauseLong:
		r.Steps = 5000
	case killTwo:
		r.Size = max(r.Size, 3)
		v := rng.IntN(r.Size)
		r.Victims = []int{v, (v + 1 + rng.IntN(r.Size-1)) % r.Size}
	case killJoin: // which may be over before the delay is
		r.Steps = 5000
		r.Delay = time.Duration(rng.IntN(80)) * time.Millisecond
		r.Timeout = 3 * time.Second
	case skip:
		r.Timeout = 1500 * time.Millisecond
	}
	if r.What == pauseShort || r.What == linkFlap {
		r.Delay = time.Duration(50+rng.IntN(400)) * time.Millisecond
	}
}

func (r *round) String() string {
	s := fmt.Sprintf("seed %d: %s, %d ranks over %s, buckets %v", r.Seed, r.What, r.Size, r.Transport, r.Buckets)
	if r.What != nothing && r.What != slowLink && r.What != strangers && r.What != impostors {
		s += fmt.Sprintf(", rank %v at step %d bucket %d phase %d after %v", r.Victims, r.Step, r.Bucket, r.Phase, r.Delay)
	}
	return s
}

func (r *round) victim(rank int) bool { return slices.Contains(r.Victims, rank) }

// ends says whether the job is to reach its last step.
func (r *round) ends() bool {
	switch r.What {
	case nothing, pauseShort, strangers, impostors, slowLink, linkFlap:
		return true
	}
	return false
}
