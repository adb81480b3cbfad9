-- One call ends holds that nobody waits for. It is short because most releases need no more: a call of the whole script
-- costs several times as much.
--
--   KEYS  for every hold the lock, queue and seen key of its name
--   ARGV  for every hold the start of its value
--
-- The answer has 1 for every hold that was ended, and nothing for one with which there is more to do: somebody waits, or
-- the hold is not there.

local answers = {}
for i, start in ipairs(ARGV) do
	local lock, queue, seen = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
	answers[i] = false
	if redis.call('EXISTS', queue) == 0 then
		local v = redis.pcall('GET', lock) -- an error: it is held in shares
		if type(v) == 'string' and string.sub(v, 1, #start) == start then
			redis.call('DEL', lock, seen)
			answers[i] = 1
		end
	end
end
return answers
