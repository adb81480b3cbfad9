package main

import (
	"context"
	"errors"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	fenceetcd "github.com/fencelock/fencelock/etcd"
)

func (s *etcdSystem) peers() []peer {
	return []peer{
		{name: "raw", role: roleFloor, open: openRawEtcd, sessions: openEtcdLeases, watch: watchRawEtcd},
		{name: "raw queue", role: roleFloor, waits: true, open: openQueueEtcd},
		{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, open: openOurEtcd,
			key: func(name string) string { return "fencelock/" + url.PathEscape(name) + "/" }},
		{name: "concurrency.Mutex", role: rolePeer, waits: true, open: openMutexEtcd,
			renewEvery: func(ttl time.Duration) time.Duration { return ttl / 3 },
			key:        func(name string) string { return name + "/" }},
	}
}

func openOurEtcd(o clientOptions) (client, error) {
	c, err := dialEtcd(o)
	if err != nil {
		return nil, err
	}
	return newOurs(fenceetcd.New(c, nil), o.ttl, func() { c.Close() })
}

// etcdSession is what both floors stand on: a client and a lease that the client's library keeps alive.
type etcdSession struct {
	c     *clientv3.Client
	s     *concurrency.Session
	count atomic.Uint64
}

func openEtcdSession(o clientOptions) (*etcdSession, error) {
	c, err := dialEtcd(o)
	if err != nil {
		return nil, err
	}
	s, err := concurrency.NewSession(c, concurrency.WithTTL(int(max(o.ttl, time.Second)/time.Second)))
	if err != nil {
		c.Close()
		return nil, err
	}
	return &etcdSession{c: c, s: s}, nil
}

func (e *etcdSession) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	e.c.Revoke(ctx, e.s.Lease())
	e.s.Orphan()
	e.c.Close()
}

// openRawEtcd is the floor without contention: a transaction that creates a key, and one that deletes it.
func openRawEtcd(o clientOptions) (client, error) {
	s, err := openEtcdSession(o)
	if err != nil {
		return nil, err
	}
	return rawEtcd{s}, nil
}

type rawEtcd struct{ *etcdSession }

// watchRawEtcd watches the key that is the lock.
func watchRawEtcd(ctx context.Context, c client, name string, seen func()) error {
	for resp := range c.(rawEtcd).c.Watch(ctx, name) {
		if err := resp.Err(); err != nil {
			return err
		}
		for range resp.Events {
			seen()
		}
	}
	return ctx.Err()
}

func (c rawEtcd) lock(ctx context.Context, name string) (hold, error) { return c.tryLock(ctx, name) }

func (c rawEtcd) tryLock(ctx context.Context, name string) (hold, error) {
	resp, err := c.c.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(name), "=", 0)).
		Then(clientv3.OpPut(name, "one-of-some-length-like-a-uuid", clientv3.WithLease(c.s.Lease()))).Commit()
	if err != nil {
		return nil, err
	}
	if !resp.Succeeded {
		return nil, errors.New("held")
	}
	return etcdKey{c.c, name, resp.Header.Revision}, nil
}

// etcdKey is a hold that is one key.
type etcdKey struct {
	c        *clientv3.Client
	key      string
	revision int64
}

func (h etcdKey) unlock(ctx context.Context) error {
	_, err := h.c.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(h.key), "=", h.revision)).
		Then(clientv3.OpDelete(h.key)).Commit()
	return err
}

func (h etcdKey) lost() <-chan struct{} { return nil }

// openQueueEtcd is the floor with contention: a FIFO of keys, each waiter watching the one before it from the current
// revision on, and reading once more when the watch stands. It does not prove its own key.
func openQueueEtcd(o clientOptions) (client, error) {
	s, err := openEtcdSession(o)
	if err != nil {
		return nil, err
	}
	return queueEtcd{s}, nil
}

type queueEtcd struct{ *etcdSession }

func (c queueEtcd) tryLock(context.Context, string) (hold, error) { return nil, errors.ErrUnsupported }

func (c queueEtcd) lock(ctx context.Context, name string) (hold, error) {
	dir := name + "/"
	key := dir + strconv.FormatInt(int64(c.s.Lease()), 16) + "-" + strconv.FormatUint(c.count.Add(1), 10)
	resp, err := c.c.Put(ctx, key, "", clientv3.WithLease(c.s.Lease()))
	if err != nil {
		return nil, err
	}
	own := etcdKey{c.c, key, resp.Header.Revision}
	for {
		before, err := c.c.Get(ctx, dir, append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(own.revision-1))...)
		if err != nil {
			return nil, c.leave(ctx, own, err)
		}
		if len(before.Kvs) == 0 {
			return own, nil
		}
		if err := c.gone(ctx, string(before.Kvs[0].Key), before.Kvs[0].CreateRevision); err != nil {
			return nil, c.leave(ctx, own, err)
		}
	}
}

// gone waits until a key is deleted.
func (c queueEtcd) gone(ctx context.Context, key string, revision int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for resp := range c.c.Watch(ctx, key, clientv3.WithFilterPut(), clientv3.WithCreatedNotify()) {
		if err := resp.Err(); err != nil {
			return err
		}
		if len(resp.Events) > 0 {
			return nil
		}
		now, err := c.c.Get(ctx, key)
		if err != nil {
			return err
		}
		if len(now.Kvs) == 0 || now.Kvs[0].CreateRevision != revision {
			return nil
		}
	}
	return ctx.Err()
}

func (c queueEtcd) leave(ctx context.Context, own etcdKey, err error) error {
	return errors.Join(err, own.unlock(context.WithoutCancel(ctx)))
}

// openMutexEtcd is the recipe of etcd's client, one session for all locks of the client: the expert's use.
func openMutexEtcd(o clientOptions) (client, error) {
	s, err := openEtcdSession(o)
	if err != nil {
		return nil, err
	}
	return mutexEtcd{s}, nil
}

type mutexEtcd struct{ *etcdSession }

func (c mutexEtcd) lock(ctx context.Context, name string) (hold, error) {
	m := concurrency.NewMutex(c.s, name)
	if err := m.Lock(ctx); err != nil {
		return nil, err
	}
	return mutexHold{m, c.s.Done()}, nil
}

func (c mutexEtcd) tryLock(ctx context.Context, name string) (hold, error) {
	m := concurrency.NewMutex(c.s, name)
	if err := m.TryLock(ctx); err != nil {
		return nil, err
	}
	return mutexHold{m, c.s.Done()}, nil
}

type mutexHold struct {
	m    *concurrency.Mutex
	done <-chan struct{}
}

func (h mutexHold) unlock(ctx context.Context) error { return h.m.Unlock(ctx) }
func (h mutexHold) lost() <-chan struct{}            { return h.done }
