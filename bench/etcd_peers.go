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

	"github.com/fencelock/fencelock/backend"
	fenceetcd "github.com/fencelock/fencelock/etcd"
)

func (s *etcdSystem) peers() []peer {
	return []peer{
		{name: "raw", role: roleFloor, open: openRawEtcd, sessions: openEtcdLeases, watch: watchRawEtcd},
		{name: "raw queue", role: roleFloor, waits: true, open: openQueueEtcd},
		{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, open: openOurEtcd,
			key: func(name string) string { return "fencelock/+locks/" + url.PathEscape(name) + "/" }},
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
	return rawEtcd{library{s.create, s.close}, s.c}, nil
}

type rawEtcd struct {
	library
	c *clientv3.Client
}

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

func (e *etcdSession) create(ctx context.Context, name string) (hold, error) {
	resp, err := e.c.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(name), "=", 0)).
		Then(clientv3.OpPut(name, "one-of-some-length-like-a-uuid", clientv3.WithLease(e.s.Lease()))).Commit()
	if err != nil {
		return nil, err
	}
	if !resp.Succeeded {
		return nil, backend.ErrHeld
	}
	return e.key(name, resp.Header.Revision), nil
}

// key is a hold that is one key, if it still is the one of that revision.
func (e *etcdSession) key(key string, revision int64) untold {
	return func(ctx context.Context) error {
		_, err := e.c.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", revision)).
			Then(clientv3.OpDelete(key)).Commit()
		return err
	}
}

// openQueueEtcd is the floor with contention: a FIFO of keys, each waiter watching the one before it from the current
// revision on, and reading once more when the watch stands. It does not prove its own key.
func openQueueEtcd(o clientOptions) (client, error) {
	s, err := openEtcdSession(o)
	if err != nil {
		return nil, err
	}
	return library{s.queue, s.close}, nil
}

func (e *etcdSession) queue(ctx context.Context, name string) (hold, error) {
	dir := name + "/"
	key := dir + strconv.FormatInt(int64(e.s.Lease()), 16) + "-" + strconv.FormatUint(e.count.Add(1), 10)
	resp, err := e.c.Put(ctx, key, "", clientv3.WithLease(e.s.Lease()))
	if err != nil {
		return nil, err
	}
	own, revision := e.key(key, resp.Header.Revision), resp.Header.Revision
	for {
		before, err := e.c.Get(ctx, dir, append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(revision-1))...)
		if err == nil && len(before.Kvs) == 0 {
			return own, nil
		}
		if err == nil {
			err = e.gone(ctx, string(before.Kvs[0].Key), before.Kvs[0].CreateRevision)
		}
		if err != nil {
			return nil, errors.Join(err, own.unlock(context.WithoutCancel(ctx)))
		}
	}
}

// gone waits until a key is deleted.
func (e *etcdSession) gone(ctx context.Context, key string, revision int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for resp := range e.c.Watch(ctx, key, clientv3.WithFilterPut(), clientv3.WithCreatedNotify()) {
		if err := resp.Err(); err != nil {
			return err
		}
		if len(resp.Events) > 0 {
			return nil
		}
		now, err := e.c.Get(ctx, key)
		if err != nil {
			return err
		}
		if len(now.Kvs) == 0 || now.Kvs[0].CreateRevision != revision {
			return nil
		}
	}
	return ctx.Err()
}

// openMutexEtcd is the recipe of etcd's client, one session for all locks of the client: the expert's use.
func openMutexEtcd(o clientOptions) (client, error) {
	s, err := openEtcdSession(o)
	if err != nil {
		return nil, err
	}
	return library{end: s.close, take: func(ctx context.Context, name string) (hold, error) {
		m := concurrency.NewMutex(s.s, name)
		if err := m.Lock(ctx); err != nil {
			return nil, err
		}
		return told{m.Unlock, s.s.Done()}, nil
	}}, nil
}
