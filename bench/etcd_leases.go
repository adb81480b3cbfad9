package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcdLeases are leases that are kept alive over one stream, as etcd's client does, but as often as the callers want.
type etcdLeases struct {
	c      *clientv3.Client
	ids    []clientv3.LeaseID
	number map[int64]int // in ids
	cancel context.CancelFunc
	reader sync.WaitGroup

	sending sync.Mutex
	stream  pb.Lease_LeaseKeepAliveClient

	alive []chan struct{} // by number; has room for one: the answer has come
	ended chan struct{}   // closed when the reader has
	err   error           // why; valid once ended is closed
}

var errLeaseEnded = errors.New("the lease has ended")

func openEtcdLeases(ctx context.Context, o clientOptions, n int) (sessions, error) {
	c, err := dialEtcd(o)
	if err != nil {
		return nil, err
	}
	s := &etcdLeases{
		c: c, ids: make([]clientv3.LeaseID, n), number: map[int64]int{}, alive: make([]chan struct{}, n), ended: make(chan struct{}),
	}
	streaming, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	err = each(n, func(i int) error {
		lease, err := c.Grant(ctx, int64(o.ttl.Seconds()))
		if err == nil {
			s.ids[i] = lease.ID
		}
		return err
	})
	if err == nil {
		s.stream, err = pb.NewLeaseClient(c.ActiveConnection()).LeaseKeepAlive(streaming)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	for i, id := range s.ids {
		s.number[int64(id)], s.alive[i] = i, make(chan struct{}, 1)
	}
	s.reader.Go(s.read)
	return s, nil
}

func (s *etcdLeases) read() {
	defer close(s.ended)
	for {
		answer, err := s.stream.Recv()
		if err == nil && answer.TTL <= 0 {
			err = fmt.Errorf("%x: %w", answer.ID, errLeaseEnded)
		}
		if err != nil {
			s.err = err
			return
		}
		s.alive[s.number[answer.ID]] <- struct{}{}
	}
}

func (s *etcdLeases) renew(ctx context.Context, i int) error {
	s.sending.Lock()
	err := s.stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(s.ids[i])})
	s.sending.Unlock()
	if err != nil {
		return err
	}
	select {
	case <-s.alive[i]:
		return nil
	case <-s.ended:
		return s.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *etcdLeases) close() {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	_ = each(len(s.ids), func(i int) error { // what is left ends with its TTL
		if s.ids[i] == 0 {
			return nil
		}
		_, err := s.c.Revoke(ctx, s.ids[i])
		return err
	})
	s.cancel()
	s.c.Close()
	s.reader.Wait()
}
