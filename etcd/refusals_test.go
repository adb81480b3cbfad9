package etcd_test

import (
	"context"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/etcd"
)

// TestConformanceWithRoles runs the clause of refused releases on a server that takes the right to write the keys of one
// name from its clients. A client that may not delete a key may not put it either, but a renewal puts no key.
func TestConformanceWithRoles(t *testing.T) {
	t.Parallel()
	way := dialers["New"]
	server := containers.Etcd(t)
	plain := newClient(t, server.Addr())
	const user, password, role = "app", "secret", "locks"
	const first, end = "\x00", "\xff" // every key
	const all, read = clientv3.PermissionType(clientv3.PermReadWrite), clientv3.PermissionType(clientv3.PermRead)
	containers.Within(func(ctx context.Context) error {
		if _, err := plain.UserAdd(ctx, "root", password); err != nil {
			return err
		}
		if _, err := plain.UserGrantRole(ctx, "root", "root"); err != nil {
			return err
		}
		if _, err := plain.RoleAdd(ctx, role); err != nil {
			return err
		}
		if _, err := plain.RoleGrantPermission(ctx, role, first, end, all); err != nil {
			return err
		}
		if _, err := plain.UserAdd(ctx, user, password); err != nil {
			return err
		}
		if _, err := plain.UserGrantRole(ctx, user, role); err != nil {
			return err
		}
		_, err := plain.AuthEnable(ctx)
		return err
	})(t)
	root := newClientAs(t, "root", password, server.Addr())
	h := harness(t, way, server, []string{server.Addr()}, nil)
	dial := func(t testing.TB, addr string) backend.Driver {
		return etcd.New(newClientAs(t, user, password, addr), nil)
	}
	h.New = func(t testing.TB) backend.Driver { return dial(t, server.Addr()) }
	h.Linked = func(t testing.TB) (backend.Driver, fault.Link) {
		addr, link := server.NewLink(t)
		return dial(t, addr), link
	}
	h.Server.RefuseRelease = func(t testing.TB, name string) func() {
		dir := way.dir(name)
		below := clientv3.GetPrefixRangeEnd(dir)
		// Roles have no denials: the role gets the ranges around the keys of the name in place of the whole.
		steps := func(steps ...func(context.Context) error) {
			for _, step := range steps {
				containers.Within(step)(t)
			}
		}
		grant := func(from, to string, what clientv3.PermissionType) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := root.RoleGrantPermission(ctx, role, from, to, what)
				return err
			}
		}
		revoke := func(from, to string) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := root.RoleRevokePermission(ctx, role, from, to)
				return err
			}
		}
		steps(grant(first, dir, all), grant(below, end, all), grant(dir, below, read), revoke(first, end))
		return func() { steps(grant(first, end, all), revoke(first, dir), revoke(below, end), revoke(dir, below)) }
	}
	h.Server.RefuseWrites = func(testing.TB, string) func() { return nil } // see TestConformance
	conformance.Run(t, h, "refusals")
}
