// Package logs writes what happens to the locks of a client to a slog.Logger.
//
//	locks, err := fencelock.ForEfficiency(driver, &fencelock.Options{Observer: logs.New(nil)})
package logs

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/fencelock/fencelock"
)

// New returns an observer that writes one record for each event to l, or to slog.Default if l is nil. The logger gets the
// context of the acquire, so that a handler finds the trace there.
//
//	Error   lost
//	Warn    suspect, forced, failed, abandoned, shed, released with an error
//	Info    elected, deposed, lost because the client was closed or the request id was reused
//	Debug   waiting, acquired, contended, renewed, released, failed because the caller cancelled
//
// A handler that drops a level makes its events cheap: an event below it costs about as much as no event.
func New(l *slog.Logger) fencelock.Observer {
	return fencelock.ObserverFunc(func(ctx context.Context, e fencelock.Event) {
		to := l
		if to == nil {
			to = slog.Default()
		}
		if level := levelOf(&e); to.Enabled(ctx, level) {
			to.LogAttrs(ctx, level, message(e.Type), attributes(&e)...)
		}
	})
}

func levelOf(e *fencelock.Event) slog.Level {
	switch e.Type {
	case fencelock.EventLost:
		if e.Reason == fencelock.ReasonClosed || e.Reason == fencelock.ReasonReplaced {
			return slog.LevelInfo
		}
		return slog.LevelError
	case fencelock.EventSuspect, fencelock.EventForced, fencelock.EventAbandoned, fencelock.EventShed:
		return slog.LevelWarn
	case fencelock.EventFailed:
		if errors.Is(e.Err, context.Canceled) {
			return slog.LevelDebug
		}
		return slog.LevelWarn
	case fencelock.EventReleased:
		if e.Err != nil {
			return slog.LevelWarn
		}
		return slog.LevelDebug
	case fencelock.EventWaiting, fencelock.EventAcquired, fencelock.EventContended, fencelock.EventRenewed:
		return slog.LevelDebug
	}
	return slog.LevelInfo // elections, and types that this version does not know
}

func message(t fencelock.EventType) string {
	switch t {
	case fencelock.EventWaiting:
		return "acquire waits for the lock"
	case fencelock.EventAcquired:
		return "lock acquired"
	case fencelock.EventContended:
		return "lock is held by another"
	case fencelock.EventFailed:
		return "acquire failed"
	case fencelock.EventRenewed:
		return "lock renewed"
	case fencelock.EventSuspect:
		return "lock not renewed, trying again"
	case fencelock.EventLost:
		return "lock lost"
	case fencelock.EventReleased:
		return "lock released"
	case fencelock.EventElected:
		return "leadership begins"
	case fencelock.EventDeposed:
		return "leadership ended"
	case fencelock.EventForced:
		return "forced release"
	case fencelock.EventAbandoned:
		return "release in the background dropped"
	case fencelock.EventShed:
		return "events of locks dropped"
	}
	return "lock " + string(t)
}

// attributes returns the fields of the event, except for zero ones.
func attributes(e *fencelock.Event) []slog.Attr {
	all := make([]slog.Attr, 0, 16)
	text := func(key, value string) {
		if value != "" {
			all = append(all, slog.String(key, value))
		}
	}
	span := func(key string, d time.Duration) {
		if d != 0 {
			all = append(all, slog.Duration(key, d))
		}
	}
	text("name", e.Name)
	if e.HoldID != "" {
		text("kind", e.Kind.String())
	}
	text("hold", e.HoldID)
	if e.Token.Valid() {
		text("token", e.Token.String())
	}
	text("owner", e.Owner)
	text("driver", e.Driver)
	if e.Driver != "" {
		text("tier", e.Tier.String())
	}
	if e.Holder != nil {
		text("holder", e.Holder.Owner)
		text("holder_hold", e.Holder.HoldID)
	}
	span("wait", e.Wait)
	span("took", e.Took)
	span("held", e.Held)
	span("left", e.Left)
	text("reason", string(e.Reason))
	text("by", e.By)
	text("why", e.Why)
	if e.Count != 0 {
		all = append(all, slog.Int("count", e.Count))
	}
	if e.Err != nil {
		text("error", e.Err.Error())
	}
	return all
}
