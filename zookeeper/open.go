// This file opens drivers by URL.

package zookeeper

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

func init() { kit.Register(Open, "zk", "zookeeper", "zks") }

// Open connects to ZooKeeper and checks that the ensemble has a leader. Close closes the connections.
//
//	zk://[user:password@]host[:port][,host[:port]…][/chroot][?option=value&…]
//
// The scheme zookeeper is the same. The scheme zks, or any of the options ca, cert, key and server-name, selects TLS.
// Port 2181 is the default, also with TLS. User and password authenticate with the digest scheme. Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificate
//	password-file   a file with the password, in place of the URL's. Open reads it once: to ZooKeeper a user with
//	                another password is another user, who has no access to the nodes of the first
//	prefix          Options.KeyPrefix, /fencelock by default
//	tick            Options.Tick, the servers' tickTime: 2s by default
//	timeout         bounds the wait for the first connection, 5s by default
//
// It returns when the ensemble has answered, or with an error when the timeout or ctx ends; no connection stays open
// then. Errors wrap backend.ErrInvalidOption for an invalid URL, backend.ErrUnavailable if the ensemble does not
// answer, and backend.ErrMisconfigured if it refuses the user or has a longer tick.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	addrs, o, timeout, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	d := New(addrs, o)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := d.firstPing(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return d, nil
}

// firstPing repeats Ping until ctx ends while the ensemble is unavailable: servers that start or elect a leader refuse
// connections, or accept them and do not answer. The error is from the last attempt that ctx did not end.
func (d *Driver) firstPing(ctx context.Context) error {
	var reason error
	for {
		err := d.Ping(ctx)
		if !errors.Is(err, backend.ErrUnavailable) {
			return err
		}
		if ctx.Err() == nil || reason == nil {
			reason = err
		}
		if kit.Sleep(ctx, kit.RetryPause(spareTTL)) != nil {
			return reason
		}
	}
}

var syntax = kit.Syntax{
	Driver: driverName, Schemes: []string{"zk", "zookeeper"}, Secure: []string{"zks"}, Port: "2181",
	User: true, Path: true, Options: []string{"prefix", "tick"}, Timeout: 5 * time.Second,
}

// parseURL turns a URL into the arguments of New.
func parseURL(rawURL string) (addrs []string, o *Options, timeout time.Duration, err error) {
	u, err := syntax.ParseURL(rawURL)
	if err != nil {
		return nil, nil, 0, err
	}
	if strings.Contains(u.User, ":") || u.User == "" && u.Password != "" {
		why := errors.New("its user is empty or has a colon, which the digest scheme does not allow")
		return nil, nil, 0, u.Invalid(why)
	}
	o = &Options{User: u.User, Password: u.Password, TLS: u.TLS, KeyPrefix: u.Options.Get("prefix")}
	if u.Path != "" {
		o.Chroot = "/" + u.Path
	}
	if u.Options.Has("tick") {
		if o.Tick, err = u.Duration("tick"); err != nil {
			return nil, nil, 0, u.Invalid(err)
		}
	}
	return u.Addresses, o, u.Timeout, nil
}
