package redisguard

import "github.com/redis/go-redis/v9"

// Write is the caller's write for an admitted claim: a script in Lua. It is safe for concurrent use.
type Write struct{ script *redis.Script }

// NewWrite returns a Write. The source sees the KEYS and ARGV that were given to Do, and its result is the result of
// Do. It must check its input before it makes a change: Redis does not undo the changes of a script before an error.
func NewWrite(lua string) *Write {
	return &Write{redis.NewScript("local function write(KEYS, ARGV)\n" + lua + "\nend\n" + check)}
}

// reading are the functions that read the guard's entries: the terms, and of a resource the text and the answer behind
// it. They also read the hashes of format 1: resources keep them until they are written to, and terms until they are
// migrated.
const reading = `
local function terms(key)
	local got = redis.pcall('GET', key)
	if type(got) ~= 'table' then return got or '' end
	local old = redis.call('HMGET', key, 'epoch', 'token', 'space')
	return table.concat({'1', old[1] or '', old[2] or '', old[3] or ''}, '\n')
end
local function seen(key)
	local got = redis.pcall('GET', key)
	if not got then return '', '' end
	if type(got) == 'string' then return string.match(got, '^([^\n]*)\n?(.*)$') end
	local old = redis.call('HMGET', key, 'epoch', 'token', 'sequence', 'answer')
	return (old[1] or '0') .. ' 0 ' .. (old[2] or '0') .. ' - ' .. (old[3] or '0'), old[4] or ''
end
`

// check is fencing.JudgeAll in Lua. Numbers are compared as digits: as numbers of Lua they would be exact up to 2⁵³
// only.
//
// KEYS: one for each claim, that of the terms if ARGV[2] is 1, and the write's. ARGV: the number of claims; whether the
// key of the terms is among the KEYS; else their text; the ID that they must have; token, space, sequence, generation
// and nonce of each claim; the write's.
//
// It answers {1, the write's result}; {2, the first result} for a repeated write; or {0, the terms, the memory of each
// resource}, which fencing.JudgeAll turns into the error. Tokens are remembered before the write: should that fail
// half-way, the known token is higher than the written one, which is the safe side. Sequence and answer are remembered
// after it: a failed write may be repeated.
const check = reading + `
local n = tonumber(ARGV[1])
local function less(a, b) return #a < #b or (#a == #b and a < b) end
local text, first = ARGV[3], n + 1
if ARGV[2] == '1' then text, first = terms(KEYS[n + 1]), n + 2 end
local id, epoch, floor, space = string.match(text, '^2 (%S+) (%d+) (%d+) (.+)$')
if id ~= ARGV[4] then return {0, text} end
local pinned = space == '-' and '=' .. ARGV[6] or space
local texts, answers, remember, sequences, refused, repeated, news = {}, {}, {}, {}, false, false, false
for i = 1, n do
	local token, shown, sequence, generation, nonce = unpack(ARGV, 5 * i, 5 * i + 4)
	texts[i], answers[i] = seen(KEYS[i])
	local was = {string.match(texts[i], '^(%d+) (%S+) (%d+) (%S+) (%d+)$')}
	if texts[i] == '' or (was[1] and less(was[1], epoch)) then was = {epoch, '0', '0', '-', '0'} end
	local a, b = string.match(generation, '^%d+'), string.match(was[2] or '', '^%d+')
	if was[1] ~= epoch or not b or token == '0' or (pinned ~= '=' and '=' .. shown ~= pinned) or less(token, floor)
		or less(a, b) or (a == b and (generation ~= was[2] or less(token, was[3]))) then
		refused = true
	elseif a ~= b or token ~= was[3] then
		was, answers[i] = {epoch, generation, token, nonce, '0'}, ''
	elseif was[4] ~= '-' and nonce ~= was[4] then
		refused = true
	elseif sequence ~= '0' and less(sequence, was[5]) then
		refused = true
	elseif sequence ~= '0' and sequence == was[5] then
		repeated = repeated or i
	else
		was[4] = nonce
	end
	if sequence ~= '0' and sequence ~= was[5] then news = true end
	remember[i], sequences[i] = was, sequence
end
if refused or (repeated and news) then return {0, text, unpack(texts)} end
if repeated then return {2, answers[repeated] ~= '' and cmsgpack.unpack(answers[repeated])} end
if ARGV[2] == '1' and pinned ~= space then
	redis.call('SET', KEYS[n + 1], table.concat({'2', id, epoch, floor, pinned}, ' '))
end
local function save(i, answer)
	local now = table.concat(remember[i], ' ')
	if now ~= texts[i] then redis.call('SET', KEYS[i], answer == '' and now or now .. '\n' .. answer) end
end
for i = 1, n do save(i, answers[i]) end
local reply
if write then
	local keys, args = {}, {}
	for i = first, #KEYS do keys[i - first + 1] = KEYS[i] end
	for i = 5 * n + 5, #ARGV do args[i - 5 * n - 4] = ARGV[i] end
	reply = write(keys, args)
	if type(reply) == 'table' and reply.err then return redis.error_reply(reply.err) end
end
for i = 1, n do
	if sequences[i] ~= '0' then
		remember[i][5] = sequences[i]
		save(i, cmsgpack.pack(reply))
	end
end
return {1, reply}
`

// changed is the error of swap. Without a word behind the code Redis 7 puts ERR before it.
const changed = "FENCELOCK_CHANGED the value was changed" // since Update has read it

var (
	checkOnly = &Write{redis.NewScript("local write\n" + check)}

	// get and swap are the two halves of Update.
	get  = NewWrite(`return redis.call('GET', KEYS[1])`)
	swap = NewWrite(`
local now = redis.call('GET', KEYS[1])
if (now and '1' .. now or '0') ~= ARGV[1] then return redis.error_reply('` + changed + `') end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], string.sub(ARGV[2], 2), 'KEEPTTL') end
return 1`)

	// lookTerms and look answer with the terms, and with the memory of a resource; the empty text without one.
	lookTerms = redis.NewScript(reading + `return terms(KEYS[1])`)
	look      = redis.NewScript(reading + `return (seen(KEYS[1]))`)

	// change sets the terms if they have not changed since they were read.
	change = redis.NewScript(reading + `
if terms(KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1`)

	// forget removes the memory of a resource if it is unchanged since it was read.
	forget = redis.NewScript(reading + `
if seen(KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])`)
)
