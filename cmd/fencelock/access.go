package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
	"github.com/fencelock/fencelock/internal/tlsfiles"
)

// accessFiles are the files with rules and principals.
type accessFiles struct{ rules, principals string }

func (a *accessFiles) define(o *options) {
	o.StringVar(&a.rules, rulesOption, "", "a `FILE` with access rules, see docs/SECURITY.md; all other calls are "+
		"denied. With --principals alone, the rules of the bundled server decide, which must grant the certificate "+
		"of this gateway the right proxy")
	o.StringVar(&a.principals, principalsOption, "", "a `FILE` that maps tokens and certificates to principals; this "+
		"file and --rules are reloaded when they change")
}

// rulesOption names a file of rules, and principalsOption one of principals.
const (
	rulesOption      = "rules"
	principalsOption = "principals"
)

// open reads the files. It returns nil without files. bundled: the lock service may have rules, so that principals
// without rules are those for it. changed gets each file that is read again later, as an audit event with the digest of
// the rules.
func (a *accessFiles) open(
	log *slog.Logger, bundled bool, changed func(event, file, rules string),
) (access *gateway.Access, files []reloader, err error) {
	switch {
	case a.rules == "" && a.principals == "":
		return nil, nil, nil
	case a.principals == "":
		return nil, nil, errors.New("--rules needs --principals")
	case a.rules == "" && !bundled:
		return nil, nil, errors.New("--principals needs --rules, except in front of the bundled server")
	}
	access, digest := &gateway.Access{}, func() string { return "" }
	if a.rules != "" {
		all, err := reread("--rules", a.rules, rules.Parse, log, func(r *rules.Rules) {
			changed("set-rules", a.rules, r.Digest())
		})
		if err != nil {
			return nil, nil, err
		}
		access.Rules, digest = all.Current, func() string { return all.Current().Digest() }
		files = append(files, all)
	}
	proofs, err := reread("--principals", a.principals, principal.ParseProofs, log, func(*principal.Proofs) {
		changed("set-principals", a.principals, digest())
	})
	if err != nil {
		return nil, nil, err
	}
	access.Proofs = proofs.Current
	return access, append(files, proofs), nil
}

// reread reads a file that an option names, and again when it has changed. A file that makes no sense then leaves the
// earlier contents in use. changed gets the new contents.
func reread[T any](
	option, path string, parse func([]byte) (T, error), log *slog.Logger, changed func(T),
) (*tlsfiles.Files[T], error) {
	return tlsfiles.Read(func() (T, error) { return parsed(option, path, parse) }, func(value T, err error) {
		if err != nil {
			log.Warn("a changed file is invalid: the previous version stays in use", "error", err)
			return
		}
		log.Info("a file was reloaded", "option", option, "file", path)
		changed(value)
	}, path)
}

// parsed reads a file that an option names.
func parsed[T any](option, path string, parse func([]byte) (T, error)) (said T, err error) {
	text, err := os.ReadFile(path)
	if err == nil {
		said, err = parse(text)
	}
	if err != nil {
		return said, fmt.Errorf("%s %s: %w", option, path, err)
	}
	return said, nil
}
