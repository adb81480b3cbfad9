package redis

import (
	"context"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// scriptCmd is an EVALSHA that the cluster client never sends twice by itself: after a fault it is not known whether
// the first one was run.
type scriptCmd struct{ *goredis.Cmd }

func (scriptCmd) NoRetry() bool { return true }

// send runs a batch in one round trip (on a cluster, one to each node) and completes its steps. The callers' contexts
// do not reach the client: one caller's end must not take the connection away from the others.
func (b *batcher) send(x *exchange) {
	ctx := redisconn.WithDeadline(context.Background(), latest(x.batch))
	per := maxSteps
	if b.cluster.Load() {
		per = 1 // each name has its own slot
	}
	sentAt := b.clock.Now()
	for _, s := range x.batch {
		s.sentAt = sentAt
	}
	x.args = x.args[:0]
	b.drain.begin()
	defer b.drain.end()
	if len(x.batch) <= per {
		b.sendOne(ctx, b.client, x)
	} else {
		b.sendMany(ctx, x, per)
	}
	clear(x.args)
}

// latest returns the last of the steps' deadlines, at most flightTime from now. It is a little later than the callers',
// who leave by themselves: the connection's end must not come first and hide that the context was the reason.
func latest(batch []*step) time.Time {
	bound := time.Now().Add(flightTime)
	var last time.Time
	for _, s := range batch {
		if s.deadline.IsZero() || s.deadline.After(bound) {
			return bound
		}
		if s.deadline.After(last) {
			last = s.deadline
		}
	}
	return last.Add(20 * time.Millisecond)
}

// sendOne sends one script call, without the cost of a pipeline.
func (b *batcher) sendOne(ctx context.Context, client goredis.UniversalClient, x *exchange) {
	cmd := b.command(ctx, x, x.batch, evalsha...)
	cmd.SetErr(client.Process(ctx, cmd))
	if missing(cmd.Err()) {
		cmd = b.command(ctx, x, x.batch, eval...)
		cmd.SetErr(client.Process(ctx, cmd))
	}
	b.complete(x.batch, cmd.Cmd)
}

// sendMany sends a pipeline of script calls, of per steps each.
func (b *batcher) sendMany(ctx context.Context, x *exchange, per int) {
	var groups [][]*step
	var cmds, again []scriptCmd
	for rest := x.batch; len(rest) > 0; {
		n := min(per, len(rest))
		groups = append(groups, rest[:n])
		cmds = append(cmds, b.command(ctx, x, rest[:n], evalsha...))
		rest = rest[n:]
	}
	b.pipe(ctx, cmds)
	for i, cmd := range cmds {
		if missing(cmd.Err()) { // the server restarted, or its scripts were flushed: it has not run
			cmds[i] = b.command(ctx, x, groups[i], eval...)
			again = append(again, cmds[i])
		}
	}
	b.pipe(ctx, again)
	for i, cmd := range cmds {
		b.complete(groups[i], cmd.Cmd)
	}
}

// pipe runs script calls in one pipeline; each keeps its own error.
func (b *batcher) pipe(ctx context.Context, cmds []scriptCmd) {
	if len(cmds) == 0 {
		return
	}
	pipe := b.client.Pipeline()
	for _, cmd := range cmds {
		if err := pipe.Process(ctx, cmd); err != nil {
			cmd.SetErr(err)
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		for _, cmd := range cmds {
			if cmd.Err() == nil && cmd.Val() == nil {
				cmd.SetErr(err)
			}
		}
	}
}

func missing(err error) bool { return err != nil && goredis.HasErrorPrefix(err, "NOSCRIPT") }

// Arguments that are the same in every call, as values of type any, and pointers in place of strings below: converting
// a string to any allocates, and this is the path that every call takes.
var (
	evalsha = []any{"evalsha", redisscript.SHA}
	eval    = []any{"eval", redisscript.Source} // the source travels along, and the server keeps it
	counts  = []any{"0", "1", "2", "3"}
	single  = any("0")
	sharded = any("1")
)

// command writes one call of the script, with its arguments in x's memory.
func (b *batcher) command(ctx context.Context, x *exchange, batch []*step, verb ...any) scriptCmd {
	start := len(x.args)
	args := append(x.args, verb...)
	names := len(batch)
	for _, s := range batch {
		names += len(s.others)
	}
	where := single
	if b.cluster.Load() {
		where = sharded
	}
	if where == sharded && names == 1 && batch[0].code == redisscript.Renew {
		// One key is found wherever it is while its slot moves, which may take longer than a TTL.
		args = append(args, 1, &batch[0].keys.Lock)
	} else {
		args = appendKeys(append(args, 3*names), batch)
	}
	args = append(args, &b.prefix, where)
	for _, s := range batch {
		list := s.arguments()
		args = append(args, &s.code)
		if len(list) < len(counts) {
			args = append(args, counts[len(list)])
		} else {
			args = append(args, len(list))
		}
		for i := range list {
			args = append(args, &list[i])
		}
	}
	x.args = args
	cmd := goredis.NewCmd(ctx, args[start:len(args):len(args)]...)
	cmd.SetFirstKeyPos(3)
	return scriptCmd{cmd}
}

func appendKeys(args []any, batch []*step) []any {
	for _, s := range batch {
		args = append(args, &s.keys.Lock, &s.keys.Queue, &s.keys.Seen)
		for i := range s.others {
			args = append(args, &s.others[i].Lock, &s.others[i].Queue, &s.others[i].Seen)
		}
	}
	return args
}

// complete hands each step its answer.
func (b *batcher) complete(batch []*step, cmd *goredis.Cmd) {
	answers, err := cmd.Slice()
	var drained <-chan struct{}
	if err == nil && len(answers) != len(batch) {
		err = &redisconn.Failure{Cause: redisconn.ErrAnswer, Sent: true}
	}
	if err != nil {
		f := redisconn.FailureOf(err)
		if err = f; !f.Fatal {
			b.fault()
		}
		if f.Sent {
			drained = b.drain.drained()
		}
	}
	for i, s := range batch {
		if err != nil {
			s.err, s.drained = err, drained
		} else if text, isError := answers[i].(string); isError {
			s.err = redisconn.FailureOf(redisconn.ServerError(text))
		} else {
			s.answer = answers[i]
		}
		s.done <- struct{}{}
	}
}
