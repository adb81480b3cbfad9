package redisguard_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/redisguard"
	"github.com/fencelock/fencelock/internal/testtier"
)

// format1 is the script of version 9d2c49a of this package, with a write.
var format1 = redis.NewScript(`local function write(KEYS, ARGV)
redis.call('SET', KEYS[1], ARGV[1])
end

local n = tonumber(ARGV[1])
local function less(a, b) return #a < #b or (#a == #b and a < b) end
local function read(key, ...)
	local got = redis.call('HMGET', key, ...)
	for i = 1, #got do got[i] = got[i] or '' end
	return got
end
local terms, first = {ARGV[3], ARGV[4], ARGV[5]}, n + 1
if ARGV[2] == '1' then
	terms, first = read(KEYS[n + 1], 'epoch', 'space', 'token'), n + 2
end
local fresh = terms[1] == ''
if fresh then terms = {'0', ARGV[7], '0'} end
local remember, repeated = {}, false
for i = 1, n do
	local token, space, sequence = ARGV[3 * i + 3], ARGV[3 * i + 4], ARGV[3 * i + 5]
	local seen = read(KEYS[i], 'epoch', 'token', 'sequence')
	if fresh and seen[2] ~= '' then return redis.error_reply('FENCELOCK_TERMS_LOST the terms are gone') end
	for j = 1, 3 do if seen[j] == '' then seen[j] = '0' end end
	local refused = {0, i, terms[1], terms[2], terms[3], seen[1], seen[2], seen[3]}
	if less(terms[1], seen[1]) then return refused end
	if less(seen[1], terms[1]) then seen = {terms[1], '0', '0'} end
	if token == '0' or (terms[2] ~= '' and space ~= terms[2]) or less(token, terms[3]) or less(token, seen[2]) then
		return refused
	end
	if token ~= seen[2] then
		seen = {terms[1], token, '0'}
	elseif sequence ~= '0' and sequence == seen[3] then
		repeated = i
	elseif sequence ~= '0' and less(sequence, seen[3]) then
		return refused
	end
	remember[i] = {seen[1], seen[2], seen[3], sequence}
end
if repeated then
	if not write then return {0, repeated, terms[1], terms[2], terms[3], unpack(remember[repeated], 1, 3)} end
	local answer = redis.call('HGET', KEYS[repeated], 'answer')
	return {2, answer and cmsgpack.unpack(answer)}
end
if fresh and ARGV[2] == '1' then
	redis.call('HSET', KEYS[n + 1], 'epoch', terms[1], 'space', terms[2], 'token', terms[3])
end
for i = 1, n do
	redis.call('HSET', KEYS[i], 'epoch', remember[i][1], 'token', remember[i][2], 'sequence', remember[i][3])
end
local reply
if write then
	local keys, args = {}, {}
	for i = first, #KEYS do keys[i - first + 1] = KEYS[i] end
	for i = 3 * n + 6, #ARGV do args[i - 3 * n - 5] = ARGV[i] end
	reply = write(keys, args)
	if type(reply) == 'table' and reply.err then return redis.error_reply(reply.err) end
end
for i = 1, n do
	if remember[i][4] ~= '0' then
		redis.call('HSET', KEYS[i], 'sequence', remember[i][4], 'answer', cmsgpack.pack(reply))
	end
end
return {1, reply}
`)

// look1 is what that version says to Redis Cluster before: epoch, space and floor of the terms.
var look1 = redis.NewScript(`
local got = redis.call('HMGET', KEYS[1], 'epoch', 'space', 'token', 'sequence')
for i = 1, 4 do got[i] = got[i] or '' end
return got`)

func TestOlderWriters(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: containers.Redis(t).Addr(), MaxRetries: -1})
	t.Cleanup(func() { client.Close() })
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": client.Options().Addr}})
	t.Cleanup(func() { ring.Close() })
	for name, c := range map[string]redis.UniversalClient{"one": client, "cluster": ring} {
		t.Run(name, func(t *testing.T) {
			long := time.Second
			if testtier.Wanted() {
				long = time.Minute
			}
			guardtest.RunOlder(t, space, long, func(t testing.TB, round int) *guardtest.Older {
				return older(t, client, c, fmt.Sprintf("%s-%d:", name, round))
			})
		})
	}
}

func older(t testing.TB, client *redis.Client, by redis.UniversalClient, prefix string) *guardtest.Older {
	options := &redisguard.Options{Prefix: prefix}
	guard := must(t, by, options)
	value := "value:" + prefix
	return &guardtest.Older{
		Keeper: guard,
		Keep: func(ctx context.Context, terms fencing.Terms, seen fencing.Seen) error {
			return errors.Join(
				client.HSet(ctx, guard.TermsKey(), "epoch", terms.Epoch, "space", terms.Space, "token", uint64(terms.Floor)).Err(),
				client.HSet(ctx, guard.Key("older"), "epoch", seen.Epoch, "token", uint64(seen.Token), "sequence",
					seen.Sequence).Err(),
			)
		},
		Old: func(ctx context.Context, c fencing.Claim, text string) error {
			keys := []string{guard.Key(c.Resource), guard.TermsKey(), value}
			args := []any{1, "1", "", "", "", uint64(c.Token), c.Space, 0, text}
			if by != redis.UniversalClient(client) {
				terms, err := look1.Run(ctx, client, []string{guard.TermsKey()}).StringSlice()
				if err != nil {
					return err
				}
				if terms[0] == "" { // that version sets them in a step before
					err := client.HSet(ctx, guard.TermsKey(), "epoch", "0", "space", c.Space, "token", "0").Err()
					if err != nil {
						return err
					}
					terms = []string{"0", c.Space, "0"}
				}
				keys = []string{guard.Key(c.Resource), value}
				args = append([]any{1, "0", terms[0], terms[1], terms[2]}, args[5:]...)
			}
			answer, err := format1.Run(ctx, client, keys, args...).Slice()
			if err != nil {
				return err
			}
			if answer[0] != int64(1) {
				return errors.New("refused")
			}
			return nil
		},
		New: func(ctx context.Context, c fencing.Claim, text string) error {
			_, err := must(t, by, options).Do(ctx, c, set, []string{value}, text)
			return err
		},
		Read: func(ctx context.Context) (string, error) { return client.Get(ctx, value).Result() },
	}
}
