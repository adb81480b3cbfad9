package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/internal/doctor"
)

func init() { doctor.Register(examine, "postgres", "postgresql") }

// examine asks every host of a URL separately, regardless of target_session_attrs: its role, identity, timeline,
// settings and schema.
func examine(ctx context.Context, rawURL string) (*doctor.Report, error) {
	config, o, _, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	hosts := hostsOf(config.ConnConfig)
	addresses := make([]string, len(hosts))
	for i, h := range hosts {
		addresses[i] = h.address()
	}
	schema := o.Schema
	if schema == "" {
		schema = defaultSchema
	}
	return &doctor.Report{Members: doctor.Ask(ctx, addresses, func(ctx context.Context, i int) (doctor.Member, error) {
		one := config.ConnConfig.Copy()
		one.Host, one.Port, one.TLSConfig, one.Fallbacks, one.ValidateConnect = hosts[i].name, hosts[i].port, hosts[i].ways[0].TLSConfig,
			hosts[i].ways[1:], nil
		conn, err := pgx.ConnectConfig(ctx, one)
		if err != nil {
			return doctor.Member{}, err
		}
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
		return examineServer(ctx, conn, schema)
	})}, nil
}

// host is one host of a URL, with the ways to connect to it: with and without TLS.
type host struct {
	name string
	port uint16
	ways []*pgconn.FallbackConfig
}

func (h *host) address() string { return net.JoinHostPort(h.name, strconv.Itoa(int(h.port))) }

// hostsOf returns the hosts in the order of the URL.
func hostsOf(c *pgx.ConnConfig) (hosts []host) {
	ways := append([]*pgconn.FallbackConfig{{Host: c.Host, Port: c.Port, TLSConfig: c.TLSConfig}}, c.Fallbacks...)
	for _, w := range ways {
		i := slices.IndexFunc(hosts, func(h host) bool { return h.name == w.Host && h.port == w.Port })
		if i < 0 {
			i = len(hosts)
			hosts = append(hosts, host{name: w.Host, port: w.Port})
		}
		hosts[i].ways = append(hosts[i].ways, w)
	}
	return hosts
}

// examineServer asks one server.
func examineServer(ctx context.Context, conn *pgx.Conn, schema string) (m doctor.Member, err error) {
	var recovery bool
	var standbys, timeline int
	var synchronous, fsync, fullPages, started string
	// The control file has the old timeline until the first checkpoint after a promotion.
	err = conn.QueryRow(ctx, `select pg_is_in_recovery(), current_setting('server_version'), current_setting('fsync'),
		current_setting('full_page_writes'), (select count(*)::int from pg_stat_replication),
		current_setting('synchronous_standby_names'), (select system_identifier::text from pg_control_system()),
		pg_postmaster_start_time()::text,
		case when pg_is_in_recovery() then (select timeline_id from pg_control_checkpoint())
			else ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int end,
		case when pg_is_in_recovery() then coalesce(pg_last_wal_replay_lsn()::text, '')
			else pg_current_wal_insert_lsn()::text end`).
		Scan(&recovery, &m.Version, &fsync, &fullPages, &standbys, &synchronous, &m.Cluster, &started, &timeline, &m.Position)
	if err != nil {
		return m, err
	}
	m.Role, m.Position = doctor.Leader, fmt.Sprintf("%s on timeline %d", m.Position, timeline)
	m.ID = fmt.Sprintf("system %s, started %s", m.Cluster, started)
	if recovery {
		m.Role = doctor.Follower
	} else {
		m.Facts = append(m.Facts, fmt.Sprintf("%d connected standbys", standbys), fmt.Sprintf("synchronous_standby_names=%q", synchronous))
	}
	for _, s := range [][2]string{{"fsync", fsync}, {"full_page_writes", fullPages}} {
		if s[1] != "on" {
			m.Problems = append(m.Problems, fmt.Sprintf("has %s=%s: a crash may lose locks and tokens", s[0], s[1]))
		}
	}
	return m, examineSchema(ctx, conn, schema, &m)
}

// examineSchema reads the schema: its version, and the incarnation of its tables as the token space.
func examineSchema(ctx context.Context, conn *pgx.Conn, schema string, m *doctor.Member) error {
	var version int
	err := conn.QueryRow(ctx, inSchema(`select coalesce(max(version), 0)::int,
		coalesce((select incarnation::text from fencelock.cluster where xmin::text::bigint = written), '')
		from fencelock.migrations`, schema)).Scan(&version, &m.Space)
	var refused *pgconn.PgError
	switch {
	case errors.As(err, &refused) && (refused.Code == "42P01" || refused.Code == "3F000"): // no such table, no such schema
		m.Problems = append(m.Problems, fmt.Sprintf("has no schema %s: run `fencelock postgres migrate`", schema))
		return nil
	case errors.As(err, &refused) && refused.Code == "42703": // no such column
		m.Problems = append(m.Problems, fmt.Sprintf("has schema %s of an earlier version: run `fencelock postgres migrate`", schema))
		return nil
	case errors.As(err, &refused):
		m.Facts = append(m.Facts, "schema not readable: "+refused.Message)
		return nil
	case err != nil:
		return err
	}
	m.Facts = append(m.Facts, fmt.Sprintf("schema %s in version %d", schema, version))
	least := 0
	if version > len(migrations()) {
		if err := conn.QueryRow(ctx, leastOf(schema), len(migrations())).Scan(&least); err != nil {
			return err
		}
	}
	if err := checkVersion(schema, version, least); err != nil {
		m.Problems = append(m.Problems, "is unfit: "+err.Error())
	}
	return nil
}
