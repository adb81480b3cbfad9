package redisguard

import "github.com/redis/go-redis/v9"

// Write is what the caller does where a claim is admitted: a script in Lua. It is safe for concurrent use.
type Write struct{ script *redis.Script }

// NewWrite returns a Write. The source sees the KEYS and ARGV that were given to Do, and what it returns is Do's
// result. It must check what can be wrong before it changes anything: Redis does not undo what a script did before an
// error.
func NewWrite(lua string) *Write {
	return &Write{redis.NewScript("local function write(KEYS, ARGV)\n" + lua + "\nend\n" + check)}
}

// check is fencing.JudgeAll in Lua. Numbers are compared as digits: as numbers of Lua they would be exact up to 2⁵³
// only.
//
// KEYS: one for each claim, that of the terms if ARGV[2] is 1, and the write's. ARGV: the number of claims; whether the
// key of the terms is among the KEYS, and else epoch, space and floor; token, space and sequence of each claim; the
// write's.
//
// It answers {1, what write returned}; {2, what it returned the first time} for a repeated write; or {0, the claim's
// number, epoch, space and floor of the terms, epoch, token and sequence of what was seen}, which fencing.Judge turns
// into the error. Tokens are remembered before the write: should that fail half-way, what is known is higher than what
// was written, which is the safe side. Sequence and answer are remembered after it: a write that failed may be
// repeated.
const check = `
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
	if fresh and seen[2] ~= '' then return redis.error_reply('` + termsLost + `') end
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
`

// Errors of the scripts. Without a word behind the code Redis 7 puts ERR before it.
const (
	changed   = "FENCELOCK_CHANGED the value was changed" // since Update has read it
	termsLost = "FENCELOCK_TERMS_LOST the terms are gone" // fencing.ErrTermsLost
)

var (
	checkOnly = &Write{redis.NewScript("local write\n" + check)}

	// get and swap are the two halves of Update.
	get  = NewWrite(`return redis.call('GET', KEYS[1])`)
	swap = NewWrite(`
local now = redis.call('GET', KEYS[1])
if (now and '1' .. now or '0') ~= ARGV[1] then return redis.error_reply('` + changed + `') end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], string.sub(ARGV[2], 2), 'KEEPTTL') end
return 1`)

	// look answers with the fields of a hash, empty where there is none.
	look = redis.NewScript(`
local got = redis.call('HMGET', KEYS[1], 'epoch', 'space', 'token', 'sequence')
for i = 1, 4 do got[i] = got[i] or '' end
return got`)

	// pin sets the terms unless they are set.
	pin = redis.NewScript(`
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], 'epoch', '0', 'space', ARGV[1], 'token', '0') end
return 1`)

	// change sets the terms if they are the ones that were read: epoch and floor before, then epoch, space and floor.
	change = redis.NewScript(`
local now = redis.call('HMGET', KEYS[1], 'epoch', 'token')
if (now[1] or '0') ~= ARGV[1] or (now[2] or '0') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'space', ARGV[4], 'token', ARGV[5])
return 1`)

	// forget removes a resource's hash if the terms, epoch and floor, make it needless.
	forget = redis.NewScript(`
local function less(a, b) return #a < #b or (#a == #b and a < b) end
local seen = redis.call('HMGET', KEYS[1], 'epoch', 'token')
if not seen[1] or not seen[2] or not (less(seen[1], ARGV[1]) or less(seen[2], ARGV[2])) then return 0 end
return redis.call('DEL', KEYS[1])`)
)
