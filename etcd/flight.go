package etcd

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// flight is a transaction that writes keys, until it is answered or attemptTime has passed. It outlives the call that
// began it.
type flight struct {
	done chan struct{} // closed at the end; the fields below are valid then
	resp *clientv3.TxnResponse
	err  error
}

// launch begins a transaction on keys.
func (d *Driver) launch(
	ctx context.Context, keys []string, cmps []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*flight, error) {
	f := &flight{done: make(chan struct{})}
	if err := d.enter(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	for _, key := range keys {
		d.flights[key] = f
	}
	d.mu.Unlock()
	go func() {
		defer d.gate.Leave()
		bounded, cancel := d.bounded(context.WithoutCancel(ctx))
		defer context.AfterFunc(d.ctx, cancel)()
		defer cancel()
		f.resp, f.err = d.commitHere(bounded, cmps, then, otherwise)
		d.mu.Lock()
		for _, key := range keys {
			if d.flights[key] == f {
				delete(d.flights, key)
			}
		}
		d.mu.Unlock()
		close(f.done)
	}()
	return f, nil
}

// landed waits for the end of the transaction on key that is under way, if there is one.
func (d *Driver) landed(ctx context.Context, key string) error {
	d.mu.Lock()
	f := d.flights[key]
	d.mu.Unlock()
	if f == nil {
		return nil
	}
	select {
	case <-f.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
