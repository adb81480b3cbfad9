package etcd

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestEndpointsFollowMembers(t *testing.T) {
	t.Parallel()
	type list []string // the address of each member; "" for a member that has not started
	for what, c := range map[string]struct {
		urls, want []string
		lists      []list
	}{
		"nothing changes":                {[]string{"a:1", "b:2"}, []string{"a:1", "b:2"}, []list{{"a:1", "b:2"}, {"b:2", "a:1"}}},
		"a member joins":                 {[]string{"a:1"}, []string{"a:1", "b:2"}, []list{{"a:1"}, {"a:1", ""}, {"a:1", "b:2"}}},
		"all are replaced":               {[]string{"a:1"}, []string{"a:1", "b:2"}, []list{{"a:1"}, {"a:1", "b:2"}, {"b:2"}}},
		"a member joins and leaves":      {[]string{"a:1"}, []string{"a:1"}, []list{{"a:1"}, {"a:1", "b:2"}, {"a:1"}}},
		"a member that was left out":     {[]string{"a:1"}, []string{"a:1"}, []list{{"a:1", "b:2"}, {"a:1", "b:2"}}},
		"addresses that lead elsewhere":  {[]string{"proxy:1"}, []string{"proxy:1"}, []list{{"a:1"}, {"a:1", "b:2"}}},
		"TLS":                            {[]string{"https://A:1"}, []string{"https://A:1", "https://b:2"}, []list{{"a:1"}, {"a:1", "b:2"}}},
		"two members behind one address": {[]string{"a:1"}, []string{"a:1", "b:2"}, []list{{"a:1"}, {"a:1", "b:2", "b:2"}}},
	} {
		t.Run(what, func(t *testing.T) {
			client, err := clientv3.New(clientv3.Config{Endpoints: c.urls, Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			m := &members{client: client, urls: c.urls}
			for _, addresses := range c.lists {
				var all []*pb.Member
				for _, address := range addresses {
					member := &pb.Member{}
					if address != "" {
						member.ClientURLs = []string{"http://" + address}
					}
					all = append(all, member)
				}
				m.note(all)
			}
			if got := client.Endpoints(); !slices.Equal(got, c.want) {
				t.Errorf("the endpoints are %q, want %q", got, c.want)
			}
		})
	}
	if !new(members).due() || (*members)(nil).due() {
		t.Error("the list is requested first when it is due, and never of a client that New was given")
	}
}

// Two other members replace the only member of the URL, and the client continues with these.
func TestClientOutlivesTheMembersOfItsURL(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	containers.Etcd(t, containers.AsProcess()) // skips the test without etcd
	addrs := freeport.Addresses(t, 6)
	cluster := "m0=http://" + addrs[1]
	first := startMember(t, "m0", addrs[0], addrs[1], cluster, "new")
	d, err := Open(t.Context(), "etcd://"+addrs[0]+"?timeout=30s")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { // while the members run
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = d.Close(ctx)
	}()
	cycle := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		r := request("x", true)
		r.TTL = 10 * time.Second
		_, err := d.Acquire(ctx, r)
		return errors.Join(err, d.Release(ctx, r.Grant()))
	}
	for i, name := range []string{"m1", "m2"} {
		client, peer := addrs[2*i+2], addrs[2*i+3]
		eventually(t, "a member is added", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := d.service.client.MemberAdd(ctx, []string{"http://" + peer})
			return err == nil || isOneOf(err, rpctypes.ErrPeerURLExist)
		})
		cluster += "," + name + "=http://" + peer
		startMember(t, name, client, peer, cluster, "existing")
		joined := dial(t, client)
		eventually(t, "the member serves", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := joined.Get(ctx, "x")
			return err == nil
		})
		eventually(t, "the client uses the member", func() bool {
			d.service.members.again() // instead of membersInterval
			return cycle() == nil && slices.Contains(d.service.client.Endpoints(), client)
		})
	}
	admin := dial(t, addrs[2], addrs[4])
	eventually(t, "the first member is removed", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		all, err := admin.MemberList(ctx)
		if err != nil {
			return false
		}
		for _, m := range all.Members {
			if m.Name == "m0" {
				_, _ = admin.MemberRemove(ctx, m.ID)
				return false
			}
		}
		return true
	})
	first.Close()
	eventually(t, "the client goes on with the other members", func() bool { return cycle() == nil })
}
