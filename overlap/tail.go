package overlap

// Rows is to be called, in a step with a tail, after the last work that writes
// what the tail needs was enqueued on compute.
func (r *Reducer) Rows() error {
	if !r.Tails() {
		return nil
	}
	return r.compute.Record(r.cur.rows)
}

// Tails says that the step that has begun ends with Config.Tail: a synchronised
// one with collectives.
func (r *Reducer) Tails() bool { return r.cfg.Tail != nil && r.sync && r.schedule != NoComm }

func (r *Reducer) isLate(k int) bool { return r.cfg.Late != nil && r.cfg.Late[k] }

// late says that the tail, not its collective, completes bucket k.
func (r *Reducer) late(k int) bool { return r.Tails() && r.isLate(k) }

// tail enqueues the tail behind all collectives, and what the buckets that it
// completes have waited for.
func (r *Reducer) tail() error {
	if !r.Tails() {
		return nil
	}
	if err := r.comm.Wait(r.cur.rows); err != nil {
		return err
	}
	if err := r.cfg.Tail(r.comm); err != nil {
		return err
	}
	r.cur.tailed = true
	if err := r.comm.Record(r.cur.tail); err != nil {
		return err
	}
	for k := range r.buckets {
		if !r.late(k) {
			continue
		}
		if err := r.complete(k); err != nil {
			return err
		}
	}
	return nil
}
