package replica

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"slices"

	"github.com/hashicorp/go-hclog"
)

// raftLog makes raft write to a slog.Logger, one level lower than in raft: its errors often mean only that a member is
// down, and its other messages are for readers who know raft. The handler filters.
type raftLog struct {
	to      *slog.Logger
	name    string
	implied []any
}

func newRaftLog(to *slog.Logger) hclog.Logger { return &raftLog{to: to, name: "raft"} }

var slogLevels = map[hclog.Level]slog.Level{
	hclog.Trace: slog.LevelDebug - 8,
	hclog.Debug: slog.LevelDebug - 4,
	hclog.Info:  slog.LevelDebug,
	hclog.Warn:  slog.LevelInfo,
	hclog.Error: slog.LevelWarn,
}

// Log implements hclog.Logger.
func (l *raftLog) Log(level hclog.Level, msg string, args ...any) {
	if !l.enabled(level) {
		return
	}
	plain := make([]any, len(args))
	for i, arg := range args {
		if f, ok := arg.(hclog.Format); ok && len(f) > 0 {
			arg = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
		plain[i] = arg
	}
	l.to.Log(context.Background(), slogLevels[level], l.name+": "+msg, plain...)
}

func (l *raftLog) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }
func (l *raftLog) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }
func (l *raftLog) Info(msg string, args ...any)  { l.Log(hclog.Info, msg, args...) }
func (l *raftLog) Warn(msg string, args ...any)  { l.Log(hclog.Warn, msg, args...) }
func (l *raftLog) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

func (l *raftLog) enabled(level hclog.Level) bool {
	return l.to.Enabled(context.Background(), slogLevels[level])
}

func (l *raftLog) IsTrace() bool { return l.enabled(hclog.Trace) }
func (l *raftLog) IsDebug() bool { return l.enabled(hclog.Debug) }
func (l *raftLog) IsInfo() bool  { return l.enabled(hclog.Info) }
func (l *raftLog) IsWarn() bool  { return l.enabled(hclog.Warn) }
func (l *raftLog) IsError() bool { return l.enabled(hclog.Error) }

func (l *raftLog) ImpliedArgs() []any { return l.implied }
func (l *raftLog) Name() string       { return l.name }

func (l *raftLog) With(args ...any) hclog.Logger {
	return &raftLog{to: l.to.With(args...), name: l.name, implied: slices.Concat(l.implied, args)}
}

func (l *raftLog) Named(name string) hclog.Logger { return l.ResetNamed(l.name + "." + name) }

func (l *raftLog) ResetNamed(name string) hclog.Logger {
	return &raftLog{to: l.to, name: name, implied: l.implied}
}

// SetLevel has no effect: the handler decides.
func (l *raftLog) SetLevel(hclog.Level) {}

func (l *raftLog) GetLevel() hclog.Level {
	for _, level := range []hclog.Level{hclog.Trace, hclog.Debug, hclog.Info, hclog.Warn} {
		if l.enabled(level) {
			return level
		}
	}
	return hclog.Error
}

func (l *raftLog) StandardLogger(o *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(l.StandardWriter(o), "", 0)
}

func (l *raftLog) StandardWriter(*hclog.StandardLoggerOptions) io.Writer { return raftLogWriter{l} }

type raftLogWriter struct{ l *raftLog }

func (w raftLogWriter) Write(text []byte) (int, error) {
	w.l.Info(string(text))
	return len(text), nil
}
