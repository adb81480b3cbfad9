// Package redisguard guards what is kept in Redis: the check runs in one script with the caller's write, so both happen or
// neither does, and nobody comes between.
//
//	guard, err := redisguard.New(client, nil)
//
//	var setBalance = redisguard.NewWrite(`return redis.call('SET', KEYS[1], ARGV[1])`)
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		claim := fencing.Claim{Resource: "accounts/42", Token: lease.Token()}
//		_, err := guard.Do(ctx, claim, setBalance, []string{"balance:{accounts/42}"}, 100)
//		return err // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now
//	})
//
// # What it takes
//
// One hash for each resource, without an expiry, fencing:{resource}. It must never go: a guard that forgets admits a stale
// writer. So the server must not evict keys that have no expiry (maxmemory-policy noeviction or volatile-*; see Probe).
//
// On Redis Cluster the guard's key and the write's must be in one slot: put {resource} into their names, as above. A
// resource with a } in its name cannot be used there.
//
// The check is as durable as the server is set up to be, and no more: token and write are in one entry of the append-only
// file, so both are lost or neither is. After a failover to a replica that had not heard of them, the replica admits what
// the master would have refused. Where that must not happen, guard data in a database.
//
// A client of go-redis repeats a script whose answer was lost, unless MaxRetries is -1: the same hold then writes twice.
// It looks at a context before it sends and, with ContextTimeoutEnabled, heeds the deadline while it waits.
package redisguard

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of the guard's keys. Default "fencing:".
	Prefix string
	// Space is the only one whose tokens are accepted (Lease.TokenSpace); it is remembered beside every token. Empty: any.
	Space string
}

// Guard guards the resources of one Redis. It is safe for concurrent use, and implements fencing.SpaceGuard for writes that
// need no atomicity; those that do, which is nearly all, use Do.
type Guard struct {
	client redis.Scripter
	prefix string
	space  string
}

var _ fencing.SpaceGuard = (*Guard)(nil)

// New returns a guard that uses the client, any of go-redis. It does no I/O. The error is a *fencing.InvalidError that names
// what cannot be used.
func New(client redis.Scripter, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if client == nil {
		return nil, fmt.Errorf("redisguard: new: %w", &fencing.InvalidError{What: "client", Why: "it is nil"})
	}
	if err := fencing.ValidateSpace(o.Space); err != nil {
		return nil, fmt.Errorf("redisguard: new: %w", err)
	}
	if strings.Contains(o.Prefix, "{") {
		return nil, fmt.Errorf("redisguard: new: %w", &fencing.InvalidError{
			What: "prefix", Value: o.Prefix, Why: "{ would take the place of the resource in the choice of a slot",
		})
	}
	g := &Guard{client: client, prefix: o.Prefix, space: o.Space}
	if g.prefix == "" {
		g.prefix = "fencing:"
	}
	return g, nil
}

// Key returns the key that the guard keeps for a resource.
func (g *Guard) Key(resource string) string { return g.prefix + "{" + resource + "}" }

// Write is what the caller does where a claim is admitted: a script in Lua. It is safe for concurrent use.
type Write struct{ script *redis.Script }

// NewWrite returns a Write. The source sees the KEYS and ARGV that were given to Do, and what it returns is Do's result. It
// must check what can be wrong before it changes anything: Redis does not undo what a script did before an error.
func NewWrite(lua string) *Write {
	return &Write{redis.NewScript("local function write(KEYS, ARGV)\n" + lua + "\nend\n" + check)}
}

// check answers {1, what write returned}, or {0, token, space} of what was seen. Tokens are compared as digits: as numbers
// of Lua they would be exact up to 2⁵³ only. The token is remembered before the write: should that fail half-way, what is
// known is higher than what was written, which is the safe side.
const check = `
local seen = redis.call('HMGET', KEYS[1], 'token', 'space')
local token, space = ARGV[1], ARGV[2]
if seen[1] then
	local older = #token < #seen[1] or (#token == #seen[1] and token < seen[1])
	if older or seen[2] ~= space then return {0, seen[1], seen[2]} end
end
redis.call('HSET', KEYS[1], 'token', token, 'space', space)
if not write then return {1} end
local keys, args = {}, {}
for i = 2, #KEYS do keys[i - 1] = KEYS[i] end
for i = 3, #ARGV do args[i - 2] = ARGV[i] end
return {1, write(keys, args)}
`

var (
	checkOnly = &Write{redis.NewScript("local write\n" + check)}
	look      = redis.NewScript(`
local seen = redis.call('HMGET', KEYS[1], 'token', 'space')
if not seen[1] then return {} end
return seen`)
	// accept takes the space to accept, and the one before.
	accept = redis.NewScript(`
local space = redis.call('HGET', KEYS[1], 'space')
if space ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'space', ARGV[1])
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'token', '0') end
return 1`)
)

// Check implements fencing.Guard. The write that follows is a step of its own, which others may overtake: see Do.
func (g *Guard) Check(ctx context.Context, resource string, token fencing.Token) error {
	return g.CheckFrom(ctx, "", resource, token)
}

// CheckFrom is Check for a token whose space is known.
func (g *Guard) CheckFrom(ctx context.Context, space, resource string, token fencing.Token) error {
	_, err := g.run(ctx, fencing.Claim{Resource: resource, Token: token, Space: space}, checkOnly, nil, nil)
	return err
}

// Do checks the claim and, if it is admitted, writes, in one step of the server; it returns what write returned, as
// go-redis reads it, and nil for a nil. An error of the write is one of the server's and not a refusal; the token is
// remembered all the same.
func (g *Guard) Do(ctx context.Context, c fencing.Claim, write *Write, keys []string, args ...any) (any, error) {
	if write == nil {
		return nil, fmt.Errorf("redisguard: do %q: %w", c.Resource, &fencing.InvalidError{What: "write", Why: "it is nil"})
	}
	return g.run(ctx, c, write, keys, args)
}

func (g *Guard) run(ctx context.Context, c fencing.Claim, write *Write, keys []string, args []any) (any, error) {
	fail := func(err error) (any, error) { return nil, fmt.Errorf("redisguard: check %q: %w", c.Resource, err) }
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("redisguard: check: %w", err)
	}
	if fencing.Refused(c, g.space) != nil {
		// The key is read only to tell its token. Without it the claim is refused as well.
		seen, err := g.seen(ctx, c.Resource)
		if err != nil {
			seen = fencing.Seen{Space: g.space}
		}
		return nil, fencing.Judge(c, g.space, seen)
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	answer, err := write.script.Run(ctx, g.client, append([]string{g.Key(c.Resource)}, keys...),
		append([]any{c.Token.String(), g.space}, args...)...).Slice()
	if err != nil {
		return fail(err)
	}
	if admitted, _ := answer[0].(int64); admitted == 1 {
		if len(answer) < 2 {
			return nil, nil
		}
		return answer[1], nil
	}
	seen, err := parse(answer[1:])
	if err != nil {
		return fail(err)
	}
	if err := fencing.Judge(c, g.space, seen); err != nil {
		return nil, err
	}
	return fail(fmt.Errorf("the server refused %v, and %+v does not say why", c.Token, seen))
}

func (g *Guard) seen(ctx context.Context, resource string) (fencing.Seen, error) {
	answer, err := look.Run(ctx, g.client, []string{g.Key(resource)}).Slice()
	if err != nil {
		return fencing.Seen{}, err
	}
	if len(answer) == 0 {
		return fencing.Seen{Space: g.space}, nil
	}
	return parse(answer)
}

func parse(answer []any) (fencing.Seen, error) {
	if len(answer) == 2 {
		digits, isText := answer[0].(string)
		space, isTextToo := answer[1].(string)
		token, err := fencing.ParseToken(digits)
		if isText && isTextToo && err == nil {
			return fencing.Seen{Token: token, Space: space}, nil
		}
	}
	return fencing.Seen{}, fmt.Errorf("the key holds %q, which no guard wrote", answer)
}

// AcceptSpace makes the resource one of the space to, whose tokens begin anew, if it is one of the space from, and reports
// whether it was. From then on guards with the space from are refused. It is an administrator's act: after the lock service
// was replaced or restored, and when no holder of the old one can write any more. An empty from names what guards without a
// space have written: the token then stays.
func (g *Guard) AcceptSpace(ctx context.Context, resource, from, to string) (bool, error) {
	err := fencing.Claim{Resource: resource, Space: to}.Validate()
	if err == nil && (to == "" || to == from) {
		err = &fencing.InvalidError{What: "space", Value: to, Why: "it is empty, or the one before"}
	}
	if err != nil {
		return false, fmt.Errorf("redisguard: accept space %q: %w", to, err)
	}
	changed, err := accept.Run(ctx, g.client, []string{g.Key(resource)}, to, from).Bool()
	if err != nil {
		return false, fmt.Errorf("redisguard: accept space %q for %q: %w", to, resource, err)
	}
	return changed, nil
}

// ErrEvicts: the server throws keys away that have no expiry, those of guards among them.
var ErrEvicts = errors.New("redisguard: the server may evict what a guard remembers")

// Probe asks the server whether it may evict the keys of guards, and answers ErrEvicts if so. It takes the INFO command.
func Probe(ctx context.Context, client redis.Cmdable) error {
	text, err := client.Info(ctx).Result()
	if err != nil {
		return fmt.Errorf("redisguard: probe: %w", err)
	}
	info := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		info[key] = value
	}
	limit, policy := info["maxmemory"], info["maxmemory_policy"]
	if limit != "" && limit != "0" && strings.HasPrefix(policy, "allkeys-") {
		return fmt.Errorf("%w: maxmemory is %s, maxmemory-policy %s, want noeviction or volatile-*", ErrEvicts, limit, policy)
	}
	return nil
}
