package zookeeper_test

import (
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// A session is proved at "/", which not every user may read: that it is refused was agreed to by a majority all the
// same.
func TestUnreadableRoot(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	if err := admin.try(func() error {
		_, err := admin.SetACL("/", zk.WorldACL(zk.PermCreate|zk.PermDelete|zk.PermAdmin), -1)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	d := driver(t, server.Addr())
	g := take(t, d, request("x", false))
	sent := backend.SystemClock().Now()
	for ctx := soon(t, 20*time.Second); ; {
		r := d.Renew(ctx, []backend.Grant{g})[0]
		if r.Err != nil {
			t.Fatalf("Renew = %v", r.Err)
		}
		if r.SentAt >= sent {
			break
		}
	}
	if err := d.Release(soon(t, 10*time.Second), g); err != nil {
		t.Fatal(err)
	}
}
