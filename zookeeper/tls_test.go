package zookeeper_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testcert"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestTLS speaks to a server through a proxy that ends TLS.
func TestTLS(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	authority := testcert.New(t)
	config := authority.Server(t, "zk.example")
	config.ClientAuth = tls.NoClientCert
	addr := testcert.Terminate(t, config, server.Addr())
	open := func(options string) (*zookeeper.Driver, error) {
		return zookeeper.Open(soon(t, 20*time.Second),
			fmt.Sprintf("zks://%s?timeout=20s&tick=%v&%s", addr, containers.ZooKeeperTick, options))
	}
	d, err := open("server-name=zk.example&ca=" + authority.File)
	if err != nil {
		t.Fatal(err)
	}
	g := take(t, d, request("over TLS", false))
	if r := d.Renew(soon(t, 10*time.Second), []backend.Grant{g})[0]; r.Err != nil {
		t.Errorf("Renew = %v", r.Err)
	}
	if err := d.Release(soon(t, 10*time.Second), g); err != nil {
		t.Errorf("Release = %v", err)
	}
	if err := d.Close(soon(t, 10*time.Second)); err != nil {
		t.Errorf("Close = %v", err)
	}

	var unknown x509.UnknownAuthorityError
	if _, err := open("server-name=zk.example"); !errors.Is(err, backend.ErrUnavailable) || !errors.As(err, &unknown) {
		t.Errorf("Open without the authority = %v, want ErrUnavailable for that reason", err)
	}
	var name x509.HostnameError
	if _, err := open("ca=" + authority.File); !errors.Is(err, backend.ErrUnavailable) || !errors.As(err, &name) {
		t.Errorf("Open of an address that the certificate does not have = %v, want ErrUnavailable for that reason", err)
	}
}

// TestTLSWithoutHandshake connects to a peer that accepts and never shakes hands.
func TestTLSWithoutHandshake(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	end := stallmeter.Late(t)
	_, err = zookeeper.Open(ctx, "zks://"+l.Addr().String())
	if !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("Open = %v, want ErrUnavailable", err)
	}
	end(5*time.Second, "Open with a context of 300 ms")
}
