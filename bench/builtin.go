package main

import (
	"context"
	"errors"
	"fmt"
)

// builtinSystem is the bundled server beside etcd: clusters of three, and the bundled server alone, durable and not.
// All of them run at the same time; who has nothing to do sends heartbeats only.
type builtinSystem struct {
	three, one, memory *fencelockSystem
	etcd               *etcdSystem
	binary             string
	clean              func() error // deletes the binary; nil before there is one
}

// newBuiltin returns the system without servers, whose peers can be opened at an address.
func newBuiltin() *builtinSystem {
	return &builtinSystem{
		three: &fencelockSystem{size: clusterSize}, one: &fencelockSystem{size: 1},
		memory: &fencelockSystem{size: 1, memory: true}, etcd: &etcdSystem{},
	}
}

func startBuiltin(ctx context.Context, _ string) (system, error) {
	s := newBuiltin()
	err := s.start(ctx)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *builtinSystem) start(ctx context.Context) (err error) {
	if s.binary, s.clean, err = fencelockBinary(ctx); err != nil {
		return err
	}
	for _, part := range []*fencelockSystem{s.three, s.one, s.memory} {
		if err := part.start(ctx, s.binary); err != nil {
			return err
		}
	}
	return s.etcd.startMembers(ctx, clusterSize)
}

// clusterSize is how many members the clusters have.
const clusterSize = 3

func (s *builtinSystem) name() string { return "builtin" }

func (s *builtinSystem) version() string {
	return fmt.Sprintf("%s (%d members; one; one in memory), %s (%d members)",
		s.three.version(), clusterSize, s.etcd.version(), clusterSize)
}

// peers implements system. Those of etcd come without our driver for it.
func (s *builtinSystem) peers() []peer {
	var all []peer
	for _, p := range s.etcd.peers() {
		if p.role != roleOurs {
			p.name, p.at = "etcd "+p.name, s.etcd
			all = append(all, p)
		}
	}
	for _, part := range []*fencelockSystem{s.three, s.one, s.memory} {
		all = append(all, part.peers()...)
	}
	return all
}

func (s *builtinSystem) parts() []system { return []system{s.three, s.one, s.memory, s.etcd} }

// addr, counters, erase and missing implement system for the cluster of the bundled server. All peers name a part.
func (s *builtinSystem) addr() string                                   { return s.three.addr() }
func (s *builtinSystem) counters(ctx context.Context) (counters, error) { return s.three.counters(ctx) }
func (s *builtinSystem) erase(ctx context.Context, key string) error    { return s.three.erase(ctx, key) }

func (s *builtinSystem) missing(ctx context.Context, keys []string) (int, error) {
	return s.three.missing(ctx, keys)
}

func (s *builtinSystem) reset(ctx context.Context) error {
	for _, part := range s.parts() {
		if err := part.reset(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *builtinSystem) pause() bool {
	for _, part := range s.parts() {
		if !part.pause() {
			return false
		}
	}
	return true
}

func (s *builtinSystem) resume() {
	for _, part := range s.parts() {
		part.resume()
	}
}

func (s *builtinSystem) close() error {
	var errs []error
	for _, part := range s.parts() {
		errs = append(errs, part.close())
	}
	if s.clean != nil {
		errs = append(errs, s.clean())
	}
	return errors.Join(errs...)
}
