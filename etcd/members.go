package etcd

import (
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Members that join. The URL of Open names the members to use, and a cluster may replace them one by one. So a client
// that Open has made adds each member that joins later, at the address that it advertises.
//
// The addresses that members advertise may be unreachable from here: past a proxy, for example, or into a network of
// containers. So they are used only if the URL has an address as a member advertises it. A member that was there from
// the beginning and is not in the URL was left out on purpose, and stays out.

// membersInterval is the minimum time between two requests for the list of members.
const membersInterval = 10 * time.Second

// members are the endpoints of a client that Open has made. A nil *members follows no cluster: a driver that New made
// has it.
type members struct {
	client *clientv3.Client
	urls   []string // the endpoints of the URL of Open

	mu    sync.Mutex // protects the following fields
	asked time.Time  // when the list was requested last
	// The addresses that members advertised at first; nil until the first list.
	first  map[string]bool
	joined []string // the addresses of members that have joined since
}

func newMembers(client *clientv3.Client) *members {
	return &members{client: client, urls: client.Endpoints()}
}

// due reports whether the list is to be requested, which the caller then does.
func (m *members) due() bool {
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.asked) < membersInterval {
		return false
	}
	m.asked = time.Now()
	return true
}

// again makes the list due: the last request was not answered.
func (m *members) again() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = time.Time{}
}

// note records the list of voting members. A member that has not started yet advertises no address.
func (m *members) note(list []*pb.Member) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var advertised []string
	for _, member := range list {
		for _, raw := range member.ClientURLs {
			if u, err := url.Parse(raw); err == nil && u.Host != "" {
				advertised = append(advertised, strings.ToLower(u.Host))
			}
		}
	}
	if m.first == nil {
		m.first = map[string]bool{}
		for _, address := range advertised {
			m.first[address] = true
		}
	}
	var scheme string
	known := false
	for _, endpoint := range m.urls {
		if secure, address, ok := strings.Cut(endpoint, "://"); ok {
			scheme, endpoint = secure+"://", address
		}
		known = known || m.first[strings.ToLower(endpoint)]
	}
	joined := slices.DeleteFunc(advertised, func(address string) bool { return m.first[address] })
	slices.Sort(joined)
	if joined = slices.Compact(joined); !known || slices.Equal(joined, m.joined) {
		return
	}
	m.joined = joined
	endpoints := slices.Clone(m.urls)
	for _, address := range joined {
		endpoints = append(endpoints, scheme+address)
	}
	m.client.SetEndpoints(endpoints...)
}
