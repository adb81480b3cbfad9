package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/principal"
)

const tokenHelp = `Usage: fencelock token create PRINCIPAL [options]

Prints a new token for a client, and the line for the file of --principals, which contains a hash of the token. The
token itself is not stored. PRINCIPAL is token:NAME. A principal may have several tokens. A token is valid until its
line is removed, or until it expires.

  fencelock token create token:ci --expires-in 2160h

Options (durations like 12h):

{options}

Exit codes:

    0  done
   64  the command line is invalid
`

func defineToken(o *options) func([]string) error {
	expires := o.Duration("expires-in", 0, "the time after which the token expires; never if it is not given")
	s := &lookSettings{word: "token"}
	o.BoolVar(&s.json, "json", false, "print one JSON object")
	return func(args []string) error {
		if err := s.parse(args, "create", "PRINCIPAL"); err != nil {
			return err
		}
		who, err := principal.Parse(s.args[1])
		switch {
		case s.args[0] != "create":
			return fmt.Errorf("%q: want create", s.args[0])
		case err != nil:
			return fmt.Errorf("%q: %w", s.args[1], err)
		case !strings.HasPrefix(s.args[1], "token:"):
			return fmt.Errorf("%q: want a principal of the form token:NAME", s.args[1])
		case o.given("expires-in") && *expires < time.Second:
			return errors.New("--expires-in: want at least 1s")
		}
		var until time.Time
		if *expires > 0 {
			until = time.Now().Add(*expires)
		}
		text := principal.NewToken()
		line := principal.TokenLine(who, text, until)
		if !s.json {
			fmt.Printf("%s\n%s\n", text, line)
			return nil
		}
		return s.printOne(nil, struct {
			Token string `json:"token"`
			Line  string `json:"line"`
		}{text, line})
	}
}
