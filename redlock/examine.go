package redlock

import (
	"context"

	"github.com/fencelock/fencelock/internal/doctor"
)

func init() { doctor.Register(examine, "redlock", "redlocks") }

// examine asks every server of a URL. They are independent: two addresses of one server, or of a primary and its
// replica, would count one vote twice.
func examine(ctx context.Context, rawURL string) (*doctor.Report, error) {
	u, clients, o, err := dial(rawURL)
	if err != nil {
		return nil, err
	}
	for _, c := range clients {
		_ = c.Close() // it has not connected
	}
	r := &doctor.Report{Independent: true, NoTokens: true}
	r.Members = doctor.Ask(ctx, u.Addresses, func(ctx context.Context, i int) (doctor.Member, error) {
		m, err := u.Examine(ctx, u.Addresses[i], o.AllowVolatileEviction)
		if m.Role == doctor.Follower {
			m.Problems = append(m.Problems, "is a replica: each server of Redlock is a primary without replication")
		}
		return m, err
	})
	return r, nil
}
