-- One call runs a batch of steps, each on the keys of one lock name; every step is atomic, and so is the batch.
--
--   KEYS  for every step its lock, queue and seen key, in this order; step m takes these three of several names
--   ARGV  channel prefix, "1" on a cluster, then for every step: its letter, the number of its arguments, the arguments
--
-- The answer has one element for every step: an integer or an array, or a string: the error that the step met. A step
-- that fails does not keep the others from running.
--
-- lock   string "px|client|nonce|request|owner…": who holds, with px as its time to live when it is granted; "-" while
--        nobody holds but a minimum hold keeps the name closed. A hash while the name is held in shares: see shares.lua
-- queue  list of the same strings: who waits, the first one first. A sorted set while the name is used for permits
-- seen   hash of client → server time in ms of its last look: clients that stop looking lose their places
--
-- The types tell the uses of a name apart at no cost: what assumes that a name is exclusive meets an error where it is
-- not, has done nothing, and the step is made again by a function that looks.
--
-- Redis makes every function of a script anew in each call. So there are four tiers: quick, what most calls need;
-- handover (both in this file), what a call needs that meets a waiter; shares.lua, for names that are not exclusive; and
-- steps.lua.

local channels, cluster = ARGV[1], ARGV[2] == '1'
local call, try = redis.call, redis.pcall

-- A queue that nobody looks after any more goes away by itself.
local QUEUE_MS, SEEN_MS = 3600000, 60000

local function starts(v, with) return v and string.sub(v, 1, #with) == with end

local first -- the waiter whom R took out of the queue

-- quick does the steps of names that nobody waits for, and answers nothing where there is more to do.
local function quick(step, lock, queue, seen, v, ms)
	if step == 'w' then -- wait. value, px
		if call('RPUSHX', queue, v) > 0 then return 0 end
		if call('SET', lock, v, 'NX', 'PX', ms) then return 1 end
		call('RPUSH', queue, v)
		call('PEXPIRE', queue, QUEUE_MS)
		return 0
	elseif step == 't' and call('EXISTS', queue) == 0 then -- try. value, px
		if call('SET', lock, v, 'NX', 'PX', ms) then return 1 end
		return {call('GET', lock) or '', call('PTTL', lock)}
	elseif step == 'R' then -- release by a holder whose hold cannot have run out, from Redis 6.2. start of the value
		first = call('LPOP', queue)
		if first then return nil end
		if not starts(call('GET', lock), v) then return 0 end
		call('DEL', lock, seen)
		return 1
	elseif step == 'q' and ms == '0' and call('EXISTS', queue) == 0 then -- quit. start of the value, ms: see below
		if not starts(call('GET', lock), v) then return 0 end
		call('DEL', lock, seen)
		return 1
	elseif step == 'n' then -- renew. start of the value, px
		if not starts(call('GET', lock), v) then return 0 end
		return call('PEXPIRE', lock, ms)
	end
end

local shares -- makes the functions of shares.lua

local over -- what handover made

-- handover makes what an exclusive hold needs to end when somebody waits.
local function handover()
	if over then return over end
	over = {steps = {}}
	local steps = over.steps

	-- field returns what an exclusive hold or place says. It is nothing for those of other kinds, and for foreign text.
	local function field(v) return string.match(v, '^(%d+)|([^|]*)|([^|]*)|([^|]*)|') end

	-- tell pushes text to a client and returns whether it may have been received. In a cluster the count covers one node
	-- only, and a user that may not publish leaves the waiters to their looks: both count as received.
	local function tell(client, text)
		local n = try('PUBLISH', channels .. client, text)
		return cluster or type(n) ~= 'number' or n > 0
	end

	-- warn tells the first waiter v that the name, or its share of it, stays closed for another ms milliseconds.
	local function warn(lock, v, ms)
		local client = v and string.match(v, '^[^|]*|([^|]*)|')
		if client then tell(client, 'c|' .. lock .. '|' .. ms) end
	end

	-- promote hands the lock over to the first waiter that still listens, whatever the lock holds now, and to the readers
	-- behind a reader. It returns the time to live of the new hold, or nothing if nobody waits; the lock is then untouched
	-- or gone.
	local function promote(lock, queue)
		local wrote
		while true do
			local v = call('LPOP', queue)
			if not v then
				if wrote then call('DEL', lock) end
				return nil
			end
			local px, client, nonce = field(v)
			if px then
				call('SET', lock, v, 'PX', px)
				wrote = true
				if tell(client, nonce .. '|' .. lock) then return tonumber(px) end
			elseif starts(v, 's') then
				call('LPUSH', queue, v)
				call('DEL', lock)
				wrote = false
				local readers = shares().advance(lock, queue)
				if readers then return shares().left(readers) end
			end -- a foreign element is dropped
		end
	end

	-- putBack makes v the first waiter again, in a list that may have been emptied.
	local function putBack(queue, v)
		call('LPUSH', queue, v)
		call('PEXPIRE', queue, QUEUE_MS)
	end

	-- free ends the present hold: the next waiter gets it, or the name stays closed for another ms milliseconds.
	local function free(lock, queue, seen, ms)
		if ms and ms > 0 then
			call('SET', lock, '-', 'PX', ms)
			warn(lock, call('LINDEX', queue, 0), ms)
		elseif not promote(lock, queue) then
			call('DEL', lock, seen)
		end
	end

	-- get returns the value of a lock that is a string, and nothing where there is none, or holds of other kinds.
	local function get(lock)
		local v = try('GET', lock)
		if type(v) ~= 'table' then return v end
		if type(try('HGET', lock, '#')) ~= 'string' then error(v) end -- foreign
	end

	-- r: release, looking first. start of the value, ms that the name stays closed
	function steps.r(lock, queue, seen, start, ms)
		if not starts(get(lock), start) then return 0 end
		free(lock, queue, seen, tonumber(ms))
		return 1
	end

	-- R: release, where somebody waits: the write that hands over returns what it overwrote, which saves a look. start of
	-- the value
	function steps.R(lock, queue, seen, start)
		local v = first
		local px, client, nonce
		if v then px, client, nonce = field(v) end
		if not px then
			if starts(v, 's') then putBack(queue, v) end -- a foreign element is dropped
			return steps.r(lock, queue, seen, start, 0)
		end
		local old = try('SET', lock, v, 'PX', px, 'GET')
		if type(old) == 'table' then -- not a string at all: nothing was written
			putBack(queue, v)
			return 0
		end
		if old and not starts(old, start) then
			-- Somebody else's hold: put it back as it was granted. Its own time to live was overwritten, and a longer one is
			-- the safe side.
			call('SET', lock, old, 'PX', field(old) or px)
			putBack(queue, v)
			return 0
		end
		if not tell(client, nonce .. '|' .. lock) then
			if not promote(lock, queue) then call('DEL', lock, seen) end
		end
		return old and 1 or 0
	end

	-- q: quit: give back one attempt's hold, or remove its place. start of the value, ms that the name stays closed. The
	-- answer is 1 for a hold, 2 for a place alone. For exclusive holds of names that have no others.
	function steps.q(lock, queue, seen, start, ms)
		if starts(get(lock), start) then
			free(lock, queue, seen, tonumber(ms))
			return 1
		end
		local removed = 0
		for _, v in ipairs(call('LRANGE', queue, 0, -1)) do
			if starts(v, start) then removed = removed + call('LREM', queue, 0, v) end
		end
		return removed > 0 and 2 or 0
	end

	over.field, over.tell, over.warn, over.promote, over.free, over.get = field, tell, warn, promote, free, get
	return over
end
