-- One call runs a batch of steps, each on the keys of one lock name; every step is atomic, and so is the batch.
--
--   KEYS  for every step its lock, queue and seen key, in this order; step m takes these three of several names
--   ARGV  channel prefix, "1" on a cluster, then for every step: its letter, the number of its arguments, the arguments
--
-- The answer has one element for every step: an integer or an array, or a string: the error that the step met. A step
-- that fails does not keep the others from running.
--
-- lock   string "px|client|nonce|request|id|owner…": who holds, with px as its time to live when it is granted and id as
--        what may be shown of it, after a "+" once several attempts were answered with this hold; "-" while
--        nobody holds but a minimum hold keeps the name closed. A hash while the name is held in shares: see shares.lua.
--        This is layout 1. A later one keeps this key while it holds, as a hash with field "#" = "layout N": this version
--        refuses it with both numbers, and earlier versions refuse it as a foreign key
-- queue  list of the same strings: who waits, the first one first. A sorted set while the name is used for permits
-- seen   hash. Field "!client": the client was offered the lock and has not accepted yet. Field "?client": the client was
--        asked whether it lives, and has not answered yet
--
-- Every hand-over is an offer: it ends after OFFER_MS, and accepting makes it whole. The places of a client that let an offer
-- end are removed, and all the others who wait are asked whether they live: who has not answered when the next offer ends
-- loses its places too. So a queue of dead clients, however many, costs two offers.
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
local QUEUE_MS, SEEN_MS, OFFER_MS = 3600000, 60000, 1000

-- What starts the text for people of a hold that several attempts were answered with. No id has it.
local TOLD = '+'

local function starts(v, with) return v and string.sub(v, 1, #with) == with end

-- kept returns whether several attempts were answered with the exclusive hold v.
local function kept(v) return string.match(v, '^[^|]*|[^|]*|[^|]*|[^|]*|(.)') == TOLD end

-- whose returns the client of a value or its start, of any kind.
local function whose(v) return string.match(v, '^[^|]*|([^|]*)|') end

-- prolong lets a key live for at least ms milliseconds from now. It never shortens: a renewal that is delivered late, or
-- asks for less, changes nothing.
local function prolong(key, ms)
	if call('PTTL', key) < tonumber(ms) then call('PEXPIRE', key, ms) end
	return 1
end

local offered -- the present step has made an offer

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
	elseif step == 'q' and ms == '0' and call('EXISTS', queue) == 0 then -- quit: see below
		if not starts(call('GET', lock), v) then return 0 end
		call('DEL', lock, seen)
		return 1
	elseif step == 'u' and call('EXISTS', queue) == 0 then -- undo: see below
		local held = call('GET', lock)
		if not starts(held, v) or kept(held) then return 0 end
		call('DEL', lock, seen)
		return 1
	elseif step == 'n' then -- renew. start of the value, px
		if not starts(call('GET', lock), v) then return 0 end
		return prolong(lock, ms)
	elseif step == 'a' then -- accept what was offered. start of the value, px
		if not starts(call('GET', lock), v) then return 0 end
		prolong(lock, ms)
		call('HDEL', seen, '!' .. whose(v), '?' .. whose(v))
		return 1
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
		local client = v and whose(v)
		if client then tell(client, 'c|' .. lock .. '|' .. ms) end
	end

	-- offer tells a client that it has been offered the lock, or a share of it. It is false if nobody listens.
	local function offer(lock, seen, client, nonce)
		if not tell(client, '!' .. nonce .. '|' .. lock) then return false end
		call('HSET', seen, '!' .. client, 1)
		call('PEXPIRE', seen, SEEN_MS)
		offered = true
		return true
	end

	-- promote offers the lock to the first waiter that still listens, whatever the lock holds now, and to the readers behind
	-- a reader. It returns the time to live of the new hold, or nothing if nobody waits; the lock is then untouched or gone.
	local function promote(lock, queue, seen)
		local wrote
		while true do
			local v = call('LPOP', queue)
			if not v then
				if wrote then call('DEL', lock) end
				return nil
			end
			local px, client, nonce = field(v)
			if px then
				local ms = math.min(px, OFFER_MS)
				call('SET', lock, v, 'PX', ms)
				wrote = true
				if offer(lock, seen, client, nonce) then return ms end
			elseif starts(v, 's') then
				call('LPUSH', queue, v)
				call('DEL', lock)
				wrote = false
				local readers = shares().advance(lock, queue, seen)
				if readers then return shares().left(readers) end
			end -- a foreign element is dropped
		end
	end

	-- alive notes that the client of a value has shown that it lives.
	local function alive(seen, v)
		local client = whose(v)
		if client then call('HDEL', seen, '!' .. client, '?' .. client) end
	end

	-- free ends the hold v: the next waiter is offered the lock, or the name stays closed for another ms milliseconds.
	local function free(lock, queue, seen, v, ms)
		if ms and ms > 0 then
			call('SET', lock, '-', 'PX', ms)
			warn(lock, call('LINDEX', queue, 0), ms)
		elseif not promote(lock, queue, seen) then
			call('DEL', lock, seen)
		end
	end

	-- mark returns field "#" of a lock that is a hash, or an error. A later layout says there which one it is, and is refused.
	local function mark(lock)
		local v = try('HGET', lock, '#')
		local layout = type(v) == 'string' and string.match(v, '^layout (%d+)$')
		if layout then error('LAYOUT ' .. layout) end
		return v
	end

	-- get returns the value of a lock that is a string, and nothing where there is none, or holds of other kinds.
	local function get(lock)
		local v = try('GET', lock)
		if type(v) ~= 'table' then return v end
		if type(mark(lock)) ~= 'string' then error(v) end -- foreign
	end

	-- r: release. start of the value, ms that the name stays closed. The answer is 3 if the lock was offered to somebody, of
	-- whom it is not known whether it lives.
	function steps.r(lock, queue, seen, start, ms)
		if not starts(get(lock), start) then return 0 end
		alive(seen, start)
		free(lock, queue, seen, start, tonumber(ms))
		return offered and 3 or 1
	end

	-- q: quit: end one attempt's hold, or remove its place. start of the value, ms that the name stays closed. The answer is 1
	-- for a hold, 2 for a place alone. For exclusive holds of names that have no others. With '' for ms it is u.
	function steps.q(lock, queue, seen, start, ms)
		local held = get(lock)
		if starts(held, start) and not (ms == '' and kept(held)) then
			alive(seen, start)
			free(lock, queue, seen, start, tonumber(ms))
			return 1
		end
		local removed = 0
		for _, v in ipairs(call('LRANGE', queue, 0, -1)) do
			if starts(v, start) then removed = removed + call('LREM', queue, 0, v) end
		end
		return removed > 0 and 2 or 0
	end

	-- u: undo: q, unless others were answered with the same hold. start of the value
	function steps.u(lock, queue, seen, start) return steps.q(lock, queue, seen, start, '') end

	over.field, over.tell, over.offer, over.warn, over.free, over.get = field, tell, offer, warn, free, get
	over.promote, over.alive, over.mark = promote, alive, mark
	return over
end
