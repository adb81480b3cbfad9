-- The steps that look before they do anything: for requests that were here before, for names that are not exclusive alone,
-- for those who wait, and for what is tidied up.

local function careful()
	local hand, s = handover(), shares()
	local steps = hand.steps

	-- find returns a request's place in the queue, its position and its value.
	local function find(queue, request)
		local places, permits = s.line(queue)
		for i, v in ipairs(places) do
			local p = s.parse(v)
			if p and p.request == request then return i - 1, v, p, permits end
		end
	end

	-- keep gives the place that a request has to its new attempt. It is false if it has none of the same kind.
	local function keep(queue, v, p)
		local at, old, q, permits = find(queue, p.request)
		if not at then return false end
		if q.n ~= p.n or q.limit ~= p.limit then
			s.remove(queue, old)
			return false
		end
		if permits then
			local score = call('ZSCORE', queue, old)
			call('ZREM', queue, old)
			call('ZADD', queue, score, v)
		else
			call('LSET', queue, at, v)
		end
		return true
	end

	-- w, t: wait, try, where quick has met something. value, px. W, T, and gW, gT for shared holds and permits: the request
	-- may have been here before. value, px, request, and 1 if what it holds through another client stays that one's, so
	-- that none of both can give it back by mistake; 2 if what it holds stays, through whichever client;
	-- 3 if it also counts as told, since another attempt of this client may yet be abandoned; 4 if it stays only where it
	-- counts as told; 5 if the answer names it and nothing changes
	function steps.w(lock, queue, seen, v) return s.acquire(lock, queue, seen, v, true) end
	function steps.t(lock, queue, seen, v) return s.acquire(lock, queue, seen, v, false) end
	function steps.W(lock, queue, seen, v, _, request, keeps)
		return s.acquire(lock, queue, seen, v, true, request, keep, keeps)
	end
	function steps.T(lock, queue, seen, v, _, request, keeps)
		return s.acquire(lock, queue, seen, v, false, request, nil, keeps)
	end
	steps.gW, steps.gT = steps.W, steps.T

	-- y: give way: v was granted beside the queue, and stands behind those who are in it. value, px, 1 to wait
	function steps.y(lock, queue, seen, v, _, wait)
		if hand.get(lock) == v then call('DEL', lock) end
		return s.acquire(lock, queue, seen, v, wait == '1')
	end

	-- m: try several names, all or none. 1 if the requests may have been here before, 2 if the holds that they have then stay, then value and request of each. The
	-- answer is 1, or the number of the name that is in the way, with value and time to live of its holder unless it is in
	-- use otherwise, or 0 and for each name the start of the hold that stays as it is, or nothing.
	function steps.m(k, a, n)
		local again, keeps = ARGV[a] ~= '0', ARGV[a] == '2' and '2' or true
		local all, bad, why, same = {}, nil, nil, {0}
		for i = 1, (n - 1) / 2 do
			local each = {KEYS[k], KEYS[k + 1], KEYS[k + 2], ARGV[a + 1], ARGV[a + 2]}
			each.p = s.parse(each[4])
			each.verdict, each.g, each.start, each.same =
				s.judge(each[1], each[2], each[3], each.p, again and each[5] or nil, keeps)
			if each.verdict <= 0 and not bad then
				bad, why = i, {i}
				if each.verdict == 0 then
					local held = s.busy(each[1])
					why = {i, held[1], held[2]}
				end
			end
			all[i] = each
			k, a = k + 3, a + 2
		end
		local some
		for i, each in ipairs(all) do
			if not bad and each.same then
				s.tell(each[1], each[2], each[3], each.start, each.p, each.g)
				same[1 + i] = each.start
			elseif not bad then
				s.take(each[1], each[2], each[3], each[4], each.p, each.g, each.start)
				same[1 + i] = ''
			elseif each.verdict == 2 and not each.same then -- from when all of them were granted: others are gone since
				steps.x(each[1], each[2], each[3], each[5])
			end
			some = some or each.same
		end
		return why or some and same or 1
	end

	-- n: renew, where quick has met something. start of the value, px
	function steps.n(lock, queue, seen, start, px)
		if not starts(hand.get(lock), start) then return 0 end
		return prolong(lock, px)
	end

	-- a: accept, where quick has met something. start of the value, px
	function steps.a(lock)
		hand.get(lock) -- a foreign type is an error
		return 0
	end

	-- forget removes a place in the queue, and lets those behind it have what it alone kept them from.
	local function forget(lock, queue, seen, v)
		local n = s.remove(queue, v)
		if n == 0 then return 0 end
		local first, permits = s.head(queue)
		if permits or starts(first, 's') then
			local held, g = s.load(lock)
			if g then g = s.reap(lock, queue, seen, g) end
			if not held then s.serve(lock, queue, seen, g, permits) end
		end
		return n
	end

	-- x: remove whatever a request has, hold or place. request
	function steps.x(lock, queue, seen, request)
		local found = 0
		local held, g = s.load(lock)
		if held then
			local _, _, _, r = hand.field(held)
			if r == request then
				hand.alive(seen, held)
				hand.free(lock, queue, seen, held, 0)
				found = 1
			end
		elseif g then
			local start, p = s.owned(lock, request)
			if start then
				s.leave(lock, queue, seen, g, start, p)
				found = 1
			end
		end
		local _, v = find(queue, request)
		if v then
			forget(lock, queue, seen, v)
			found = 1
		end
		return found
	end

	-- c: remove whatever one attempt has, hold or place. value
	function steps.c(lock, queue, seen, v)
		local p = s.parse(v)
		if p and p.limit then
			if s.told(lock, p.start) then return 0 end
			if s.release(lock, queue, seen, p.start, 0) then return 1 end
		elseif hand.get(lock) == v then
			hand.alive(seen, v)
			hand.free(lock, queue, seen, v, 0)
			return 1
		end
		return forget(lock, queue, seen, v)
	end

	-- d: give back a hold that was handed over to an attempt which has ended. client, nonce
	function steps.d(lock, queue, seen, client, nonce)
		local held, g = s.load(lock)
		if held then
			local p = s.parse(held)
			if not p or p.client ~= client or p.nonce ~= nonce or s.told(lock, p.start) then return 0 end
			hand.alive(seen, held)
			hand.free(lock, queue, seen, held, 0)
			return 1
		elseif g then
			for _, start in ipairs(call('HKEYS', lock)) do
				local p = s.parse(start)
				if p and p.client == client and p.nonce == nonce and not starts(start, '-') then
					if s.told(lock, start) then return 0 end
					s.leave(lock, queue, seen, g, start, p)
					return 1
				end
			end
		end
		return 0
	end

	-- e: expire: r, or gr, unless others were answered with the same hold. start of the value, ms that the name stays closed
	function steps.e(lock, queue, seen, start, ms)
		if s.told(lock, start) then return 0 end
		local p = s.parse(start)
		return steps[p and p.limit and 'gr' or 'r'](lock, queue, seen, start, ms)
	end

	-- settle hands over if holds ran out. It returns what load does then, and whether it has changed the queue.
	local function settle(lock, queue, seen)
		local held, g = s.load(lock)
		if held then return held end
		if g then g = s.reap(lock, queue, seen, g) end
		local first, permits = s.head(queue)
		if not first and (g or not permits) then return nil, g end
		s.serve(lock, queue, seen, g, permits)
		held, g = s.load(lock)
		return held, g, true
	end

	-- expiry returns in how many ms the hold runs out, of several the first, -2 without one.
	local function expiry(lock, held, g)
		if held then return call('PTTL', lock) end
		return g and s.left(g) or -2
	end

	-- s: settle. The answer is the time to live in ms, of several holds the shortest, -2 if nobody holds and nobody waits.
	function steps.s(lock, queue, seen)
		local held, g = settle(lock, queue, seen)
		return expiry(lock, held, g)
	end

	-- l: look: what became of a client's waiters? client, then their nonces. The answer is the time to live as for s, the
	-- length of the queue, 1 if the name is held in shares, and for each waiter 0 gone, 1 queued, 2 holds (and is renewed).
	function steps.l(lock, queue, seen, client, ...)
		local places, permits = s.line(queue)
		call('HDEL', seen, '!' .. client, '?' .. client)
		local queued, holds = {}, {}
		for _, v in ipairs(places) do
			local p = s.parse(v)
			if not p then
				s.remove(queue, v)
			elseif p.client == client then
				queued[p.nonce] = true
			end
		end
		if #places > 0 and (not permits or call('PTTL', queue) < QUEUE_MS) then call('PEXPIRE', queue, QUEUE_MS) end

		local held, g, changed = settle(lock, queue, seen)
		if changed then
			queued = {}
			for _, v in ipairs((s.line(queue))) do
				local p = s.parse(v)
				if p and p.client == client then queued[p.nonce] = true end
			end
			call('HDEL', seen, '!' .. client, '?' .. client) -- it may have been offered the name just now
		end
		if held then
			local px, c, n = hand.field(held)
			if c == client then holds[n] = function() prolong(lock, px) end end
		elseif g then
			for _, start in ipairs(call('HKEYS', lock)) do
				local p = s.parse(start)
				if p and p.client == client and not starts(start, '-') then
					holds[p.nonce] = function() s.touch(lock, queue, seen, start, p.px) end
				end
			end
		end

		local answer = {0, #places, g and 1 or 0}
		for i = 1, select('#', ...) do
			local nonce = select(i, ...)
			if holds[nonce] then
				holds[nonce]()
				answer[i + 3] = 2
			else
				answer[i + 3] = queued[nonce] and 1 or 0
			end
		end
		answer[1] = expiry(lock, held, g)
		return answer
	end

	-- p: peek: which of several names is not held in one piece by somebody else? number of names, client. The answer is a list
	-- of their numbers
	function steps.p(k, a, n)
		local locks, found, mine = {}, {}, '^[^|]*|' .. ARGV[a + 1] .. '|'
		for i = 1, n do locks[i] = KEYS[k + 3 * i - 3] end
		for i, v in ipairs(call('MGET', unpack(locks))) do
			if not v or string.find(v, mine) then found[#found + 1] = i end
		end
		return found
	end

	-- i: inform: value, time to live in ms, number of waiters. Of a name held in shares the value is empty, and value and time
	-- to live of each hold follow.
	function steps.i(lock, queue)
		local held, g = s.load(lock)
		local _, permits = s.head(queue)
		local waiters
		if permits then waiters = call('ZCARD', queue) - 1 else waiters = call('LLEN', queue) end
		local answer = {held or '', call('PTTL', lock), waiters}
		if g then
			s.each(lock, function(start, held, _, ends, owner)
				if held and ends > s.now() then
					answer[#answer + 1] = start .. owner
					answer[#answer + 1] = s.remaining(ends)
				end
			end)
		end
		return answer
	end

	-- K: was that hold ended by force? start of the value. The answer is a list of its mark, once, or of nothing
	function steps.K(_, _, marks, start)
		local mark = call('HGET', marks, start)
		call('HDEL', marks, start)
		return {mark or nil}
	end

	-- f: force-release: end all holds of a name, or one. start of the value or nothing, mark. It has two names: the second
	-- one's third key is the marks', a hash of starts of values, which lives as long as the holds could. The answer is as for r
	function steps.f(lock, queue, seen, marks, only, mark)
		local held, g = s.load(lock)
		local starts, left = {}, math.max(1, call('PTTL', lock))
		local p = held and s.parse(held)
		if p then
			starts[1] = p.start
		elseif g then
			s.each(lock, function(start, held, _, ends)
				if held and ends > s.now() then starts[#starts + 1] = start end
			end)
		end
		local ended = 0
		for _, start in ipairs(starts) do
			if only == '' or only == start then
				call('HSET', marks, start, mark)
				if p then
					hand.alive(seen, held)
					hand.free(lock, queue, seen, held, 0)
				else
					s.release(lock, queue, seen, start, 0)
				end
				ended = ended + 1
			end
		end
		if ended == 0 then return 0 end
		prolong(marks, left)
		return offered and 3 or 1
	end

	return steps
end

local answers, k, a, i = {}, 1, 3, 1
while KEYS[k] do
	local step, n, names = ARGV[a], tonumber(ARGV[a + 1]), 1
	offered = false
	local ok, answer = pcall(quick, step, KEYS[k], KEYS[k + 1], KEYS[k + 2], ARGV[a + 2], ARGV[a + 3])
	if ok and not answer
		or not ok and string.find(type(answer) == 'table' and answer.err or tostring(answer), 'WRONGTYPE', 1, true) then
		local f = handover().steps[step]
		if not f then
			shares()
			f = over.steps[step] or careful()[step]
		end
		if step == 'm' then
			names = (n - 1) / 2
			ok, answer = pcall(f, k, a + 2, n)
		elseif step == 'f' then
			names = 2
			ok, answer = pcall(f, KEYS[k], KEYS[k + 1], KEYS[k + 2], KEYS[k + 5], ARGV[a + 2], ARGV[a + 3])
		elseif step == 'p' then
			names = tonumber(ARGV[a + 2])
			ok, answer = pcall(f, k, a + 2, names)
		elseif n <= 3 and step ~= 'l' then -- what is too much is the next step's, and no step looks at it
			ok, answer = pcall(f, KEYS[k], KEYS[k + 1], KEYS[k + 2], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4])
		else
			ok, answer = pcall(f, KEYS[k], KEYS[k + 1], KEYS[k + 2], unpack(ARGV, a + 2, a + 1 + n))
		end
	end
	if not ok then
		answer = type(answer) == 'table' and answer.err or tostring(answer)
		-- A master that has become a replica has done nothing, and the client is to look for the new one: it drops the
		-- connection for an answer as a whole, not for a string in one.
		if string.find(answer, 'READONLY', 1, true) then return redis.error_reply('READONLY the server is a replica') end
	end
	answers[i] = answer
	k, a, i = k + 3 * names, a + 2 + n, i + 1
end
return answers
