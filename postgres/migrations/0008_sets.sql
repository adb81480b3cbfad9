-- least program: 7
-- A repeated or late acquire_all changes nothing unless its request still has the whole set, or never had it.
-- What a Watch grants is durable before anybody can see it.
-- An acquire that is carried out after a later release or move of its request changes nothing, and so does a late move.
-- A hold that moves has the minimum of its request only.

-- Sets that were granted, by their first name and its request, for as long as a late statement may arrive. A session
-- that has ended refuses its late statements itself: its set may be granted again, on another session.
create table fencelock.sets (
	name       text collate "C" not null,
	request_id text not null,
	session    text not null,
	at         timestamptz not null default clock_timestamp(),
	primary key (name, request_id)
) with (autovacuum_vacuum_scale_factor = 0.01);

create index sets_at on fencelock.sets (at);

-- As before, but a set of which the request has only a part, or which has been released, is refused: FL002.
create or replace function fencelock.acquire_all(rs fencelock.holds[], minimum interval) returns setof fencelock.answer
language plpgsql as $$
declare
	r fencelock.holds;
	a fencelock.answer;
	wake text[] := '{}';
	kept int := 0;
begin
	a.here := fencelock.enter();
	foreach r in array rs loop
		perform fencelock.lock_name(r.name);
		kept := kept + (select count(*) from fencelock.holds o join fencelock.sessions s on s.id = o.session
			where o.name = r.name and o.request_id = r.request_id and not fencelock.over(s))::int;
	end loop;
	if kept < cardinality(rs) then
		if kept > 0 or exists (select 1 from fencelock.sets e join fencelock.sessions s on s.id = e.session
			where e.name = (rs[1]).name and e.request_id = (rs[1]).request_id and not fencelock.over(s))
		then
			raise exception 'the set was granted before, and part of it has ended' using errcode = 'FL002';
		end if;
		foreach r in array rs loop
			a.wake := wake || fencelock.settle(r.name);
			wake := a.wake;
			a.name := r.name;
			if exists (select 1 from fencelock.holds where name = r.name and limit_n <> r.limit_n)
				or exists (select 1 from fencelock.waits where name = r.name and limit_n <> r.limit_n) then
				a.state := 'mismatch';
				return next a;
				return;
			elsif fencelock.barred(r.name, r.kind, r.permits, r.limit_n)
				or exists (select 1 from fencelock.waits where name = r.name) then
				return next fencelock.held_by(a, r.name);
				return;
			end if;
		end loop;
		insert into fencelock.sets (name, request_id, session) values ((rs[1]).name, (rs[1]).request_id, (rs[1]).session)
			on conflict (name, request_id) do update set session = excluded.session, at = excluded.at;
		delete from fencelock.sets where (name, request_id) in (select name, request_id from fencelock.sets
			where at < clock_timestamp() - interval '15 minutes' order by at limit 4 for update skip locked);
	end if;
	foreach r in array rs loop
		a := fencelock.acquire(r, false, minimum);
		if a.state <> 'granted' then
			raise exception 'a set of names is granted as a whole' using errcode = 'FL001'; -- nothing is kept
		end if;
		a.wake := wake || a.wake;
		wake := '{}';
		return next a;
	end loop;
end $$;

-- As before, but a name that changes hands here does so in a durable transaction on the known timeline: interest() turns
-- synchronous_commit off, and the waiter that is granted the name may be answered without a commit.
create or replace function fencelock.changes_since(nm text, since bigint,
	out compacted boolean, out news fencelock.changes[], out revision bigint, out wake text[]) language plpgsql as $$
declare n fencelock.names;
begin
	revision := fencelock.interest(nm);
	if exists (select 1 from fencelock.holds o left join fencelock.sessions s on s.id = o.session
			where o.name = nm and o.session <> '' and coalesce(s.expires_at, '-infinity') <= clock_timestamp()) then
		perform fencelock.enter();
		perform fencelock.lock_name(nm);
		wake := fencelock.settle(nm);
	end if;
	select * into n from fencelock.names where name = nm for share;
	revision := n.revision;
	compacted := since < n.recorded_from or since > n.revision;
	select array_agg(c order by c.revision) into news from fencelock.changes c where c.name = nm and c.revision > since;
end $$;

-- Requests that were released by their id, or moved to another session, for as long as an earlier statement may arrive.
create table fencelock.decided (
	name       text collate "C" not null,
	request_id text not null,
	at         timestamptz not null,
	primary key (name, request_id)
) with (autovacuum_vacuum_scale_factor = 0.01);

create index decided_at on fencelock.decided (at);

-- Notes that what was sent earlier for these requests comes too late.
create function fencelock.decide(nms text[], reqs text[]) returns void language sql volatile as $$
	insert into fencelock.decided select name, request_id, clock_timestamp() from unnest(nms, reqs) u(name, request_id)
		order by name, request_id on conflict (name, request_id) do update set at = excluded.at;
	delete from fencelock.decided where (name, request_id) in (select name, request_id from fencelock.decided
		where at < clock_timestamp() - interval '15 minutes' order by at limit 4 * cardinality(nms) for update skip locked);
$$;

-- Whether the present statement was sent before the last decision about its request: the client's greatest reading of
-- the server's clock, when it sent the statement, is earlier. A client of an earlier version sends none.
create function fencelock.too_late(nm text, req text) returns boolean language plpgsql as $$
declare known bigint[] := string_to_array(nullif(current_setting('fencelock.seen', true), ''), ' ');
begin
	return known[4] is not null and exists (select 1 from fencelock.decided where name = nm and request_id = req
		and at > to_timestamp(known[4] / 1e6) and at <= clock_timestamp());
end $$;

-- As before, but not for a statement that comes too late: FL005. A repeat that moves its hold or its place is a
-- decision.
create or replace function fencelock.acquire(r fencelock.holds, may_wait boolean, minimum interval) returns fencelock.answer
language plpgsql as $$
declare
	a fencelock.answer;
	mine fencelock.holds;
	alive boolean;
	busy boolean;
begin
	a.here := fencelock.enter();
	perform 1 from fencelock.names where name = r.name for update;
	if not found then
		perform fencelock.lock_name(r.name);
	end if;
	if fencelock.too_late(r.name, r.request_id) then
		raise exception 'the request was released or moved after this statement was sent' using errcode = 'FL005';
	end if;
	select exists (select 1 from fencelock.sessions s
				where id = r.session and (expires_at > clock_timestamp() or not fencelock.over(s))),
			exists (select 1 from fencelock.holds where name = r.name)
				or exists (select 1 from fencelock.waits where name = r.name)
				or exists (select 1 from fencelock.cluster where closed_until > clock_timestamp())
		into alive, busy;
	if not alive then
		a.state := 'no-session';
		return a;
	end if;
	if busy then
		-- The session may be another one now: that of another TTL, or of the same client after an outage.
		update fencelock.waits set session = r.session
			where name = r.name and request_id = r.request_id and session <> r.session;
		if found then
			perform fencelock.decide(array[r.name], array[r.request_id]);
		end if;
		a.wake := fencelock.settle(r.name);
		select * into mine from fencelock.holds where name = r.name and request_id = r.request_id and session <> '' for update;
		if found then
			if mine.session <> r.session then
				perform fencelock.decide(array[r.name], array[r.request_id]);
			end if;
			-- Also where it stays, so that standbys confirm a hold whose own commit they have not confirmed.
			update fencelock.holds set session = r.session where name = r.name and request_id = r.request_id;
			return fencelock.granted(a, mine);
		end if;
		if exists (select 1 from fencelock.waits where name = r.name and request_id = r.request_id) then
			a.state := 'waiting';
			return fencelock.nothing_granted(a);
		end if;
		if exists (select 1 from fencelock.holds where name = r.name and limit_n <> r.limit_n)
			or exists (select 1 from fencelock.waits where name = r.name and limit_n <> r.limit_n) then
			a.state := 'mismatch';
			return fencelock.nothing_granted(a);
		end if;
		busy := fencelock.barred(r.name, r.kind, r.permits, r.limit_n)
			or exists (select 1 from fencelock.waits where name = r.name);
	end if;
	if not busy then
		if minimum is not null then
			r.min_until := clock_timestamp() + minimum;
		end if;
		r.queued := false;
		return fencelock.granted(a, fencelock.grant_hold(r));
	end if;
	if may_wait then
		insert into fencelock.waits
			select r.name, coalesce(max(ticket), 0) + 1, r.request_id, r.hold_id, r.session, r.owner, r.kind, r.permits,
				r.limit_n, minimum, r.metadata
			from fencelock.waits where name = r.name;
		a.state := 'waiting';
		return fencelock.nothing_granted(a);
	end if;
	return fencelock.nothing_granted(fencelock.held_by(a, r.name));
end $$;

-- As acquire, where an earlier statement of the request was not answered: from now on that one comes too late.
create function fencelock.acquire_again(r fencelock.holds, may_wait boolean, minimum interval, under text[])
returns fencelock.answer language plpgsql as $$
declare a fencelock.answer := fencelock.acquire(r, may_wait, minimum, under);
begin
	perform fencelock.decide(array[r.name], array[r.request_id]);
	return a;
end $$;

-- As before, without the statements that come too late: they are repeated alone.
create or replace function fencelock.acquire_free(rs fencelock.holds[], out places bigint[], out tokens bigint[],
	out nonces uuid[], out here bigint)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare mine text[];
begin
	here := fencelock.enter();
	if exists (select 1 from fencelock.cluster where closed_until > clock_timestamp()) then
		return;
	end if;
	insert into fencelock.names (name)
		select distinct r.name from unnest(rs) r where not exists (select 1 from fencelock.names where name = r.name) order by 1
		on conflict do nothing;
	select array_agg(n.name) into mine from (
		select name from fencelock.names where name = any (array(select name from unnest(rs)))
			and (recorded_until is null or recorded_until <= clock_timestamp())
		for update skip locked) n;
	with asked as materialized (
		select distinct on (r.name) * from unnest(rs) with ordinality r(name, request_id, hold_id, session, owner, kind, permits,
			limit_n, token, since, min_until, queued, metadata, nonce, i) where r.name = any (mine)
	), granted as (
		update fencelock.names n
			set used_at = clock_timestamp(), token = greatest(token + 1, fencelock.position())
			from (select name, request_id, hold_id, session, owner, kind, permits, limit_n, metadata, i from asked) a
			where n.name = a.name
				and not exists (select 1 from fencelock.holds where name = a.name offset 0)
				and not exists (select 1 from fencelock.waits where name = a.name offset 0)
				and exists (select 1 from fencelock.sessions where id = a.session and expires_at > clock_timestamp() offset 0)
				and not exists (select 1 from fencelock.decided where name = a.name and request_id = a.request_id offset 0)
			returning a.*, n.token, gen_random_uuid() as nonce
	), held as (
		insert into fencelock.holds
			select name, request_id, hold_id, session, owner, kind, permits, limit_n, token, clock_timestamp(), null, false, metadata,
				nonce
			from granted
	)
	select array_agg(i), array_agg(token), array_agg(nonce) into places, tokens, nonces from granted;
end $$;

-- As before. A release of the request alone is a decision.
create or replace function fencelock.release(nm text, req text, tok bigint, keep_minimum boolean) returns fencelock.answer
language plpgsql as $$
declare
	a fencelock.answer;
	h fencelock.holds;
	watched timestamptz;
begin
	a.here := fencelock.enter();
	if tok = 0 then
		watched := (fencelock.lock_name(nm)).recorded_until; -- also a name that nobody has used: its acquire may be under way
		perform fencelock.decide(array[nm], array[req]);
	else
		select recorded_until into watched from fencelock.names where name = nm for update;
	end if;
	select * into h from fencelock.holds
		where name = nm and request_id = req and (tok = 0 or token = tok and session <> '');
	if found and h.session <> '' and not fencelock.session_ended(h.session, true) then
		a.state := 'ended';
		if watched is not null then
			perform fencelock.record(nm, 'released', h.owner, h.kind, h.token, '');
		end if;
		if keep_minimum and h.min_until > clock_timestamp() then
			update fencelock.holds set session = '' where name = nm and request_id = req;
		else
			delete from fencelock.holds where name = nm and request_id = req;
		end if;
	elsif found and tok = 0 and h.min_until > clock_timestamp() then
		a.state := 'ended';
		if h.session <> '' then
			perform fencelock.record(nm, 'expired', h.owner, h.kind, h.token, '');
		end if;
		delete from fencelock.holds where name = nm and request_id = req;
	elsif tok = 0 then
		delete from fencelock.waits where name = nm and request_id = req;
		a.state := case when found then 'ended' else 'not-held' end;
	else
		a.state := 'not-held';
		select v.reason, v.why, v.by_whom, v.principal into a.reason, a.why, a.by_whom, a.principal
			from fencelock.revoked v where v.name = nm and v.token = tok;
	end if;
	if exists (select 1 from fencelock.waits where name = nm) then
		a.wake := fencelock.settle(nm);
	end if;
	return a;
end $$;

-- As release of a request alone, unless its hold or place is on a session whose id begins otherwise: another client has
-- repeated the request, and was answered with it.
create function fencelock.leave(nm text, req text, mine text) returns fencelock.answer language plpgsql as $$
declare a fencelock.answer;
begin
	a.here := fencelock.enter();
	perform fencelock.lock_name(nm);
	if exists (select 1 from fencelock.holds
			where name = nm and request_id = req and session <> '' and not starts_with(session, mine))
		or exists (select 1 from fencelock.waits where name = nm and request_id = req and not starts_with(session, mine)) then
		a.state := 'not-held';
		return a;
	end if;
	return fencelock.release(nm, req, 0, false);
end $$;

-- As before, but what has moved to another session since it was found stays.
create or replace function fencelock.sweep(ses text, known text[], and_session boolean) returns text[] language plpgsql as $$
declare
	r record;
	wake text[] := '{}';
begin
	perform fencelock.enter();
	for r in
		select name, request_id from fencelock.holds where session = ses and request_id <> all (known)
		union select name, request_id from fencelock.waits where session = ses and request_id <> all (known)
		order by name
	loop
		wake := wake || (fencelock.leave(r.name, r.request_id, ses)).wake;
	end loop;
	if and_session then
		delete from fencelock.sessions where id = ses;
	end if;
	return wake;
end $$;

-- Moves holds from one session of their client to another one with another TTL, which lives at least as long as the
-- first would have: a hold never ends earlier because it moved. Holds that are elsewhere by now stay there, so that a
-- move that comes late takes nothing back.
create function fencelock.move(ses text, from_ses text, nms text[], reqs text[], toks bigint[]) returns bigint
language plpgsql as $$
declare
	here bigint := fencelock.enter();
	names text[];
	requests text[];
begin
	update fencelock.sessions t set expires_at = s.expires_at from fencelock.sessions s
		where t.id = ses and s.id = from_ses and not fencelock.over(s) and not fencelock.over(t)
			and t.expires_at < s.expires_at;
	with moved as (
		update fencelock.holds h set session = ses
			from unnest(nms, reqs, toks) u(name, request_id, token)
			where h.name = u.name and h.request_id = u.request_id and h.token = u.token
				and h.session = from_ses and from_ses not in ('', ses)
				and exists (select 1 from fencelock.sessions s where s.id = from_ses and not fencelock.over(s))
				and exists (select 1 from fencelock.sessions t where t.id = ses and not fencelock.over(t))
			returning h.name, h.request_id
	)
	select array_agg(m.name), array_agg(m.request_id) into names, requests from moved m;
	if names is not null then
		perform fencelock.decide(names, requests);
	end if;
	return here;
end $$;

-- As before, for programs that do not say from which session.
create or replace function fencelock.move(ses text, nms text[], reqs text[], toks bigint[]) returns bigint
language plpgsql as $$
declare from_ses text;
begin
	for from_ses in select distinct h.session from fencelock.holds h
		join unnest(nms, reqs, toks) u(name, request_id, token)
			on h.name = u.name and h.request_id = u.request_id and h.token = u.token
	loop
		perform fencelock.move(ses, from_ses, nms, reqs, toks);
	end loop;
	return fencelock.enter();
end $$;
