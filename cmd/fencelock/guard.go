package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"strings"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgxpool"
	goredis "github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/etcdguard"
	"github.com/fencelock/fencelock/fencing/pgxguard"
	"github.com/fencelock/fencelock/fencing/redisguard"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

const guardHelp = `Usage: fencelock guard show [RESOURCE] --store URL [options]
       fencelock guard raise FLOOR --store URL [--clean] [options]
       fencelock guard accept SPACE --store URL [--floor TOKEN] [options]
       fencelock guard install --store URL [options]
       fencelock guard install --print postgres|mysql [--protect TABLE --resource EXPRESSION] [options]
       fencelock guard install --print s3 --protect BUCKET[/PREFIX]

Looks at what a fencing guard remembers in the store that it guards, and changes it; docs/FENCING.md tells when. A token
that was granted now, and its space, are printed by

       fencelock run --name any --tier correctness -- printenv FENCELOCK_TOKEN FENCELOCK_TOKEN_SPACE

  show     prints the guard's terms, and the highest token of RESOURCE
  raise    makes FLOOR the smallest token that is admitted; --clean forgets what needs not be remembered then
  accept   begins anew: forgets all tokens, and admits those of SPACE from --floor on. No holder of before may write any
           more
  install  makes the guard's table in PostgreSQL or MySQL; with --print it prints the statements instead, and with
           --protect triggers, too, that refuse a write to TABLE without a claim for EXPRESSION: "'accounts/' || row.id"
           in PostgreSQL, "CONCAT('accounts/', row.id)" in MySQL. For S3 it prints a bucket policy that refuses what
           names no condition

Options:

  --store URL  postgres://…, mysql://user:password@host:port/database (MariaDB, too), redis://… or etcd://host:port,…
               where the guard remembers
  --table T    the guard's table in PostgreSQL or MySQL. Default: fencing_tokens
  --prefix P   what the guard's keys begin with in Redis and etcd. Default: the guards' own

Exit codes:

    0  done
   64  the command line makes no sense
   69  the store cannot be reached, or refused
`

// guardSettings are the options of "fencelock guard".
type guardSettings struct {
	lookSettings
	store, table, prefix string
	protect, resource    string
	floor                string
	printOnly, clean     bool
	keeper               fencing.Keeper
	closeStore           func()
	create               func(context.Context) error
}

// guardMain is "fencelock guard".
func guardMain(args []string) int {
	s := &guardSettings{lookSettings: lookSettings{word: "guard"}, closeStore: func() {}}
	f := newFlags("guard")
	f.StringVar(&s.store, "store", "", "")
	f.StringVar(&s.table, "table", "", "")
	f.StringVar(&s.prefix, "prefix", "", "")
	f.StringVar(&s.protect, "protect", "", "")
	f.StringVar(&s.resource, "resource", "", "")
	f.StringVar(&s.floor, "floor", "0", "")
	f.BoolVar(&s.printOnly, "print", false, "")
	f.BoolVar(&s.clean, "clean", false, "")
	do, err := s.parseGuard(f, args)
	return s.run(err, guardHelp, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*attemptTime)
		defer cancel()
		if s.store != "" {
			if err := s.open(ctx); err != nil {
				return err
			}
			defer s.closeStore()
		}
		return do(ctx)
	})
}

// parseGuard returns what the first argument asks for.
func (s *guardSettings) parseGuard(f *flag.FlagSet, args []string) (func(context.Context) error, error) {
	var err error
	if s.args, err = parseMixed(f, args); err != nil {
		return nil, err
	}
	if len(s.args) == 0 {
		return nil, errors.New("show, raise, accept or install is missing")
	}
	word, rest := s.args[0], s.args[1:]
	floor, err := fencing.ParseToken(s.floor)
	if err != nil {
		return nil, err
	}
	if s.store == "" && word != "install" {
		return nil, errors.New("--store is missing")
	}
	switch {
	case word == "show" && len(rest) <= 1:
		return func(ctx context.Context) error { return s.show(ctx, rest) }, nil
	case word == "raise" && len(rest) == 1:
		if floor, err = fencing.ParseToken(rest[0]); err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return s.raise(ctx, floor) }, nil
	case word == "accept" && len(rest) == 1 && rest[0] == "":
		return nil, errors.New("SPACE is empty: tokens of every lock service would be admitted")
	case word == "accept" && len(rest) == 1:
		return func(ctx context.Context) error {
			return errors.Join(s.keeper.Accept(ctx, rest[0], floor), s.show(ctx, nil))
		}, nil
	case word == "install" && s.printOnly && len(rest) == 1 && printers[rest[0]] != nil:
		return func(context.Context) error { return printers[rest[0]](s) }, nil
	case word == "install" && !s.printOnly && len(rest) == 0 && s.store != "":
		return s.install, nil
	case word == "install":
		return nil, errors.New("install wants --store URL, or --print postgres, mysql or s3")
	}
	return nil, fmt.Errorf("%q: not what guard takes", s.args)
}

// open connects to the store.
func (s *guardSettings) open(ctx context.Context) error {
	bad := func(why string) error {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "--store", Value: backend.RedactURL(s.store), Why: why,
		}
	}
	scheme, rest, _ := strings.Cut(s.store, "://")
	switch scheme {
	case "postgres", "postgresql":
		pool, err := pgxpool.New(ctx, s.store)
		if err != nil {
			return bad("pgx cannot read it")
		}
		s.closeStore = pool.Close
		guard, err := pgxguard.New(pool, &pgxguard.Options{Table: s.table})
		if err != nil {
			return err
		}
		s.keeper, s.create = guard, guard.Create
	case "mysql", "mariadb":
		db, err := openMySQL(s.store)
		if err != nil {
			return bad("want mysql://user:password@host:port/database?options of go-sql-driver")
		}
		s.closeStore = func() { _ = db.Close() }
		guard, err := sqlguard.New(db, sqlguard.MySQL, &sqlguard.Options{Table: s.table})
		if err != nil {
			return err
		}
		s.keeper, s.create = guard, guard.Create
	case "redis", "rediss":
		options, err := goredis.ParseURL(s.store)
		if err != nil {
			return bad("go-redis cannot read it")
		}
		client := goredis.NewClient(options)
		s.closeStore = func() { _ = client.Close() }
		if s.keeper, err = redisguard.New(client, &redisguard.Options{Prefix: s.prefix}); err != nil {
			return err
		}
	case "etcd":
		client, err := clientv3.New(clientv3.Config{Endpoints: strings.Split(rest, ","), Logger: zap.NewNop()})
		if err != nil {
			return bad("etcd's client cannot read it")
		}
		s.closeStore = func() { _ = client.Close() }
		if s.keeper, err = etcdguard.New(client, &etcdguard.Options{Prefix: s.prefix}); err != nil {
			return err
		}
	default:
		return bad("want postgres://, mysql://, redis:// or etcd://")
	}
	return nil
}

// openMySQL opens the database of a URL. Nothing is sent yet.
func openMySQL(text string) (*sql.DB, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, err
	}
	c := mysql.NewConfig()
	c.Net, c.Addr, c.DBName, c.User = "tcp", u.Host, strings.TrimPrefix(u.Path, "/"), u.User.Username()
	c.Passwd, _ = u.User.Password()
	if u.Hostname() == "" || c.DBName == "" {
		return nil, errors.New("the host or the database is missing")
	}
	if u.Port() == "" {
		c.Addr = net.JoinHostPort(u.Hostname(), "3306")
	}
	dsn := c.FormatDSN()
	if u.RawQuery != "" {
		dsn += map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")] + u.RawQuery
	}
	if c, err = mysql.ParseDSN(dsn); err != nil {
		return nil, err
	}
	connector, err := mysql.NewConnector(c)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

func (s *guardSettings) show(ctx context.Context, resource []string) error {
	terms, err := s.keeper.Terms(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("space  %s\nfloor  %v\nepoch  %d\n", url.PathEscape(terms.Space), terms.Floor, terms.Epoch)
	if len(resource) == 0 {
		return nil
	}
	seen, err := s.keeper.Seen(ctx, resource[0])
	if err != nil {
		return err
	}
	if seen.Epoch < terms.Epoch {
		seen = fencing.Seen{Epoch: terms.Epoch}
	}
	fmt.Printf("token  %v\nwrite  %d\n", seen.Token, seen.Sequence)
	return nil
}

func (s *guardSettings) raise(ctx context.Context, floor fencing.Token) error {
	if err := s.keeper.Raise(ctx, floor); err != nil {
		return err
	}
	if s.clean {
		n, err := s.keeper.Clean(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("forgot %d resources\n", n)
	}
	return s.show(ctx, nil)
}

func (s *guardSettings) install(ctx context.Context) error {
	if s.create == nil || s.protect != "" {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "install", Value: s.protect,
			Why: "without --print it makes the guard's table in PostgreSQL or MySQL, and nothing else",
		}
	}
	return s.create(ctx)
}

// printers print what install --print is asked for.
var printers = map[string]func(*guardSettings) error{
	"postgres": func(s *guardSettings) error { return s.printSQL(sqlguard.PostgreSQL, ";", "", "") },
	// Some statements have semicolons inside, at which the client would cut them.
	"mysql": func(s *guardSettings) error {
		return s.printSQL(sqlguard.MySQL, "//", "DELIMITER //\n", "DELIMITER ;\n")
	},
	"s3": (*guardSettings).printPolicy,
}

func (s *guardSettings) printSQL(d sqlguard.Dialect, end, before, after string) error {
	guard, err := sqlguard.New(new(sql.DB), d, &sqlguard.Options{Table: s.table})
	if err != nil {
		return err
	}
	statements := []string{guard.Schema()}
	if s.protect != "" {
		more, err := sqlguard.Enforce(d, s.protect, s.resource, s.table)
		if err != nil {
			return err
		}
		statements = append(statements, more...)
	}
	fmt.Print(before)
	for _, each := range statements {
		fmt.Printf("%s%s\n", each, end)
	}
	fmt.Print(after)
	return nil
}

// printPolicy prints a bucket policy. Who writes says which object it replaces, or that there is none; nobody deletes.
func (s *guardSettings) printPolicy() error {
	bucket, prefix, _ := strings.Cut(s.protect, "/")
	if bucket == "" || strings.ContainsAny(s.protect, "*? \"") {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "--protect", Value: s.protect, Why: "want BUCKET or BUCKET/PREFIX",
		}
	}
	type statement struct {
		Sid, Effect, Principal string
		Action                 []string
		Resource               string
		Condition              map[string]map[string]string `json:",omitempty"`
	}
	objects := "arn:aws:s3:::" + bucket + "/" + prefix + "*"
	text, err := json.MarshalIndent(map[string]any{
		"Version": "2012-10-17",
		"Statement": []statement{
			{
				Sid: "FencingConditionalWritesOnly", Effect: "Deny", Principal: "*", Action: []string{"s3:PutObject"},
				Resource: objects, Condition: map[string]map[string]string{
					"Null": {"s3:if-match": "true", "s3:if-none-match": "true"},
					"Bool": {"s3:ObjectCreationOperation": "true"},
				},
			},
			{
				Sid: "FencingNothingIsDeleted", Effect: "Deny", Principal: "*",
				Action: []string{"s3:DeleteObject", "s3:DeleteObjectVersion"}, Resource: objects,
			},
		},
	}, "", "  ")
	if err != nil {
		return err
	}
	fmt.Printf("%s\n", text)
	return nil
}
