package etcd

import (
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// Key returns the key in etcd that a hold stands on.
func (d *Driver) Key(g backend.Grant) string {
	return claim{kind: g.Kind, permits: g.Permits, limit: g.Limit}.keyIn(d.dir(g.Name), g.RequestID)
}

// OwnerCmp returns the comparison that is true as long as g is held: in the caller's own transaction it makes etcd
// itself the guard.
//
//	grant := lease.Grant()
//	client.Txn(ctx).If(driver.OwnerCmp(grant)).Then(clientv3.OpPut("config", "new")).Commit()
//
// For the zero Grant and others that this driver did not issue, it is never true. Under a shared hold or permits others
// hold beside g, and may write too.
func (d *Driver) OwnerCmp(g backend.Grant) clientv3.Cmp {
	revision := incarnation(g)
	if revision == 0 {
		revision = -1 // 0 would be true for a key that does not exist
	}
	return clientv3.Compare(clientv3.CreateRevision(d.Key(g)), "=", revision)
}
