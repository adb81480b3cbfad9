package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

// This file is what the subcommands have in common that look at a lock service and hold nothing.

// localServer is where "fencelock serve" without options is found.
const localServer = "fencelock://127.0.0.1:7480"

const lookOptions = `  --backend URL  the lock service. Default: $FENCELOCK_BACKEND, else ` + localServer + `
  --json         one JSON object on each line; numbers of 64 bits are strings
`

// lookSettings are the options of all these subcommands.
type lookSettings struct {
	word    string // the subcommand, for messages
	backend string
	json    bool
	stale   bool
	args    []string // what is no option
}

// newLook returns settings and the flags that fill them.
func newLook(word string) (*lookSettings, *flag.FlagSet) {
	s := &lookSettings{word: word}
	f := newFlags(word)
	f.StringVar(&s.backend, "backend", os.Getenv("FENCELOCK_BACKEND"), "")
	f.BoolVar(&s.json, "json", false, "")
	return s, f
}

// parse reads the command line: options may stand before and after the arguments, of which there are as many as names.
func (s *lookSettings) parse(f *flag.FlagSet, args []string, names ...string) error {
	if err := s.parseSome(f, args); err != nil {
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
func (s *lookSettings) parseSome(f *flag.FlagSet, args []string) (err error) {
	if s.args, err = parseMixed(f, args); err != nil {
		return err
	}
	if s.backend == "" {
		s.backend = localServer
	}
	return checkBackend(s.backend)
}

// run prints the help if parsing asked for it, complains if it failed, and else does what is to be done.
func (s *lookSettings) run(parsed error, help string, do func(context.Context) error) int {
	if code, done := unparsed(s.word, help, parsed); done {
		return code
	}
	err := do(context.Background())
	if err != nil {
		say("%v", err)
	}
	return exitOfLook(err)
}

// runAdmin is run for what is done by the administration of bundled servers.
func (s *lookSettings) runAdmin(parsed error, help string, do func(context.Context, *builtin.Admin) error) int {
	return s.run(parsed, help, func(ctx context.Context) error {
		admin, err := builtin.OpenAdmin(s.backend)
		if err != nil {
			return err
		}
		return do(ctx, admin)
	})
}

// action is what the first argument of a subcommand such as "member" asks for.
type action struct {
	names []string // of the arguments that follow
	do    func(context.Context, *builtin.Admin) error
}

// runAction does what the first argument asks for; choice lists what there is.
func (s *lookSettings) runAction(f *flag.FlagSet, args []string, help, choice string, all map[string]action) int {
	if len(args) == 0 {
		return usageError(s.word, fmt.Errorf("%s is missing", choice))
	}
	chosen, known := all[args[0]]
	if known {
		return s.runAdmin(s.parse(f, args[1:], chosen.names...), help, chosen.do)
	}
	err := s.parse(f, args)
	if !errors.Is(err, flag.ErrHelp) {
		err = fmt.Errorf("%q: want %s", args[0], choice)
	}
	return s.run(err, help, nil)
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
		_ = d.Close(closing) // it holds nothing
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

// with opens the service as open does, and has do ask it once, within attemptTime.
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

// newPrinter begins with the titles of the columns, which are of no use in JSON.
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
	line := make([]string, p.titles) // a row that lacks columns would end them for all below it
	for i := range line {
		if i < len(cells) {
			line[i] = cell(cells[i])
		}
	}
	fmt.Fprintln(p.columns, strings.Join(line, "\t"))
}

// flush writes what waits for the widths of the columns.
func (p *printer) flush() error {
	if p.columns == nil {
		return nil
	}
	return p.columns.Flush()
}

// printOne prints one object and nothing else.
func (s *lookSettings) printOne(titles []string, object any, rows ...[]string) error {
	out := s.newPrinter(titles...)
	if err := out.print(object, rows...); err != nil {
		return err
	}
	return out.flush()
}

// cell is text that cannot break a column or a terminal: names and owners come from others.
func cell(text string) string {
	if text == "" {
		return "-"
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(text)
	}
	return text
}

// lock is what is printed of a name.
type lock struct {
	Name     string   `json:"name"`
	Held     bool     `json:"held"`
	Waiters  int      `json:"waiters"`
	Revision uint64   `json:"revision,omitempty,string"`
	Holders  []holder `json:"holders"`
	Stale    *stale   `json:"stale,omitempty"`
}

// holder is what is printed of a hold.
type holder struct {
	Owner           string            `json:"owner"`
	HoldID          string            `json:"holdId,omitempty"`
	Kind            string            `json:"kind"`
	Permits         int               `json:"permits,omitempty"`
	Token           string            `json:"token,omitempty"`
	Since           *time.Time        `json:"since,omitempty"`
	ExpiresInMillis int64             `json:"expiresInMillis,omitempty"`
	Metadata        map[string]string `json:"metadata,omitempty"`
}

func lockOf(info *backend.State) lock {
	l := lock{Name: info.Name, Held: info.Held, Waiters: info.Waiters, Revision: info.Revision, Holders: []holder{}}
	for _, h := range info.Holders {
		out := holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind.String(), Permits: h.Permits,
			ExpiresInMillis: h.ExpiresIn.Milliseconds(), Metadata: h.Metadata,
		}
		if h.Token.Valid() {
			out.Token = h.Token.String()
		}
		if !h.Since.IsZero() {
			since := h.Since.UTC()
			out.Since = &since
		}
		l.Holders = append(l.Holders, out)
	}
	return l
}

var lockTitles = []string{"NAME", "OWNER", "TOKEN", "KIND", "SINCE", "EXPIRES IN", "WAITERS"}

// rows are one for each holder.
func (l *lock) rows() [][]string {
	waiters := strconv.Itoa(l.Waiters)
	if len(l.Holders) == 0 {
		return [][]string{{l.Name, "", "", "", "", "", waiters}}
	}
	var all [][]string
	for _, h := range l.Holders {
		since, left := "", ""
		if h.Since != nil {
			since = h.Since.Format(time.RFC3339)
		}
		if h.ExpiresInMillis > 0 {
			left = (time.Duration(h.ExpiresInMillis) * time.Millisecond).Round(100 * time.Millisecond).String()
		}
		all = append(all, []string{l.Name, h.Owner, h.Token, h.Kind, since, left, waiters})
	}
	return all
}
