package server

// What Prometheus is told: the member's status in its format.

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// WriteMetrics writes how this member is, in the text format of Prometheus.
func (s *Server) WriteMetrics(w io.Writer) error {
	m, err := (&admin{server: s}).Status(context.Background(), &lockpb.StatusRequest{})
	if err != nil {
		return err
	}
	flag := func(is bool) uint64 {
		if is {
			return 1
		}
		return 0
	}
	var text strings.Builder
	for _, x := range []struct {
		name, help string
		value      uint64
	}{
		{"leader", "1 if this member serves.", flag(m.Leader)},
		{"knows_leader", "1 if this member knows who leads.", flag(m.LeaderId != "")},
		{"maintenance", "1 if this member leads only if nobody else does.", flag(m.Maintenance)},
		{"term", "The term of the log. Every election begins a greater one.", m.Term},
		{"last_index", "How far the log of this member goes.", m.LastIndex},
		{"commit_index", "Up to where this member knows that most members have the log.", m.CommitIndex},
		{"applied_index", "Up to where this member has carried the log out.", m.AppliedIndex},
		{
			"agreed_index",
			"The last log entry after which the state of this member was that of the leader; 0: not compared.",
			m.AgreedIndex,
		},
		{
			"differs_index", "The last log entry after which it was another; 0: never. One of the two is wrong.",
			m.DiffersIndex,
		},
		{"unread_bytes", "What clients have not taken of their replies.", uint64(max(0, s.unread.Load()))},
	} {
		fmt.Fprintf(&text, "# HELP fencelock_member_%[1]s %[2]s\n# TYPE fencelock_member_%[1]s gauge\n", x.name, x.help)
		fmt.Fprintf(&text, "fencelock_member_%s %d\n", x.name, x.value)
	}
	_, err = io.WriteString(w, text.String())
	return err
}
