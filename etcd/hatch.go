package etcd

import (
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// For callers who use etcd itself as the guard of their data in etcd: the driver's keys, as far as they are part of
// the API.

// Key returns the key in etcd that a hold stands on, without I/O, and "" for a request that this driver does not
// know. Later holds of the name may stand on the same key, with greater create revisions: so compare the revision
// too, as OwnerCmp does.
func (d *Driver) Key(g backend.Grant) string {
	if _, station, ok := strings.Cut(g.Incarnation, "@"); ok {
		return d.dir(g.Name) + use{g.Kind, g.Permits, g.Limit}.part() + station
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.requests[g.RequestID]
}

// OwnerCmp returns the comparison that is true while g is held: in the caller's own transaction it makes etcd itself
// the guard. It does no I/O, stays right when a renewal moves the hold, and may be used repeatedly.
//
//	grant := lease.Grant()
//	client.Txn(ctx).If(driver.OwnerCmp(grant)).Then(clientv3.OpPut("config", "new")).Commit()
//
// For the zero Grant and others that this driver did not issue, it is never true. Under a shared hold or permits others
// hold beside g, and may write too.
func (d *Driver) OwnerCmp(g backend.Grant) clientv3.Cmp {
	if revision := incarnation(g); revision > 0 {
		return created(d.Key(g), revision)
	}
	return created(d.spaceKey(), -1)
}
