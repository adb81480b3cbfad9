package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/server"
)

// This file has the common part of the subcommands that look at a lock service and hold no lock.

// localServer is the URL of "fencelock serve" without options.
const localServer = "fencelock://127.0.0.1:7480"

// isBundled reports whether a URL is of the bundled server.
func isBundled(rawURL string) bool {
	scheme, _, _ := strings.Cut(rawURL, "://")
	return scheme == "fencelock" || scheme == "fencelocks"
}

// lookSettings are the options of all these subcommands.
type lookSettings struct {
	word    string // the subcommand, for messages
	from    *urlSource
	dataDir string // of a member on this machine
	backend string
	json    bool
	stale   bool
	args    []string // arguments that are not options
}

// look adds the options.
func (o *options) look(word string) *lookSettings {
	s := &lookSettings{word: word}
	s.from = o.backend("the lock service, " + localServer + " if none is given")
	o.BoolVar(&s.json, "json", false, "print one JSON object on each line")
	return s
}

// administer is look with the option for the socket of a member on this machine.
func (o *options) administer(word string) *lookSettings {
	s := o.look(word)
	o.dataDirOf(&s.dataDir, "", "the data `DIRECTORY` of a member on this machine, instead of --backend: the command "+
		"connects to the socket there, and must run as the member's user or root")
	return s
}

// parse parses the arguments, as many as names.
func (s *lookSettings) parse(args []string, names ...string) error {
	if err := s.parseSome(args); err != nil {
		return err
	}
	if len(s.args) > len(names) {
		return fmt.Errorf("%q: %s takes no such argument", s.args[len(names)], s.word)
	}
	if missing := names[len(s.args):]; len(missing) > 0 {
		return fmt.Errorf("%s is missing", missing[0])
	}
	for i, name := range names {
		if name != "NAME" {
			continue
		}
		if err := backend.ValidateName(s.args[i]); err != nil {
			return err
		}
	}
	return nil
}

// parseSome is parse for any number of arguments.
func (s *lookSettings) parseSome(args []string) (err error) {
	s.args = args
	if s.from != nil {
		s.backend, err = s.from.read()
	}
	switch {
	case s.dataDir != "":
		s.backend = listeners.UnixPrefix + filepath.Join(s.dataDir, server.AdminSocket)
	case s.backend == "":
		s.backend = localServer
	}
	return err
}

// run calls do unless the command line was wrong.
func (s *lookSettings) run(parsed error, do func(context.Context) error) error {
	if parsed != nil {
		return parsed
	}
	if err := do(context.Background()); err != nil {
		return failed(exitOfLook(err), err)
	}
	return nil
}

// runAdmin is run for functions of the administration of bundled servers.
func (s *lookSettings) runAdmin(parsed error, do func(context.Context, *builtin.Admin) error) error {
	return s.run(parsed, func(ctx context.Context) error {
		admin, err := builtin.OpenAdmin(s.backend)
		if err != nil {
			return err
		}
		return do(ctx, admin)
	})
}

// action is the function of the first argument of a subcommand such as "member".
type action struct {
	names []string // of the further arguments
	do    func(context.Context, *builtin.Admin) error
}

// runAction runs the action of the first argument; choice lists all actions.
func (s *lookSettings) runAction(args []string, choice string, all map[string]action) error {
	if len(args) == 0 {
		return fmt.Errorf("%s is missing", choice)
	}
	chosen, known := all[args[0]]
	if !known {
		return fmt.Errorf("%q: want %s", args[0], choice)
	}
	return s.runAdmin(s.parse(args[1:], chosen.names...), chosen.do)
}

// open connects to the service, whose driver must be a T with the capabilities.
func open[T any](ctx context.Context, s *lookSettings, needs backend.Capabilities) (T, func(), error) {
	var none T
	opening, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	d, err := backend.Open(opening, s.backend)
	if err != nil {
		return none, nil, err
	}
	closeDriver := func() {
		closing, cancel := context.WithTimeout(context.Background(), releaseTime)
		defer cancel()
		_ = d.Close(closing) // it holds no lock
	}
	t, ok := backend.As[T](d)
	about := d.Describe()
	if missing := about.Capabilities.Missing(needs); !ok || missing != 0 {
		if missing == 0 {
			missing = needs
		}
		closeDriver()
		return none, nil, fmt.Errorf("%s: the %s driver lacks the capability %v: %w", s.word, about.Name, missing,
			backend.ErrUnsupported)
	}
	return t, closeDriver, nil
}

// with opens the service as open does, and calls do once, within attemptTime.
func with[T any](
	ctx context.Context, s *lookSettings, needs backend.Capabilities, do func(context.Context, T) error,
) error {
	d, closeDriver, err := open[T](ctx, s, needs)
	if err != nil {
		return err
	}
	defer closeDriver()
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	return do(ctx, d)
}

// printer writes rows, either aligned for people or as JSON.
type printer struct {
	columns *tabwriter.Writer // nil for JSON
	titles  int
	lines   *json.Encoder
}

// newPrinter begins with the titles of the columns, except in JSON.
func (s *lookSettings) newPrinter(titles ...string) *printer {
	if s.json {
		return &printer{lines: json.NewEncoder(os.Stdout)}
	}
	p := &printer{columns: tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0), titles: len(titles)}
	p.row(titles...)
	return p
}

// print writes one object, or the rows that it makes for people. A row may end early.
func (p *printer) print(object any, rows ...[]string) error {
	if p.lines != nil {
		return p.lines.Encode(object)
	}
	for _, r := range rows {
		p.row(r...)
	}
	return nil
}

func (p *printer) row(cells ...string) {
	line := make([]string, p.titles) // a row without all columns would end them for all rows below
	for i := range line {
		if i < len(cells) {
			line[i] = cell(cells[i])
		}
	}
	fmt.Fprintln(p.columns, strings.Join(line, "\t"))
}

// flush writes the rows that wait for the widths of the columns.
func (p *printer) flush() error {
	if p.columns == nil {
		return nil
	}
	return p.columns.Flush()
}

// printOne prints a single object.
func (s *lookSettings) printOne(titles []string, object any, rows ...[]string) error {
	out := s.newPrinter(titles...)
	if err := out.print(object, rows...); err != nil {
		return err
	}
	return out.flush()
}

// cell returns text that cannot break a column or a terminal: names and owners come from others.
func cell(text string) string {
	if text == "" {
		return "-"
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(text)
	}
	return text
}

// lock is the printed form of a name. It has the field names of docs/HTTP.md.
type lock struct {
	gateway.State
	Stale *stale `json:"stale,omitempty"`
}

var lockTitles = []string{"NAME", "OWNER", "TOKEN", "KIND", "SINCE", "EXPIRES IN", "WAITERS"}

// rows returns one row for each holder.
func (l *lock) rows() [][]string {
	waiters := strconv.Itoa(l.Waiters)
	if len(l.Holders) == 0 {
		return [][]string{{l.LockKey, "", "", "", "", "", waiters}}
	}
	var all [][]string
	for _, h := range l.Holders {
		token, since, left := "", "", ""
		if h.FencingToken != 0 {
			token = strconv.FormatUint(h.FencingToken, 10)
		}
		if h.Since != 0 {
			since = time.UnixMilli(h.Since).UTC().Format(time.RFC3339)
		}
		if h.ExpiresInMillis > 0 {
			left = (time.Duration(h.ExpiresInMillis) * time.Millisecond).Round(100 * time.Millisecond).String()
		}
		all = append(all, []string{l.LockKey, h.OwnerID, token, h.Kind, since, left, waiters})
	}
	return all
}
