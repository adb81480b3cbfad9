package lines

// This file shows lock commands to the hooks of a client that was handed in. Tracing and metrics of go-redis are hooks
// (AddHook), and without this they would not see the driver's traffic, which uses its own connections.
//
// The way round is the client's own hook chain: the driver adds one last hook, and calls Process with a command of a
// private type. Every earlier hook sees the command; the last one carries it on a line in place of the client's pool.

import (
	"context"
	"errors"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// hooks lets the hooks of a handed-in client see the commands on the driver's own lines. They see one command for each
// step, named "fencelock." and the step's letter, with the lock's key. The rest of the arguments moves the lock: a
// reader of them could release it, so they are not shown.
type hooks struct{ client goredis.UniversalClient }

// ShowTo has the hooks of client see all steps from now on.
func (ls *Lines) ShowTo(client goredis.UniversalClient) { ls.hooks = newHooks(client) }

// newHooks adds the last hook to client. It needs the client itself: a copy made from its options lacks its
// hooks.
func newHooks(client goredis.UniversalClient) *hooks {
	client.AddHook(toLine{})
	return &hooks{client}
}

// lockCmd is a command that is sent on a line. By its type the last hook recognizes the driver's commands.
type lockCmd struct {
	*goredis.Cmd
	carry func(context.Context) error
}

// NoRetry keeps a cluster client from repeating the command: the driver repeats steps itself, and knows which steps may
// be repeated. A step that the client repeated would count as sent once.
func (lockCmd) NoRetry() bool { return true }

// process shows the hooks one command that carry runs, and returns carry's error, whatever error the hooks return:
// the outcome of a lock must not depend on a hook's opinion. A hook that does not pass the command on is the one
// exception. The command is then not sent, and the call fails with the hook's error.
func (h *hooks) process(ctx context.Context, name, key string, carry func(context.Context) error) error {
	// The hooks may call the command more than once, or never.
	ran := false
	var outcome error
	cmd := lockCmd{goredis.NewCmd(ctx, "fencelock."+name, key), func(ctx context.Context) error {
		ran = true
		outcome = carry(ctx)
		return outcome
	}}
	// A hook has refused the command, or lost it: it was not sent.
	if err := h.client.Process(ctx, cmd); !ran {
		if err == nil {
			err = errHook
		}
		return &redisconn.Failure{Cause: err}
	}
	return outcome // whatever error the hooks returned
}

// errHook is the error of a hook that neither passed the command on nor returned an error.
var errHook = errors.New("a hook of the client did not forward the command")

// toLine is the last hook: it carries lock commands on a line and lets everything else pass to the client.
type toLine struct{}

// DialHook returns next.
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

// ProcessPipelineHook returns next: the driver sends no pipelines through the client.
func (toLine) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}
