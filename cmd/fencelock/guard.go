package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"strings"

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
       fencelock guard install [--print] [--store URL] [--protect TABLE --resource EXPRESSION]

Looks at what a fencing guard remembers in the store that it guards, and changes it; docs/FENCING.md tells when. A token that
was granted now is printed by "fencelock run -- printenv FENCELOCK_TOKEN", and its space is FENCELOCK_TOKEN_SPACE.

  show     prints the guard's terms, and the highest token of RESOURCE
  raise    makes FLOOR the smallest token that is admitted; --clean forgets what needs not be remembered then
  accept   begins anew: forgets all tokens, and admits those of SPACE from --floor on. No holder of before may write any more
  install  makes the guard's table in PostgreSQL, or prints the statements; with --protect it prints a trigger, too, that
           refuses a write to TABLE whose transaction has shown no claim for EXPRESSION: "'accounts/' || row.id"

Options:

  --store URL  postgres://…, redis://… or etcd://host:port,… where the guard remembers
  --table T    the guard's table in PostgreSQL. Default: fencing_tokens
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
	f := flag.NewFlagSet("guard", flag.ContinueOnError)
	f.SetOutput(io.Discard)
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
	for {
		if err := f.Parse(args); err != nil {
			return nil, err
		}
		if f.NArg() == 0 {
			break
		}
		s.args, args = append(s.args, f.Arg(0)), f.Args()[1:]
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
	case word == "accept" && len(rest) == 1:
		return func(ctx context.Context) error {
			return errors.Join(s.keeper.Accept(ctx, rest[0], floor), s.show(ctx, nil))
		}, nil
	case word == "install" && len(rest) == 0 && (s.printOnly || s.store != ""):
		return s.install, nil
	}
	return nil, fmt.Errorf("%q: not what guard takes", s.args)
}

// open connects to the store.
func (s *guardSettings) open(ctx context.Context) error {
	bad := func(why string) error {
		return &backend.InvalidError{Kind: backend.ErrInvalidOption, What: "--store", Value: backend.RedactURL(s.store), Why: why}
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
		return bad("want postgres://, redis:// or etcd://")
	}
	return nil
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
	if !s.printOnly {
		if s.create == nil || s.protect != "" {
			return &backend.InvalidError{
				Kind: backend.ErrInvalidOption, What: "install", Value: s.protect,
				Why: "without --print it makes the guard's table in PostgreSQL, and nothing else",
			}
		}
		return s.create(ctx)
	}
	guard, err := pgxguard.New(new(pgxpool.Pool), &pgxguard.Options{Table: s.table})
	if err != nil {
		return err
	}
	fmt.Printf("%s;\n", guard.Schema())
	if s.protect == "" {
		return nil
	}
	text, err := sqlguard.Enforce(s.protect, s.resource, s.table)
	if err != nil {
		return err
	}
	fmt.Printf("\n%s", text)
	return nil
}
