package redis

import (
	"context"
	"errors"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// hooks lets the hooks of a handed-in client (AddHook) see what goes on the driver's own lines: the last hook of all
// does not pass lock commands on to the client, but to a line. They see one command for each step, with the name of the
// step and the lock's key; the rest moves the lock, and is not shown.
type hooks struct{ client goredis.UniversalClient }

// newHooks adds the last hook to client. A copy of the client would have none of its hooks.
func newHooks(client goredis.UniversalClient) *hooks {
	client.AddHook(toLine{})
	return &hooks{client}
}

// lockCmd is one that goes on a line.
type lockCmd struct {
	*goredis.Cmd
	carry func(context.Context) error
}

// NoRetry keeps a cluster client from repeating it.
func (lockCmd) NoRetry() bool { return true }

// process shows the hooks one command that carry runs.
func (h *hooks) process(ctx context.Context, name, key string, carry func(context.Context) error) error {
	ran := false
	var outcome error
	cmd := lockCmd{goredis.NewCmd(ctx, "fencelock."+name, key), func(ctx context.Context) error {
		ran = true
		outcome = carry(ctx)
		return outcome
	}}
	if err := h.client.Process(ctx, cmd); !ran {
		if err == nil {
			err = errHook
		}
		return &redisconn.Failure{Cause: err}
	}
	return outcome // whatever the hooks make of it
}

var errHook = errors.New("a hook of the client did not pass the command on")

type toLine struct{}

func (toLine) DialHook(next goredis.DialHook) goredis.DialHook { return next }

func (toLine) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook {
	return func(ctx context.Context, cmd goredis.Cmder) error {
		if c, ok := cmd.(lockCmd); ok {
			return c.carry(ctx)
		}
		return next(ctx, cmd)
	}
}

func (toLine) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}
