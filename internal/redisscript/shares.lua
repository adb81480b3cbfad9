-- A name that is held in shares, by readers or by holders of permits, has a hash for its lock key:
--
--   lock   field "start of the value" → "server time in ms at which the hold runs out|id|owner…", one for each hold, with
--          a "+" before the id as in a lock that is a string; with a "-"
--          before the start it is nobody's any more and keeps its share closed for a minimum hold. Field "#" →
--          "next|limit|used": no hold runs out before next; limit is 0 for readers, who have one share each; used is the sum
--          of all shares. The key lives as long as the longest hold. Without this key there are no holds: the holds of a name
--          cannot be evicted one by one.
--   queue  for readers: the list in which writers wait too. For permits: a sorted set of the values by arrival, and of "#" at
--          0, which is there as long as the lock or a waiter, and keeps the requests of other kinds from taking it for a list
--
-- The start of a value says its share: "spx|client|nonce|request|" of a reader, "pn/limit/px|client|nonce|request|" for n
-- permits of limit.

local made

function shares()
	if made then return made end
	local hand = handover()
	local ASKED = 100 -- clients at most: the others are asked the next time
	local clock -- server time in ms, at the beginning of the call: not after the instant that a caller counts from
	local function now()
		if not clock then
			local time = call('TIME')
			clock = time[1] * 1000 + math.floor(time[2] / 1000)
		end
		return clock
	end

	-- after returns when a hold of ms milliseconds runs out. The milliseconds are counted from the next whole one: a hold never
	-- ends before the TTL that its holder counts with.
	local function after(ms) return now() + ms + 1 end

	-- remaining tells how long a hold that ends then still lasts, for people: never more than it was asked for.
	local function remaining(ends) return math.max(1, ends - now() - 1) end

	-- text writes a whole number in full.
	local function text(n) return string.format('%.0f', n) end

	-- parse reads the value, or its start, of any kind. An exclusive one has no n and no limit. Nothing for foreign text.
	local function parse(v)
		local share, client, nonce, request = string.match(v, '^([^|]*)|([^|]*)|([^|]*)|([^|]*)|')
		if not share then return nil end
		local p = {client = client, nonce = nonce, request = request}
		p.start = share .. '|' .. client .. '|' .. nonce .. '|' .. request .. '|'
		local kind, px = string.match(share, '^(s?)(%d+)$')
		if px then
			p.px = tonumber(px)
			if kind == 's' then p.n, p.limit = 1, 0 end
			return p
		end
		local n, limit, ms = string.match(share, '^p(%d+)/(%d+)/(%d+)$')
		if not n then return nil end
		p.n, p.limit, p.px = tonumber(n), tonumber(limit), tonumber(ms)
		return p
	end

	-- counted tells permits from the other kinds.
	local function counted(p) return p.limit ~= nil and p.limit > 0 end

	local function meta(v)
		local next, limit, used = string.match(v, '^(%d+)|(%d+)|(%d+)$')
		if not next then error('WRONGTYPE a foreign field in the hash of a lock') end
		return {next = tonumber(next), limit = tonumber(limit), used = tonumber(used)}
	end

	local function note(lock, g) call('HSET', lock, '#', text(g.next) .. '|' .. text(g.limit) .. '|' .. text(g.used)) end

	-- load returns the value of a lock that is a string, or nothing and what a lock held in shares says of itself.
	local function load(lock)
		local held = try('GET', lock)
		if type(held) ~= 'table' then return held or nil end
		local v = hand.mark(lock)
		if type(v) ~= 'string' then error(held) end -- foreign
		return nil, meta(v)
	end

	-- lengthen makes sure that the keys live for ms milliseconds.
	local function lengthen(lock, queue, g, ms)
		if call('PTTL', lock) >= ms then return end
		call('PEXPIRE', lock, ms)
		if g.limit > 0 then
			try('ZADD', queue, 'NX', 0, '#') -- an error: somebody deleted the queue, and others have made one of theirs
			if call('PTTL', queue) < ms then call('PEXPIRE', queue, ms) end
		end
	end

	-- add grants v, which says p, until least or later, and returns the new g. A lock without g is absent.
	local function add(lock, queue, v, p, g, least)
		local ends = math.max(after(p.px), least or 0)
		g = g or {next = ends, limit = p.limit, used = 0}
		g.next, g.used = math.min(g.next, ends), g.used + p.n
		call('HSET', lock, p.start, text(ends) .. '|' .. string.sub(v, #p.start + 1))
		note(lock, g)
		lengthen(lock, queue, g, ends - now())
		return g
	end

	-- drop ends one hold, and returns g, or nothing if it was the last one.
	local function drop(lock, g, start, n)
		call('HDEL', lock, start)
		g.used = g.used - n
		if g.used <= 0 then
			call('DEL', lock)
			return nil
		end
		note(lock, g)
		return g
	end

	-- each calls f with every field that says a share, whether it is held, what it says, and when it runs out.
	local function each(lock, f)
		local all = call('HGETALL', lock)
		for i = 1, #all, 2 do
			local held = string.sub(all[i], 1, 1) ~= '-'
			local p = parse(held and all[i] or string.sub(all[i], 2))
			local ends, owner = string.match(all[i + 1], '^(%d+)|(.*)$')
			if p and ends then f(all[i], held, p, tonumber(ends), owner) end
		end
	end

	-- left returns in how many ms the first hold may run out.
	local function left(g) return math.max(0, g.next - now()) end

	-- owned returns the field of a request's hold and what it says.
	local function owned(lock, request)
		for _, start in ipairs(call('HKEYS', lock)) do
			local p = parse(start)
			if p and p.request == request and string.sub(start, 1, 1) ~= '-' then return start, p end
		end
	end

	-- line returns all who wait, and whether they wait for permits.
	local function line(queue)
		local list = try('LRANGE', queue, 0, -1)
		if not list.err then return list, false end
		local set = try('ZRANGE', queue, 0, -1)
		if set.err or set[1] ~= '#' then error(list) end -- foreign
		table.remove(set, 1)
		return set, true
	end

	-- head returns the first who waits, and whether the queue is one for permits.
	local function head(queue)
		local v = try('LINDEX', queue, 0)
		if type(v) ~= 'table' then return v or nil, false end
		local set = try('ZRANGE', queue, 0, 1)
		if set.err or set[1] ~= '#' then error(v) end -- foreign
		return set[2], true
	end

	local function remove(queue, v)
		local n = try('LREM', queue, 0, v)
		if type(n) == 'table' then n = try('ZREM', queue, v) end
		return type(n) == 'number' and n or 0
	end

	-- forsake removes the places of those who have not accepted an offer that has ended, which is one of theirs whose client
	-- is in ended, or any if that is nil, and of those who did not answer since the last one ended. The others are asked.
	local function forsake(queue, seen, ended)
		local dead, lapsed = {}, false
		for _, name in ipairs(call('HKEYS', seen)) do
			local client = string.sub(name, 2)
			if starts(name, '?') or starts(name, '!') and (not ended or ended[client]) then
				call('HDEL', seen, name)
				dead[client] = true
				lapsed = lapsed or starts(name, '!')
			end
		end
		if not next(dead) then return end
		local asked, n = {}, 0
		for _, v in ipairs((line(queue))) do
			local client = whose(v)
			if dead[client] then
				remove(queue, v)
			elseif lapsed and client and not asked[client] and n < ASKED then
				asked[client], n = true, n + 1
				call('HSET', seen, '?' .. client, 1)
				hand.tell(client, '?|' .. string.sub(queue, 1, -3))
			end
		end
		if n > 0 then call('PEXPIRE', seen, SEEN_MS) end
	end

	-- reap ends the holds that have run out, and returns g, or nothing if none is left.
	local function reap(lock, queue, seen, g)
		if now() < g.next then return g end
		local soonest, last, used, ended = nil, 0, 0, {}
		each(lock, function(start, _, p, ends)
			if ends <= now() then
				call('HDEL', lock, start)
				ended[p.client] = true
			else
				used, soonest, last = used + p.n, math.min(soonest or ends, ends), math.max(last, ends)
			end
		end)
		forsake(queue, seen, ended)
		if not soonest then
			call('DEL', lock)
			return nil
		end
		g.next, g.used = soonest, used
		note(lock, g)
		call('PEXPIRE', lock, last - now())
		return g
	end

	-- push adds v at the end of the queue.
	local function push(queue, v, p)
		if counted(p) then
			call('ZADD', queue, 'NX', 0, '#')
			local last = call('ZRANGE', queue, -1, -1, 'WITHSCORES')
			call('ZADD', queue, text(tonumber(last[2]) + 1), v)
			if call('PTTL', queue) < QUEUE_MS then call('PEXPIRE', queue, QUEUE_MS) end
		else
			call('RPUSH', queue, v)
			call('PEXPIRE', queue, QUEUE_MS)
		end
	end

	-- admit takes v out of the queue and offers it its share, unless nobody listens any more.
	local function admit(lock, queue, seen, v, p, g)
		remove(queue, v)
		p.px = math.min(p.px, OFFER_MS)
		g = add(lock, queue, v, p, g)
		if hand.offer(lock, seen, p.client, p.nonce) then return g end
		return drop(lock, g, p.start, p.n)
	end

	-- advance grants to those first in the queue for whom there is room, and returns g, or nothing if nobody holds a share.
	-- Nobody passes the first one by, so that a writer does not starve among readers, nor many permits among few. With
	-- permits it cleans up behind the last one who waits.
	local function advance(lock, queue, seen, g, permits)
		while true do
			local v
			if permits then
				v = call('ZRANGE', queue, 1, 1)[1]
			else
				v = call('LINDEX', queue, 0)
			end
			if not v then break end
			local p = parse(v)
			if not p or permits ~= counted(p) then
				remove(queue, v) -- foreign
			elseif not p.limit or permits and (g and g.used or 0) + p.n > p.limit then
				return g
			else
				g = admit(lock, queue, seen, v, p, g)
			end
		end
		if permits then
			if g then
				call('PEXPIRE', queue, math.max(1, call('PTTL', lock)))
			else
				call('DEL', lock, queue, seen)
			end
		end
		return g
	end

	-- leave ends one hold and hands over what that makes room for.
	local function leave(lock, queue, seen, g, start, p)
		hand.alive(seen, start)
		g = drop(lock, g, start, p.n)
		local places = p.limit > 0 and try('ZCARD', queue)
		if type(places) == 'number' then
			if not g or places > 1 then advance(lock, queue, seen, g, true) end
		elseif not g and not hand.promote(lock, queue, seen) then
			call('DEL', lock, seen)
		end
	end

	-- serve hands over as far as there is room, after holds or places have gone without a word. The lock is no string.
	local function serve(lock, queue, seen, g, permits)
		if not g then forsake(queue, seen) end -- all offers have ended
		if permits or g then
			advance(lock, queue, seen, g, permits)
		else
			hand.promote(lock, queue, seen)
		end
	end

	-- stays says whether the hold that q says stays as it is although the same request asks for it again, in the attempt that
	-- p says: it has another client, or is told already, or belongs to a later attempt. info is what it says for people. With
	-- keeps '2', '3' or '5' any hold stays, with '4' only one that is told.
	local function stays(q, p, info, keeps)
		local told = starts(info, TOLD)
		if keeps == '4' then return told end
		return told or keeps == '2' or keeps == '3' or keeps == '5' or
			q.client ~= p.client or #q.nonce > #p.nonce or #q.nonce == #p.nonce and q.nonce > p.nonce
	end

	-- judge says whether a request for p can be granted now: 1 it can, 2 it holds already, in field start of g if that is
	-- not nil, 0 it has to wait, -1 the name is in use otherwise. keeps is not nil if some holds of the request stay as they
	-- are; then start, also of an exclusive hold, is followed by true if this one does.
	local function judge(lock, queue, seen, p, request, keeps, served)
		local held, g = load(lock)
		if g then g = reap(lock, queue, seen, g) end
		if request and held and not p.limit then
			local q = parse(held)
			if q and q.request == request then
				local same = keeps and stays(q, p, string.sub(held, #q.start + 1), keeps)
				return 2, nil, same and q.start or nil, same
			end
		elseif request and g then
			local start, q = owned(lock, request)
			if start and q.n == p.n and q.limit == p.limit then
				local info = string.match(call('HGET', lock, start), '^%d+|(.*)$')
				return 2, g, start, keeps and stays(q, p, info, keeps)
			end
		end
		local permits = counted(p)
		if held then return permits and -1 or 0 end
		local v, set = head(queue)
		if not served and (v or set and not g) then -- perhaps all who wait are gone, and only offering tells
			hand.alive(seen, p.start)
			serve(lock, queue, seen, g, set)
			return judge(lock, queue, seen, p, request, keeps, true)
		end
		if g and g.limit ~= (p.limit or 0) then return -1 end
		if v then
			local q = parse(v)
			if not q or set ~= permits or permits and q.limit ~= p.limit then return -1 end
			return 0
		end
		if permits then return (g and g.used or 0) + p.n <= p.limit and 1 or 0, g end
		return (p.limit or not g) and 1 or 0, g
	end

	-- take grants what judge has allowed. A later grant replaces the request's earlier one, and ends no sooner.
	local function take(lock, queue, seen, v, p, g, start)
		hand.alive(seen, v)
		if not p.limit then
			call('SET', lock, v, 'PX', math.max(p.px, call('PTTL', lock)))
			return
		end
		local least
		if start then
			least = tonumber(string.match(call('HGET', lock, start), '^%d+'))
			call('HDEL', lock, start)
			g.used = g.used - p.n
		end
		add(lock, queue, v, p, g, least)
	end

	-- tell marks the hold of a request, which start says, as one that more than one attempt was answered with, and lets it
	-- live as long as p asks for. From then on only a release ends it, or its time: none of those attempts can know whether
	-- another one's caller relies on it.
	local function tell(lock, queue, seen, start, p, g, keeps)
		hand.alive(seen, p.start)
		local info, ends
		if g then
			ends, info = string.match(call('HGET', lock, start), '^(%d+)|(.*)$')
		else
			info = string.sub(call('GET', lock), #start + 1)
		end
		if (whose(start) ~= p.client or keeps == '3') and not starts(info, TOLD) then info = TOLD .. info end
		if g then
			call('HSET', lock, start, text(math.max(tonumber(ends), after(p.px))) .. '|' .. info)
			lengthen(lock, queue, g, after(p.px) - now())
		else
			call('SET', lock, start .. info, 'PX', math.max(p.px, call('PTTL', lock)))
		end
	end

	-- told says whether tell has marked the hold that start says.
	local function told(lock, start)
		local v = try('GET', lock)
		if type(v) == 'string' then return starts(v, start .. TOLD) end
		local info = try('HGET', lock, start)
		return type(info) == 'string' and string.match(info, '^%d+|(.)') == TOLD
	end

	-- busy tells a holder who is in the way, any one, and how long that may last.
	local function busy(lock)
		local held, g = load(lock)
		if not g then return {held or '', call('PTTL', lock)} end
		local some = call('HSCAN', lock, 0, 'COUNT', 16)[2]
		for i = 1, #some, 2 do
			local ends, owner = string.match(some[i + 1], '^(%d+)|(.*)$')
			local p = parse(some[i])
			if ends and p and string.sub(some[i], 1, 1) ~= '-' then
				return {some[i] .. owner, remaining(tonumber(ends))}
			end
		end
		return {'', call('PTTL', lock)}
	end

	-- member returns g, what start says, when its hold runs out, and the rest of its value; nothing if it is not held.
	local function member(lock, start)
		local two = try('HMGET', lock, '#', start)
		if two.err then
			hand.get(lock) -- a foreign type is an error
			return nil
		end
		local p = two[1] and two[2] and parse(start)
		if not p then return nil end
		local ends, owner = string.match(two[2], '^(%d+)|(.*)$')
		if ends then return meta(two[1]), p, tonumber(ends), owner end
	end

	-- touch prolongs a hold to ms from now, unless it lives longer. It is false if there is none any more.
	local function touch(lock, queue, seen, start, ms)
		local g, p, ends, owner = member(lock, start)
		if not g then return false end
		if ends <= now() then
			leave(lock, queue, seen, g, start, p)
			return false
		end
		if ends < after(ms) then
			call('HSET', lock, start, text(after(ms)) .. '|' .. owner)
			lengthen(lock, queue, g, ms)
		end
		return true
	end

	-- release ends a hold, or leaves its share closed for another ms milliseconds. It is false if there is none any more.
	local function release(lock, queue, seen, start, ms)
		local g, p, ends = member(lock, start)
		if not g then return false end
		if ends <= now() then
			leave(lock, queue, seen, g, start, p)
			return false
		end
		if ms <= 0 then
			leave(lock, queue, seen, g, start, p)
			return true
		end
		hand.alive(seen, start)
		call('HDEL', lock, start)
		call('HSET', lock, '-' .. start, text(after(ms)) .. '|')
		g.next = math.min(g.next, after(ms))
		note(lock, g)
		lengthen(lock, queue, g, ms)
		hand.warn(lock, (head(queue)), ms)
		return true
	end

	-- acquire is every way to acquire. The answer is 1 for a grant, 0 for a place in the queue, -1 if the name is in use
	-- otherwise, {value, time to live} of a holder for an attempt that does not wait, and {start} of a hold that the request
	-- has and that stays as it is: see judge. A request that may have been here before keeps the place that it has.
	local function acquire(lock, queue, seen, v, wait, request, keep, keeps)
		local p = parse(v)
		if request and p then hand.alive(seen, p.start) end
		local verdict, g, start, same = judge(lock, queue, seen, p, request, keeps)
		if same then
			if keeps ~= '5' then tell(lock, queue, seen, start, p, g, keeps) end
			return {start}
		end
		if verdict > 0 then
			take(lock, queue, seen, v, p, g, start)
			return 1
		end
		if verdict < 0 then return -1 end
		if not wait then return busy(lock) end
		if not request or not keep(queue, v, p) then push(queue, v, p) end
		return 0
	end

	local steps = hand.steps

	-- gw, gt: wait, try, for a shared hold or permits. value, px
	function steps.gw(lock, queue, seen, v) return acquire(lock, queue, seen, v, true) end
	function steps.gt(lock, queue, seen, v) return acquire(lock, queue, seen, v, false) end

	-- gn: renew. start of the value, px
	function steps.gn(lock, queue, seen, start, px) return touch(lock, queue, seen, start, tonumber(px)) and 1 or 0 end

	-- gr: release. start of the value, ms that the share stays closed. The answer is as for r.
	function steps.gr(lock, queue, seen, start, ms)
		if not release(lock, queue, seen, start, tonumber(ms)) then return 0 end
		return offered and 3 or 1
	end

	-- ga: accept what was offered. start of the value, px
	function steps.ga(lock, queue, seen, start, px)
		hand.alive(seen, start)
		return steps.gn(lock, queue, seen, start, px)
	end

	made = {
		remaining = remaining,
		now = now, parse = parse, load = load, each = each, reap = reap, left = left, owned = owned, line = line, head = head,
		remove = remove, leave = leave, serve = serve, judge = judge, take = take, busy = busy, touch = touch,
		release = release, acquire = acquire, tell = tell, told = told,
		advance = function(lock, queue, seen) return advance(lock, queue, seen, nil, false) end, -- of a name that is free
	}
	return made
end
