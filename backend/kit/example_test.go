package kit_test

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// driver is the part of a driver that keeps the leases of a service. All holds with one TTL live on one lease.
type driver struct {
	service  service
	gate     *kit.Gate
	sessions *kit.Sessions[time.Duration, *session]
}

type session struct {
	kit.Session
	ttl   time.Duration
	lease string // in the service
}

// sessionFor returns the session for ttl, of which the caller is a user until Leave.
func (d *driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	return d.sessions.Join(ctx, ttl, func() *session {
		return &session{Session: d.sessions.New(), ttl: ttl}
	}, func(s *session) {
		d.gate.Go(func(context.Context) { d.open(s) })
	})
}

// open asks for the lease, and keeps it alive while anybody needs it.
func (d *driver) open(s *session) {
	var err error
	s.lease, err = d.service.grant(s.ttl)
	if !d.sessions.Opened(s, err) {
		return
	}
	for kit.Sleep(d.gate.Closing(), s.ttl/3) == nil && !d.sessions.Retire(s, s.ttl) {
		if !d.service.prolong(s.lease) {
			d.sessions.End(s) // then its holders are notified
			return
		}
	}
	d.service.revoke(s.lease)
}

// service stands for one with leases.
type service struct{}

func (service) grant(ttl time.Duration) (lease string, err error) {
	return "lease of " + ttl.String(), nil
}
func (service) prolong(string) (lives bool) { return true }
func (service) revoke(string)               {}

func ExampleSessions() {
	d := &driver{gate: kit.NewGate(), sessions: kit.NewSessions[time.Duration, *session](backend.GoClock())}
	ctx := context.Background()
	one, _ := d.sessionFor(ctx, 30*time.Second)
	two, _ := d.sessionFor(ctx, 30*time.Second)
	other, _ := d.sessionFor(ctx, time.Minute)
	fmt.Println(one.lease, one == two)
	fmt.Println(other.lease)
	d.gate.Close()
	fmt.Println(d.gate.Wait(ctx))
	// Output:
	// lease of 30s true
	// lease of 1m0s
	// <nil>
}
