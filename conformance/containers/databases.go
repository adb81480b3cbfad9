package containers

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/freeport"
)

// PostgresServer is one PostgreSQL. Commits survive Restart. The user postgres needs no password.
type PostgresServer struct{ *Server }

// URL returns the address of the database postgres, for pgx and others.
func (s *PostgresServer) URL() string {
	return "postgres://postgres@" + s.Addr() + "/postgres?sslmode=disable"
}

// Postgres starts a PostgreSQL for the test t, and stops it at the end. Args are those of postgres. The server does
// not wait for the disk at a commit, since a kill of the server loses no written data.
//
// The image is FENCELOCK_IMAGE_POSTGRES, by default the official postgres:17. It runs only as a container: the
// program refuses to run as root, which tests in containers often are.
func Postgres(t testing.TB, opts ...Option) *PostgresServer {
	t.Helper()
	return &PostgresServer{run(t, postgresSpec, opts, newContainer, containerOnly)}
}

// PostgresPair starts a primary, and a standby that follows it, for the test t, and stops them at the end. Args are
// those of both. They write to disk as in production; commits wait for the standby only with
// synchronous_standby_names. `select pg_promote()` makes the standby primary, and does not change the former primary.
// Each keeps its files when stopped. The image is that of Postgres; both run only in containers, which share the
// host's network.
func PostgresPair(t testing.TB, opts ...Option) (primary, standby *PostgresServer) {
	t.Helper()
	firstWay(t, pairSpec, opts, newContainer, containerOnly, func(sp spec, create create) error {
		ports, err := reservePorts(2)
		if err != nil {
			return err
		}
		t.Cleanup(func() { closePorts(ports) })
		start := func(role string, at *freeport.Port, environ ...string) (*PostgresServer, error) {
			sp := sp
			sp.name, sp.fixed, sp.environ = "PostgreSQL, "+role, at, environ
			_, number, _ := strings.Cut(at.Addr(), ":")
			sp.args = append([]string{"-p", number}, sp.args...)
			server, err := try(t, sp, create)
			return &PostgresServer{server}, err
		}
		if primary, err = start("primary", ports[0]); err == nil {
			standby, err = start("standby", ports[1], "PRIMARY=postgres://postgres@"+ports[0].Addr()+"/")
		}
		return err
	})
	return primary, standby
}

var pairSpec = spec{
	name:  postgresSpec.name,
	image: postgresSpec.image,
	env:   postgresSpec.env,
	user:  "postgres",
	// The server has its own data folder, since the image's configuration does not admit a standby. The programs are in
	// Debian's folder.
	entrypoint: []string{"/bin/sh", "-c", `set -e
		PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
		cd /tmp
		if [ ! -e data ]; then
			rm -rf begun
			if [ -n "$PRIMARY" ]; then
				pg_basebackup --dbname="$PRIMARY" -D begun --write-recovery-conf --wal-method=stream --checkpoint=fast --no-sync
			elif [ -e /data/PG_VERSION ]; then # an image that has one ready
				cp -a /data begun
			else
				initdb -D begun --auth=trust --no-sync
			fi
			mv begun data
		fi
		exec postgres -D data -c listen_addresses=127.0.0.1 -c unix_socket_directories=/tmp "$@"`, "postgres"},
	ready:   postgresReady,
	install: postgresSpec.install,
}

var postgresSpec = spec{
	name:    "PostgreSQL",
	image:   "postgres:17",
	env:     "FENCELOCK_IMAGE_POSTGRES",
	port:    "5432/tcp",
	environ: []string{"POSTGRES_HOST_AUTH_METHOD=trust"},
	args:    []string{"-c", "fsync=off", "-c", "max_connections=200"},
	ready:   postgresReady,
	install: "a Docker engine that can pull postgres:17",
}

// MariaDBServer is one MariaDB. Commits survive Restart. The user root needs no password.
type MariaDBServer struct{ *Server }

// DSN returns the data source name of the database test, for go-sql-driver.
func (s *MariaDBServer) DSN() string { return "root@tcp(" + s.Addr() + ")/test" }

// MariaDB starts a MariaDB for the test t, and stops it at the end. Args are those of mariadbd. The server does not
// wait for the disk at a commit, since a kill of the server loses no written data.
//
// The image is FENCELOCK_IMAGE_MARIADB, by default the official mariadb:11.8. It runs only as a container.
func MariaDB(t testing.TB, opts ...Option) *MariaDBServer {
	t.Helper()
	return &MariaDBServer{run(t, mariaSpec, opts, newContainer, containerOnly)}
}

var mariaSpec = spec{
	name:    "MariaDB",
	image:   "mariadb:11.8",
	env:     "FENCELOCK_IMAGE_MARIADB",
	port:    "3306/tcp",
	environ: []string{"MARIADB_ALLOW_EMPTY_ROOT_PASSWORD=1", "MARIADB_DATABASE=test"},
	args:    []string{"--innodb-flush-log-at-trx-commit=2", "--skip-name-resolve"},
	ready:   mariaReady,
	install: "a Docker engine that can pull mariadb:11.8",
}

func containerOnly(context.Context, spec) (node, string, error) {
	return nil, "", errors.New("it runs as a container only")
}

// postgresReady reports whether the server at addr accepts a client: it refuses while it starts or recovers.
func postgresReady(ctx context.Context, addr string) bool {
	c, ok := dial(ctx, addr)
	if !ok {
		return false
	}
	defer c.Close()
	const protocol = 3 << 16
	parameters := "user\x00postgres\x00database\x00postgres\x00\x00"
	hello := binary.BigEndian.AppendUint32(nil, uint32(8+len(parameters)))
	hello = binary.BigEndian.AppendUint32(hello, protocol)
	if _, err := c.Write(append(hello, parameters...)); err != nil {
		return false
	}
	// Each message is a letter, a length that includes itself, and a body. The last one asks for a query.
	for {
		var head [5]byte
		if _, err := io.ReadFull(c, head[:]); err != nil || head[0] == 'E' {
			return false
		}
		if head[0] == 'Z' {
			c.Write([]byte{'X', 0, 0, 0, 4}) // otherwise the server logs a lost connection
			return true
		}
		if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(head[1:]))-4); err != nil {
			return false
		}
	}
}

// mariaReady reports whether the server at addr sends its greeting. It does so only when it serves, and sends an
// error to a client that it refuses.
func mariaReady(ctx context.Context, addr string) bool {
	c, ok := dial(ctx, addr)
	if !ok {
		return false
	}
	defer c.Close()
	var head [5]byte // three bytes of length, a number, the version of the protocol or ff for an error
	_, err := io.ReadFull(c, head[:])
	return err == nil && head[4] == 10
}

// dial connects for one exchange, within a second.
func dial(ctx context.Context, addr string) (net.Conn, bool) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, false
	}
	c.SetDeadline(time.Now().Add(time.Second))
	return c, true
}
