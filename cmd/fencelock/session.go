package main

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/builtin"
)

const sessionHelp = `Usage: fencelock session list [options]
       fencelock session end SESSION [options]

Lists and ends the sessions of a cluster of bundled servers. Each hold and wait of a client belongs to a session.

list shows the open sessions. OWNER is the owner of the latest hold or wait, and NAMES are the first ten names that the
session holds. CLIENT is the certificate or address that opened it. CONNECTED says whether its client is connected to
the leader, and LEFT is the time after which the session ends unless its client renews it.

end ends the session that list shows as SESSION, with its holds and waits. Its locks become free immediately, and its
client, if it is still connected, is notified that it has lost them. The client may open another session.

Options:

{options}

Exit codes:

    0  done
    1  there is no such session
   64  the command line is invalid
   69  no leader reachable, or no answer in time; the change may have been applied
`

// sessionRow is the printed form of a session.
type sessionRow struct {
	Session   string  `json:"session"`
	Client    string  `json:"client,omitempty"`
	Owner     string  `json:"owner,omitempty"`
	Connected bool    `json:"connected"`
	TTL       float64 `json:"ttlSeconds"`
	Left      float64 `json:"leftSeconds"`
	Holds     uint32  `json:"holds"`
	Waits     uint32  `json:"waits"`

	Names []string `json:"names,omitempty"`
}

func defineSession(o *options) func([]string) error {
	client := o.String("client", "", "list only the sessions of `CLIENT`, such as 'address 10.1.2.3', 'certificate NAME'")
	s := o.administer("session")
	return func(args []string) error {
		return s.runAction(args, "list or end", map[string]action{
			"list": {nil, func(ctx context.Context, admin *builtin.Admin) error {
				return s.listSessions(ctx, admin, *client)
			}},
			"end": {[]string{"SESSION"}, s.endSession},
		})
	}
}

func (s *lookSettings) listSessions(ctx context.Context, admin *builtin.Admin, client string) error {
	sessions, err := admin.Sessions(ctx, client)
	if err != nil {
		return err
	}
	out := s.newPrinter("SESSION", "CLIENT", "OWNER", "CONNECTED", "TTL", "LEFT", "HOLDS", "WAITS", "NAMES")
	for _, x := range sessions {
		ttl, left := time.Duration(x.TtlNanos), time.Duration(x.LeftNanos).Round(10*time.Millisecond)
		row := &sessionRow{
			x.Name, x.Client, x.Owner, x.Connected, ttl.Seconds(), left.Seconds(), x.Holds, x.Waits, x.Names,
		}
		err := out.print(row, []string{
			row.Session, row.Client, row.Owner, yesNo(row.Connected), ttl.String(), left.String(),
			strconv.FormatUint(uint64(row.Holds), 10), strconv.FormatUint(uint64(row.Waits), 10),
			strings.Join(row.Names, ","),
		})
		if err != nil {
			return err
		}
	}
	return out.flush()
}

func (s *lookSettings) endSession(ctx context.Context, admin *builtin.Admin) error {
	return admin.EndSession(ctx, s.args[0])
}
