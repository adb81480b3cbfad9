// Package kit has the parts that drivers share. It does not depend on a service. Every part can be used without the
// others:
//
//   - Gate counts calls, refuses them after Close, and lets Close wait for them and for their background work.
//   - Validate refuses requests that the driver cannot serve; Syntax reads the URL under which it is opened.
//   - CallError gives an error its class among the answers of package backend, with one safe default.
//   - Blockers and Holders are the rule of holders and waiters in a queue, for all kinds of hold.
//   - RetryPause and Sleep pause between repetitions, and return when the caller's context ends.
//   - Sessions, for drivers with sessions of the service, keeps the session to use, its users, and its end.
//
// A driver with the kit begins like this:
//
//	func init() { kit.Register(Open, "myservice", "myservices") }
//
//	func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
//		g, err := d.acquire(ctx, r)
//		return g, kit.CallError("myservice", "acquire", r.Name, err, classOf)
//	}
//
//	func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
//		if err := kit.Validate(d.Describe(), r); err != nil {
//			return backend.Grant{}, err
//		}
//		if err := d.gate.Enter(); err != nil {
//			return backend.Grant{}, err
//		}
//		defer d.gate.Leave()
//		bound, free := d.gate.Bind(ctx) // ends with ctx, and with Close
//		defer free()
//		…
//	}
//
//	func (d *Driver) Close(ctx context.Context) error {
//		if !d.gate.Close() {
//			return nil
//		}
//		err := d.gate.Wait(ctx)
//		…
//	}
//
// The kit does not speak to the service, keep a session alive there, or decide that a hold is lost: these steps
// differ from service to service, or belong to the core.
package kit

import (
	"context"

	"github.com/fencelock/fencelock/backend"
)

// Register makes a driver known under some URL schemes, see backend.Register. A driver's init calls it with its Open,
// which returns the driver's own type. When Open fails, the registered opener returns a nil interface and not a nil
// pointer in an interface, which callers would take for a driver.
func Register[D backend.Driver](open func(ctx context.Context, rawURL string) (D, error), schemes ...string) {
	for _, scheme := range schemes {
		backend.Register(scheme, func(ctx context.Context, rawURL string) (backend.Driver, error) {
			d, err := open(ctx, rawURL)
			if err != nil {
				return nil, err // and not a nil pointer in an interface
			}
			return d, nil
		})
	}
}
