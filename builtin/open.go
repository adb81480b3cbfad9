package builtin

// Open: the driver by URL.

import (
	"context"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend/kit"
)

func init() { kit.Register(Open, "fencelock", "fencelocks") }

// Open connects to a cluster and checks that it has a leader which most members follow. Close disconnects.
//
//	fencelock://host[:port][,host[:port]…][?option=value&…]
//
// The scheme fencelocks, or any of the options ca, cert, key and server-name, selects TLS. Port 7480 is the default.
// Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificates
//	timeout         bounds the wait for the first answer, 5s by default
//	under           holds of other processes, with commas between them: see Options.Under
//	credential      a file with a token, read for each connection: see Options.TokenFile. It needs TLS
//
// A bad URL is an error that wraps backend.ErrInvalidOption; a cluster that does not answer, backend.ErrUnavailable;
// a cluster of another protocol, backend.ErrMisconfigured; a cluster that does not know the token, backend.ErrDenied. A
// server that is not durable is no error: Describe reports it, and fencelock.ForCorrectness refuses it.
//
//	d, err := builtin.Open(ctx, "fencelocks://a:7480,b:7480,c:7480?ca=/etc/locks/ca.pem")
//	if err != nil {
//		return err
//	}
//	locks, err := fencelock.ForCorrectness(d, nil)
//
// ctx and timeout bound only the wait for the first answer; the driver outlives both.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	u, err := syntax.ParseURL(rawURL)
	if err != nil {
		return nil, err
	}
	o := &Options{TLS: u.TLS, TokenFile: u.Options.Get(credentialOption)}
	if err := checkToken(o); err != nil {
		return nil, u.Invalid(err)
	}
	if u.Options.Has(underOption) {
		o.Under = strings.Split(u.Options.Get(underOption), ",")
	}
	if err := checkUnder(o.Under); err != nil {
		return nil, u.Invalid(err)
	}
	d := New(u.Addresses, o)
	ctx, cancel := context.WithTimeout(ctx, u.Timeout)
	defer cancel()
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return d, nil
}

// syntax describes the URLs of Open and OpenAdmin.
var syntax = kit.Syntax{
	Driver: driverName, Schemes: []string{"fencelock"}, Secure: []string{"fencelocks"}, Port: "7480",
	Options: []string{underOption, credentialOption}, Timeout: 5 * time.Second,
}

const (
	underOption      = "under"
	credentialOption = "credential"
)
