// Package kit is what every driver needs and nobody should write twice: the gate through which calls come in and Close
// waits for them, the check of requests, the classes of errors, the URL under which a driver is opened, the rule of who
// holds in a queue, and pauses. For drivers whose holds live on sessions of the service it keeps the sessions: which one
// to use, who uses it, when it has ended. It knows no service.
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
//		…
package kit

import (
	"context"

	"github.com/fencelock/fencelock/backend"
)

// Register makes a driver known under some URL schemes, see backend.Register. A driver's init calls it with its Open.
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
