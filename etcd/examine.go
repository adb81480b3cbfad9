package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/internal/doctor"
)

func init() { doctor.Register(examine, "etcd", "etcds") }

// examine asks every address of a URL separately: its member, leader, revision and token space. Members that have
// applied the same revision are compared by the hash of their keys.
func examine(ctx context.Context, rawURL string) (*doctor.Report, error) {
	config, o, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	addresses := slices.Clone(config.Endpoints)
	clients, revisions := make([]*clientv3.Client, len(addresses)), make([]int64, len(addresses))
	members := doctor.Ask(ctx, addresses, func(ctx context.Context, i int) (m doctor.Member, err error) {
		one := config
		one.Endpoints = addresses[i : i+1]
		if clients[i], err = clientv3.New(one); err != nil {
			return m, err
		}
		m, revisions[i], err = examineMember(ctx, clients[i], addresses[i], o.KeyPrefix)
		return m, err
	})
	for _, c := range clients {
		if c != nil {
			defer func() { _ = c.Close() }()
		}
	}
	r := &doctor.Report{Members: members}
	r.Problems = compareKeys(ctx, clients, members, revisions)
	return r, nil
}

// examineMember asks one member, and returns its revision, too.
func examineMember(ctx context.Context, c *clientv3.Client, address, prefix string) (m doctor.Member, revision int64, err error) {
	s, err := c.Status(ctx, address)
	if err != nil {
		return m, 0, err
	}
	m = doctor.Member{
		ID: fmt.Sprintf("member %x", s.Header.MemberId), Cluster: fmt.Sprintf("%x", s.Header.ClusterId), Version: s.Version,
		Position: fmt.Sprintf("revision %d, term %d", s.Header.Revision, s.RaftTerm), Role: doctor.Follower,
	}
	switch {
	case s.Leader == s.Header.MemberId:
		m.Role = doctor.Leader
	case s.IsLearner:
		m.Role = "learner"
	case s.Leader == 0:
		m.Problems = append(m.Problems, "knows no leader")
	}
	for _, alarm := range s.Errors {
		m.Problems = append(m.Problems, "has an alarm: "+alarm)
	}
	// A serializable read is the member's own. With authentication the user may lack the right.
	got, err := c.Get(ctx, cmp.Or(prefix, "fencelock/")+"+space", clientv3.WithSerializable())
	if err != nil {
		m.Facts = append(m.Facts, "token space not readable: "+err.Error())
		return m, s.Header.Revision, nil
	}
	if len(got.Kvs) > 0 {
		var v spaceValue
		if err := json.Unmarshal(got.Kvs[0].Value, &v); err != nil || v.Space == "" {
			m.Problems = append(m.Problems, fmt.Sprintf("has %.64q as the token space", got.Kvs[0].Value))
		}
		m.Space = v.Space
	}
	return m, s.Header.Revision, nil
}

// compareKeys compares the hashes of all keys at a revision that every member has. A user without the right to ask, or
// a compaction of just that revision, leaves it out.
func compareKeys(ctx context.Context, clients []*clientv3.Client, members []doctor.Member, revisions []int64) []string {
	var common int64
	for i := range members {
		if members[i].Err == nil && (common == 0 || revisions[i] < common) {
			common = revisions[i]
		}
	}
	type hash struct {
		sum   uint32
		since int64 // the compaction, before which keys do not count
	}
	hashes, since := map[hash][]string{}, map[int64]bool{}
	for i := range members {
		if members[i].Err != nil {
			continue
		}
		got, err := clients[i].HashKV(ctx, members[i].Address, common)
		if err != nil {
			return nil
		}
		h := hash{got.Hash, got.CompactRevision}
		hashes[h] = append(hashes[h], members[i].Address)
		since[h.since] = true
	}
	if len(hashes) < 2 || len(since) > 1 { // members that are compacted differently cannot be compared
		return nil
	}
	var parts []string
	for _, where := range hashes {
		parts = append(parts, strings.Join(where, ", "))
	}
	slices.Sort(parts)
	return []string{fmt.Sprintf("the keys at revision %d differ between %s: restore one of them from the others",
		common, strings.Join(parts, " and "))}
}
