package redis

// This file shows lock commands to the hooks of a client that was handed in. Tracing and metrics of go-redis are hooks
// (AddHook), and without this they would see none of the driver's traffic, which goes on connections of its own.
//
// The way round is the client's own hook chain: the driver adds one last hook, and calls Process with a command of a
// private type. Every earlier hook sees the command; the last one carries it on a line in place of the client's pool.

import (
	"context"
	"errors"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// hooks lets the hooks of a handed-in client see what goes on the driver's own lines. They see one command for each
// step, named "fencelock." and the step's letter, with the lock's key. The rest of the arguments moves the lock:
// anybody who reads them could release it, so they are not shown.
type hooks struct{ client goredis.UniversalClient }

// newHooks adds the last hook to client. The client itself is needed: a copy made from its options has none of its
// hooks.
func newHooks(client goredis.UniversalClient) *hooks {
	client.AddHook(toLine{})
	return &hooks{client}
}

// lockCmd is a command that goes on a line. Its type tells the last hook which commands are the driver's.
type lockCmd struct {
	*goredis.Cmd
	carry func(context.Context) error
}

// NoRetry keeps a cluster client from repeating the command: the driver repeats steps by itself, and knows which may
// be. A step that was repeated below it would count as sent once.
func (lockCmd) NoRetry() bool { return true }

// process shows the hooks one command that carry runs, and returns what carry returned, whatever the hooks make of it:
// the outcome of a lock must not depend on a hook's opinion. A hook that does not pass the command on is the one
// exception. Then nothing was sent, and the call fails with the hook's error.
func (h *hooks) process(ctx context.Context, name, key string, carry func(context.Context) error) error {
	// The hooks may call the command more than once, or never.
	ran := false
	var outcome error
	cmd := lockCmd{goredis.NewCmd(ctx, "fencelock."+name, key), func(ctx context.Context) error {
		ran = true
		outcome = carry(ctx)
		return outcome
	}}
	// A hook has refused the command, or lost it: nothing was sent.
	if err := h.client.Process(ctx, cmd); !ran {
		if err == nil {
			err = errHook
		}
		return &redisconn.Failure{Cause: err}
	}
	return outcome // whatever the hooks make of it
}

// errHook is the error of a hook that neither passed the command on nor said why.
var errHook = errors.New("a hook of the client did not pass the command on")

// toLine is the last hook: it carries lock commands on a line and lets everything else pass to the client.
type toLine struct{}

// DialHook changes nothing.
func (toLine) DialHook(next goredis.DialHook) goredis.DialHook { return next }

// ProcessHook carries a lock command instead of sending it by the client.
func (toLine) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook {
	return func(ctx context.Context, cmd goredis.Cmder) error {
		if c, ok := cmd.(lockCmd); ok {
			return c.carry(ctx)
		}
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook changes nothing: the driver sends no pipelines through the client.
func (toLine) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}
