package main

import (
	"context"
	"errors"

	"github.com/fencelock/fencelock/backend"
)

const forceReleaseHelp = `Usage: fencelock force-release NAME --reason TEXT [options]

Takes the lock NAME away from all who hold it. Whoever waits for it gets it at once, while the former holder may still
be at work: only a fencing token keeps its writes out. Make sure that it is dead, or that this is better than waiting.

Options:

  --reason TEXT  why, for the holder and for those who look later
` + lookOptions + `
Exit codes:

    0  the lock was taken away
    1  nobody holds NAME
   64  the command line makes no sense, or the backend cannot do it
   69  the lock service cannot be reached, or is not fit for locks; or it did not answer, and may have done it
`

// forceReleaseMain is "fencelock force-release".
func forceReleaseMain(args []string) int {
	s, f := newLook("force-release")
	reason := f.String("reason", "", "")
	err := s.parse(f, args, "NAME")
	if err == nil && *reason == "" {
		err = errors.New("--reason is missing")
	}
	return s.run(err, forceReleaseHelp, func(ctx context.Context) error {
		return with(ctx, s, backend.CapForceRelease, func(ctx context.Context, d backend.ForceReleaser) error {
			return s.forceRelease(ctx, d, s.args[0], *reason)
		})
	})
}

func (s *lookSettings) forceRelease(ctx context.Context, d backend.ForceReleaser, name, reason string) error {
	err := d.ForceRelease(ctx, name, reason)
	switch {
	case errors.Is(err, backend.ErrNotHeld):
		return nobodyError(name)
	case err != nil:
		return err
	}
	done := event{Type: string(backend.ChangeForceReleased), Name: name, Reason: reason}
	return s.printOne([]string{"NAME", "EVENT", "REASON"}, done, []string{done.Name, done.Type, done.Reason})
}
