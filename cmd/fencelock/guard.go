package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	goredis "github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/etcdguard"
	"github.com/fencelock/fencelock/fencing/httpguard"
	"github.com/fencelock/fencelock/fencing/pgxguard"
	"github.com/fencelock/fencelock/fencing/redisguard"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

const guardHelp = `Usage: fencelock guard check [RESOURCE...] --store URL [options]
       fencelock guard show [RESOURCE] --store URL [options]
       fencelock guard raise FLOOR --store URL [--clean] [options]
       fencelock guard accept SPACE --store URL [--floor TOKEN] [options]
       fencelock guard install --store URL [options]
       fencelock guard migrate --store URL [options]
       fencelock guard install --print postgres|mysql|sqlite [--protect TABLE --resource EXPRESSION] [options]
       fencelock guard install --print s3 --protect BUCKET[/PREFIX]
       fencelock guard enforce --check [TABLE...] --store URL [options]

Shows and changes the memory of a fencing guard in the store that it guards; docs/FENCING.md explains when to do so. To
print a token that is granted now, and its space, run

       fencelock run --name any --tier correctness -- printenv FENCELOCK_TOKEN FENCELOCK_TOKEN_SPACE

    check    presents the claims of the locks to the guard: those of $FENCELOCK_CLAIMS, which "fencelock run --tier
           correctness" sets, one for each RESOURCE, or for each lock. Run it in a shell script before a step that
           writes, and stop if it fails. It cannot refuse a holder that is paused between the check and the write: only
           a guard in the store checks and writes in one step
  show     prints the guard's terms, and the highest claim of RESOURCE
  raise    makes FLOOR the smallest token that is admitted; --clean deletes the entries that are then redundant
  accept   starts over: deletes all tokens, and admits the tokens of SPACE from --floor on. Make sure that no earlier
           holder still writes
  install  creates the guard's memory, with a random id; do this before the first check. An existing memory is not
           changed. With --print, it prints the statements for a database instead, and with --protect also triggers
           that refuse a write to TABLE without a claim for EXPRESSION: "'accounts/' || row.id" in PostgreSQL and
           SQLite, "CONCAT('accounts/', row.id)" in MySQL. For S3, it prints a bucket policy that refuses requests
           without a condition
  enforce  with --check, in PostgreSQL and MySQL: lists the tables of the database, or the given tables, as covered by
           the triggers of install --protect or uncovered. It detects tables, partitions and child tables without
           triggers, tables that replaced others since, and disabled triggers. docs/FENCING.md lists the writes for
           which no trigger fires
  migrate  converts the memory of an earlier version to the present format; earlier programs then admit no claim

Options:

{options}

This command cannot connect to a guard in SQLite, because its memory is a local file: administer it in your program,
with the methods of fencing.Keeper. --print sqlite prints the statements that create it.

Exit codes:

    0  success; with check, the claims are admitted; with enforce --check, all tables are covered
    1  check: a claim is refused (stale, of another hold or of another lock service); enforce --check: a table is
       uncovered
   64  the command line is invalid, or the guard refuses the request: a floor below the present one, a second
       memory in one database
   69  the store cannot be reached, or refused the request
`

// guardSettings are the options of "fencelock guard".
type guardSettings struct {
	lookSettings
	store, table, prefix string
	protect, resource    string
	floor                string
	print                string
	clean                bool
	check                bool
	keeper               guardOfStore
	db                   *sql.DB // of a store in SQL
	dialect              sqlguard.Dialect
	closeStore           func()
}

const storeOption = "store"

func defineGuard(o *options) func([]string) error {
	s := &guardSettings{lookSettings: lookSettings{word: "guard"}, closeStore: func() {}}
	from := o.url(storeOption, "the `URL` of the store in which the guard remembers: postgres://…, "+
		"mysql://user@host:port/database (MariaDB, too), redis://… or etcd://host:port,…")
	o.StringVar(&s.table, "table", "", "the guard's table in PostgreSQL or MySQL; the default is fencing_tokens, in "+
		"PostgreSQL in any schema")
	o.StringVar(&s.prefix, "prefix", "", "the prefix of the guard's keys in Redis and etcd; the default is that of "+
		"the guards")
	o.StringVar(&s.protect, "protect", "", "with --print: the `TABLE`, or the bucket and prefix, to protect")
	o.StringVar(&s.resource, "resource", "", "with --protect: the SQL `EXPRESSION` for a row's resource")
	o.StringVar(&s.floor, "floor", "0", "with accept: the smallest `TOKEN` that is admitted")
	o.StringVar(&s.print, "print", "", "with install: print the statements for a `KIND` of store: postgres, mysql, "+
		"sqlite or s3")
	o.BoolVar(&s.clean, "clean", false, "with raise: delete the entries that are then redundant")
	o.BoolVar(&s.check, "check", false, "with enforce: list the tables")
	return func(args []string) (err error) {
		if s.store, err = from.read(); err != nil {
			return err
		}
		do, err := s.parseGuard(args)
		return s.run(err, func(ctx context.Context) error {
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
}

// parseGuard returns the function of the first argument.
func (s *guardSettings) parseGuard(args []string) (func(context.Context) error, error) {
	if s.args = args; len(args) == 0 {
		return nil, errors.New("check, show, raise, accept, install, enforce or migrate is missing")
	}
	word, rest := s.args[0], s.args[1:]
	floor, err := fencing.ParseToken(s.floor)
	if err != nil {
		return nil, err
	}
	if s.store == "" && word != "install" {
		return nil, errors.New("--store is missing, and neither FENCELOCK_STORE nor FENCELOCK_STORE_FILE is set")
	}
	switch {
	case word == "check":
		return func(ctx context.Context) error { return s.admit(ctx, rest) }, nil
	case word == "show" && len(rest) <= 1:
		return func(ctx context.Context) error { return s.show(ctx, rest) }, nil
	case word == "raise" && len(rest) == 1:
		if floor, err = fencing.ParseToken(rest[0]); err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return s.raise(ctx, floor) }, nil
	case word == "accept" && len(rest) == 1 && rest[0] == "":
		return nil, errors.New("SPACE is empty: the guard would admit tokens of any lock service")
	case word == "accept" && len(rest) == 1:
		return func(ctx context.Context) error {
			return errors.Join(s.keeper.Accept(ctx, rest[0], floor), s.show(ctx, nil))
		}, nil
	case word == "install" && len(rest) == 0 && printers[s.print] != nil:
		return func(context.Context) error { return printers[s.print](s) }, nil
	case word == "install" && s.print == "" && len(rest) == 0 && s.store != "":
		return s.install, nil
	case word == "enforce" && s.check:
		return func(ctx context.Context) error { return s.enforced(ctx, rest) }, nil
	case word == "enforce":
		return nil, errors.New("enforce needs --check")
	case word == "migrate" && len(rest) == 0:
		return s.migrate, nil
	case word == "install":
		return nil, errors.New("install needs --store URL, or --print postgres, mysql, sqlite or s3")
	}
	return nil, fmt.Errorf("%q: guard takes no such argument", s.args)
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
		config, err := pgxpool.ParseConfig(s.store)
		if err != nil {
			return bad("pgx cannot read it")
		}
		config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return err
		}
		s.db, s.dialect = stdlib.OpenDBFromPool(pool), sqlguard.PostgreSQL
		s.closeStore = func() {
			_ = s.db.Close()
			pool.Close()
		}
		guard, err := pgxguard.New(pool, &pgxguard.Options{Table: s.table})
		if err != nil {
			return err
		}
		s.keeper = guard
	case "mysql", "mariadb":
		db, err := openMySQL(s.store)
		if err != nil {
			return bad("want mysql://user:password@host:port/database?options of go-sql-driver")
		}
		s.db, s.dialect = db, sqlguard.MySQL
		s.closeStore = func() { _ = db.Close() }
		guard, err := sqlguard.New(db, sqlguard.MySQL, &sqlguard.Options{Table: s.table})
		if err != nil {
			return err
		}
		s.keeper = guard
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

// openMySQL opens the database of a URL. It does not connect yet.
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

// guardOfStore is a guard that checks claims and is administered.
type guardOfStore interface {
	fencing.Guard
	fencing.Keeper
}

// admit passes the claims of the environment to the guard.
func (s *guardSettings) admit(ctx context.Context, resources []string) error {
	h := http.Header{}
	for line := range strings.Lines(os.Getenv(claimsVariable)) {
		h.Add(httpguard.Header, strings.TrimSuffix(line, "\n"))
	}
	if len(h) == 0 {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "$" + claimsVariable, Why: "it is not set: run the command under " +
				"fencelock run --tier correctness",
		}
	}
	if len(resources) == 0 {
		resources = strings.Split(os.Getenv(namesVariable), "\n")
	}
	claims, err := httpguard.ClaimsFrom(h, resources...)
	if err != nil {
		return err
	}
	return s.keeper.Check(ctx, claims)
}

func (s *guardSettings) show(ctx context.Context, resource []string) error {
	terms, err := s.keeper.Terms(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("id     %v\nspace  %s\nfloor  %v\nepoch  %d\n", terms.ID, url.PathEscape(terms.Space), terms.Floor,
		terms.Epoch)
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
	fmt.Printf("token  %v\nwrite  %d\ngeneration  %v\nnonce  %v\n", seen.Token, seen.Sequence, seen.Generation, seen.Nonce)
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
	if s.protect != "" {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "--protect", Value: s.protect,
			Why: "without --print install makes the guard's memory, and nothing else",
		}
	}
	if err := s.keeper.Create(ctx); err != nil {
		return err
	}
	return s.show(ctx, nil)
}

func (s *guardSettings) migrate(ctx context.Context) error {
	if err := s.keeper.Migrate(ctx); err != nil {
		return err
	}
	return s.show(ctx, nil)
}

// uncoveredError: enforce --check has found that many tables that triggers do not cover.
type uncoveredError int

func (e uncoveredError) Error() string { return fmt.Sprintf("%d tables are uncovered", int(e)) }

func (s *guardSettings) enforced(ctx context.Context, tables []string) error {
	if s.db == nil {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "--store", Value: backend.RedactURL(s.store), Why: "only SQL has triggers",
		}
	}
	all, err := sqlguard.Covered(ctx, s.db, s.dialect, s.table, tables...)
	if err != nil {
		return err
	}
	uncovered := uncoveredError(0)
	for _, each := range all {
		if len(each.Holes) == 0 {
			fmt.Printf("covered    %s\n", each.Table)
			continue
		}
		uncovered++
		fmt.Printf("uncovered  %s: %s\n", each.Table, strings.Join(each.Holes, "; "))
	}
	if uncovered > 0 {
		return uncovered
	}
	return nil
}

// printers have the outputs of install --print.
var printers = map[string]func(*guardSettings) error{
	"postgres": func(s *guardSettings) error { return s.printSQL(sqlguard.PostgreSQL, ";", "", "") },
	"sqlite":   func(s *guardSettings) error { return s.printSQL(sqlguard.SQLite, ";", "", "") },
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
	statements := guard.Schema()
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

// printPolicy prints a bucket policy. A writer names the object version that it replaces, or the object's absence; no
// client deletes it.
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
