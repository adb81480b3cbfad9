-- The oldest program that may go on with the schema, as the number of steps that it knows. A program that is older
-- than the schema uses it if the steps that it does not know allow that.
alter table fencelock.migrations add column least_program int not null default 0;

-- A dump can be put back in place, over what has happened since: written is the transaction that wrote the row, as
-- xmin is, which no dump carries. longest is the greatest TTL of any session, closed_until the end of the time in
-- which nothing is granted, shift is added to the log position in tokens, see position, and names_swept is when reap
-- looked for unused names.
alter table fencelock.cluster
	add column written      bigint,
	add column longest      interval not null default '0',
	add column closed_until timestamptz,
	add column shift        bigint not null default 0,
	add column names_swept  timestamptz not null default now();

alter table fencelock.names add column used_at timestamptz not null default now();

-- When the session was renewed last, and since when it was seen to be late, see session_ended.
alter table fencelock.sessions
	add column renewed_at   timestamptz not null default clock_timestamp(),
	add column suspected_at timestamptz;

-- What a row of cluster has in written.
create function fencelock.this_transaction() returns bigint language sql volatile as $$
	select (pg_current_xact_id()::text::numeric % 4294967296)::bigint
$$;

-- What is added to the log position in tokens of a timeline that began with an age of what was there, at a position: a
-- server that was restored twice from one backup is on the same timeline twice, and what the first one has granted is
-- forgotten. It is 1024 for each millisecond, for a log of 65 MB/s at most, a half of the 43 bits at most, and leaves
-- 2^32 of them to the log in any case. An unknown age counts as the greatest.
create function fencelock.shift_for(age interval, pos bigint) returns bigint language sql immutable as $$
	select greatest(0, least(coalesce((extract(epoch from age) * 1024000)::numeric, 1::numeric * (1::bigint << 42)),
		1::bigint << 42, (1::bigint << 43) - (1::bigint << 32) - pos))::bigint
$$;

update fencelock.cluster set written = fencelock.this_transaction(), shift = case when timeline = 1 then 0 else
	fencelock.shift_for(null, fencelock.durable_position() & ((1::bigint << 43) - 1)) end;

-- As before, with the shift.
create or replace function fencelock.position() returns bigint language plpgsql as $$
declare pos bigint := ((pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint >> 6) + (select shift from fencelock.cluster);
begin
	if pos >> 43 > 0 then
		raise exception 'the log position is beyond the 43 bits that a token has for it' using errcode = 'FL004';
	end if;
	return (('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint << 43) | pos;
end $$;

-- As before, on the first call on a new timeline. On the first call after a dump was put back, the history begins
-- anew: the incarnation tells clients that live, which lose their sessions, and nothing is granted for the longest
-- TTL, in which all others have noticed. A row that is missing is on its way in a restore.
create or replace function fencelock.enter() returns bigint language plpgsql as $$
declare
	here bigint := fencelock.durable_position();
	known int;
	ours boolean;
	age interval;
begin
	perform fencelock.be_patient();
	if current_setting('synchronous_commit') not in ('on', 'remote_apply') then
		perform set_config('synchronous_commit', 'on', true);
	end if;
	select timeline, xmin::text::bigint = written into known, ours from fencelock.cluster;
	if known = (here >> 43)::int and ours then
		return here;
	end if;
	select timeline, xmin::text::bigint = written into known, ours from fencelock.cluster for update;
	if not found then
		raise exception 'fencelock.cluster is empty' using errcode = 'FL003',
			hint = 'A restore is under way, or the tables were emptied: run fencelock postgres migrate.';
	elsif known = (here >> 43)::int and ours then
		return here;
	end if;
	if ours then
		age := clock_timestamp() - greatest((select max(renewed_at) from fencelock.sessions),
			(select max(used_at) from fencelock.names), (select max(applied_at) from fencelock.migrations));
		if age < interval '0' then
			age := null;
		end if;
		update fencelock.cluster set timeline = (here >> 43)::int, written = fencelock.this_transaction(),
			shift = fencelock.shift_for(age, here & ((1::bigint << 43) - 1));
		update fencelock.sessions set renewed_at = clock_timestamp(), suspected_at = null,
			expires_at = clock_timestamp() + ttl;
	else
		update fencelock.cluster set timeline = (here >> 43)::int, written = fencelock.this_transaction(),
			incarnation = gen_random_uuid(), shift = case when here >> 43 = 1 then 0 else
				fencelock.shift_for(null, here & ((1::bigint << 43) - 1)) end,
			closed_until = clock_timestamp() + greatest(longest, (select max(ttl) from fencelock.sessions));
		delete from fencelock.sessions;
	end if;
	return here;
end $$;

-- Makes the row of cluster where there is none, as after TRUNCATE: its history begins.
create function fencelock.begin_history() returns void language sql as $$
	insert into fencelock.cluster (timeline, written, shift)
		select (here >> 43)::int, fencelock.this_transaction(), case when here >> 43 = 1 then 0 else
			fencelock.shift_for(null, here & ((1::bigint << 43) - 1)) end
		from fencelock.durable_position() here where not exists (select 1 from fencelock.cluster)
		on conflict do nothing
$$;

-- How long nothing is granted: null for a service that is open.
create function fencelock.closed_for() returns interval language sql volatile as $$
	select closed_until - clock_timestamp() from fencelock.cluster where closed_until > clock_timestamp()
$$;

-- For an operator who has restored the server to a time in the past: as if a dump had been put back.
create function fencelock.restored() returns void language sql as $$
	update fencelock.cluster set written = 0
$$;

-- For an operator who knows that no client of before the restore believes in a hold any more.
create function fencelock.open() returns void language plpgsql as $$
begin
	perform fencelock.enter();
	update fencelock.cluster set closed_until = null, written = fencelock.this_transaction();
end $$;

-- As before, also where a row is deleted meanwhile, see reap.
create or replace function fencelock.lock_name(nm text) returns fencelock.names language plpgsql as $$
declare n fencelock.names;
begin
	loop
		select * into n from fencelock.names where name = nm for update;
		if found then
			return n;
		end if;
		insert into fencelock.names (name) values (nm) on conflict do nothing;
	end loop;
end $$;

-- What the caller knows of the server's clock, for the rest of the transaction: the server's time of a reading since
-- which it has seen no jump, the least time that it is by the caller's own clock if there was none since, both in
-- microseconds, and whether there was a jump before. An empty text is a caller who knows nothing. Returns the value,
-- so that an argument of a verb can carry it.
create function fencelock.seen(value anyelement, known text) returns anyelement language plpgsql as $$
begin
	perform set_config('fencelock.seen', known, true);
	return value;
end $$;

-- Whether a session can be ended: its time is over, and not by a jump of the server's clock. The caller has seen the
-- clock go evenly since the last renewal, or somebody has found it late a third of its TTL and a second ago, in which
-- it would have been renewed.
create function fencelock.over(s fencelock.sessions) returns boolean language plpgsql as $$
declare
	known bigint[] := string_to_array(nullif(current_setting('fencelock.seen', true), ''), ' ');
	since timestamptz := to_timestamp(known[1] / 1e6);
	now timestamptz := least(clock_timestamp(), to_timestamp(known[2] / 1e6));
begin
	return coalesce(s.expires_at <= now and (s.renewed_at >= since
		or s.suspected_at <= now - (s.ttl / 3 + interval '1 s') and (known[3] = 1 and s.suspected_at < since) is not true), false);
end $$;

-- Whether a session is late: a client renews it after a third of its TTL. Before its renewal it is if the clock went
-- back.
create function fencelock.late(s fencelock.sessions) returns boolean language sql volatile as $$
	select clock_timestamp() not between s.renewed_at and s.renewed_at + s.ttl * 0.4
$$;

drop function fencelock.session_ended(text);

-- As before, for what over says. One that is late is marked, so that it can be ended later if it is not renewed; one
-- that was renewed in the future, by a clock that was put back, gets its TTL from now on. A living session is not
-- locked. patient: wait for the row.
create function fencelock.session_ended(ses text, patient boolean) returns boolean language plpgsql as $$
declare
	s fencelock.sessions;
	known bigint[] := string_to_array(nullif(current_setting('fencelock.seen', true), ''), ' ');
begin
	select * into s from fencelock.sessions where id = ses;
	if found and not fencelock.late(s) then
		return false;
	end if;
	if patient then
		select * into s from fencelock.sessions where id = ses for update;
	else
		select * into s from fencelock.sessions where id = ses for update skip locked;
	end if;
	if not found then
		return not exists (select 1 from fencelock.sessions where id = ses);
	elsif fencelock.over(s) then
		delete from fencelock.sessions where id = ses;
		return true;
	elsif s.renewed_at > clock_timestamp() then
		update fencelock.sessions set renewed_at = clock_timestamp(), suspected_at = null,
			expires_at = least(expires_at, clock_timestamp() + ttl) where id = ses;
	elsif fencelock.late(s) and (s.suspected_at is null or s.suspected_at > clock_timestamp()
		or known[3] = 1 and s.suspected_at < to_timestamp(known[1] / 1e6))
	then
		update fencelock.sessions set suspected_at = clock_timestamp() where id = ses;
	end if;
	return false;
end $$;

-- As before, but for the time in which nothing is granted.
create or replace function fencelock.barred(nm text, knd smallint, prm int, lim int) returns boolean language sql volatile as $$
	select fencelock.closed_for() is not null or case knd
		when 0 then exists (select 1 from fencelock.holds where name = nm)
		when 1 then exists (select 1 from fencelock.holds where name = nm and kind <> 1)
		else (select coalesce(sum(permits), 0) from fencelock.holds where name = nm) + prm > lim
	end
$$;

-- As before, with when the name was used.
create or replace function fencelock.grant_hold(h fencelock.holds) returns fencelock.holds language plpgsql as $$
declare watched timestamptz;
begin
	update fencelock.names set used_at = clock_timestamp(), token = greatest(token + 1, fencelock.position())
		where name = h.name returning token, recorded_until into h.token, watched;
	h.since := clock_timestamp();
	h.nonce := gen_random_uuid();
	insert into fencelock.holds values (h.*);
	if watched is not null then
		perform fencelock.record(h.name, 'acquired', h.owner, h.kind, h.token, '');
	end if;
	return h;
end $$;

-- As before, with the sessions that are late. A minimum that a clock has granted which was put back lasts its time
-- from now on.
create or replace function fencelock.settle(nm text) returns text[] language plpgsql as $$
declare
	h fencelock.holds;
	w fencelock.waits;
	wake text[] := '{}';
	chan text;
begin
	update fencelock.holds set min_until = clock_timestamp() + (min_until - since), since = clock_timestamp()
		where name = nm and since > clock_timestamp();
	for h in
		select o.* from fencelock.holds o left join fencelock.sessions s on s.id = o.session
		where o.name = nm and (s.id is null or fencelock.late(s)) order by o.session
	loop
		if fencelock.session_ended(h.session, true) then
			if h.session <> '' then
				perform fencelock.record(nm, 'expired', h.owner, h.kind, h.token, '');
			end if;
			if h.min_until > clock_timestamp() then
				update fencelock.holds set session = '' where name = nm and request_id = h.request_id and session = h.session;
			else
				-- Unless it went to another session of its client meanwhile, see move.
				delete from fencelock.holds where name = nm and request_id = h.request_id and session = h.session;
			end if;
		end if;
	end loop;
	for w in select * from fencelock.waits where name = nm order by ticket loop
		-- Without waiting: the rows come in no order.
		if fencelock.session_ended(w.session, false) then
			delete from fencelock.waits where name = nm and ticket = w.ticket;
			continue;
		end if;
		exit when fencelock.barred(nm, w.kind, w.permits, w.limit_n);
		select channel into chan from fencelock.sessions where id = w.session;
		perform fencelock.grant_hold(row(nm, w.request_id, w.hold_id, w.session, w.owner, w.kind, w.permits, w.limit_n,
			0, null, clock_timestamp() + w.min_hold, true, w.metadata, null)::fencelock.holds);
		delete from fencelock.waits where name = nm and ticket = w.ticket;
		wake := wake || array[chan, w.hold_id];
	end loop;
	return wake;
end $$;

-- As before, with the rest of a time in which nothing is granted, and that after which a late session can be ended.
create or replace function fencelock.held_by(a fencelock.answer, nm text) returns fencelock.answer language plpgsql as $$
begin
	a.state := 'held';
	select case when o.session = '' then '' else o.owner end, case when o.session = '' then '' else o.hold_id end,
			greatest(1, extract(epoch from
				greatest(s.expires_at, o.min_until, s.suspected_at + s.ttl / 3 + interval '1 s') - clock_timestamp()) * 1000)::bigint
		into a.holder, a.hold_id, a.retry
		from fencelock.holds o left join fencelock.sessions s on s.id = o.session
		where o.name = nm order by o.session = '', greatest(s.expires_at, o.min_until) limit 1;
	if not found then
		a.retry := coalesce(greatest(1, extract(epoch from fencelock.closed_for()) * 1000)::bigint, 1);
	end if;
	return a;
end $$;

-- As before, with those.
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
		update fencelock.waits set session = r.session where name = r.name and request_id = r.request_id;
		a.wake := fencelock.settle(r.name);
		update fencelock.holds set session = r.session
			where name = r.name and request_id = r.request_id and session <> '' returning * into mine;
		if found then
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

-- As before, with those.
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
			returning a.*, n.token, gen_random_uuid() as nonce
	), held as (
		insert into fencelock.holds
			select name, request_id, hold_id, session, owner, kind, permits, limit_n, token, clock_timestamp(), null, false, metadata,
				nonce
			from granted
	)
	select array_agg(i), array_agg(token), array_agg(nonce) into places, tokens, nonces from granted;
end $$;

-- As before, with sessions that are not over.
create or replace function fencelock.move(ses text, nms text[], reqs text[], toks bigint[]) returns bigint language plpgsql as $$
declare here bigint := fencelock.enter();
begin
	update fencelock.holds h set session = ses, min_until = greatest(h.min_until, s.expires_at)
		from unnest(nms, reqs, toks) u(name, request_id, token), fencelock.sessions s
		where h.name = u.name and h.request_id = u.request_id and h.token = u.token
			and s.id = h.session and not fencelock.over(s) and h.session <> ses
			and exists (select 1 from fencelock.sessions t where t.id = ses and not fencelock.over(t));
	return here;
end $$;

-- As before, and the longest TTL.
create or replace function fencelock.begin_session(ses text, chan text, ttl_ms bigint) returns bigint language plpgsql as $$
declare here bigint := fencelock.enter();
begin
	update fencelock.cluster set longest = ttl_ms * interval '1 ms', written = fencelock.this_transaction()
		where longest < ttl_ms * interval '1 ms';
	insert into fencelock.sessions (id, channel, ttl, expires_at) values
		(ses, chan, ttl_ms * interval '1 ms', clock_timestamp() + ttl_ms * interval '1 ms') on conflict do nothing;
	return here;
end $$;

-- As before, with sessions that are late, and names that are not used any more. A name has its token so that the next
-- one is greater, which the position is as well once the token is below what a crash leaves of it.
create or replace function fencelock.reap() returns text[] language plpgsql as $$
declare
	wake text[] := '{}';
	id text;
	old text[];
begin
	if not pg_try_advisory_xact_lock(hashtextextended('fencelock.reap', 0)) then
		return '{}'; -- somebody is at it
	end if;
	perform fencelock.enter();
	delete from fencelock.revoked where at < clock_timestamp() - interval '1 hour';
	select fencelock.settle_names(array_agg(name)) into wake from (
		select name from fencelock.holds o left join fencelock.sessions s on s.id = o.session
			where (s.id is null or s.expires_at <= clock_timestamp() or s.renewed_at > clock_timestamp())
				and (o.min_until is null or o.min_until <= clock_timestamp())
		union select name from fencelock.waits w left join fencelock.sessions s on s.id = w.session
			where s.id is null or s.expires_at <= clock_timestamp()
		limit 100) over_due;
	for id in select s.id from fencelock.sessions s where (expires_at <= clock_timestamp() or renewed_at > clock_timestamp())
		and not exists (select 1 from fencelock.holds where session = s.id)
		and not exists (select 1 from fencelock.waits where session = s.id)
	loop
		perform fencelock.session_ended(id, false);
	end loop;
	delete from fencelock.changes c using fencelock.names n
		where n.name = c.name and n.recorded_until <= clock_timestamp();
	update fencelock.cluster set names_swept = clock_timestamp(), written = fencelock.this_transaction()
		where names_swept not between clock_timestamp() - interval '5 minutes' and clock_timestamp();
	if not found then
		return coalesce(wake, '{}');
	end if;
	select array_agg(name) into old from (select name from fencelock.names n
		where used_at < clock_timestamp() - interval '1 day' and (recorded_until <= clock_timestamp()) is not false
			and not exists (select 1 from fencelock.holds where name = n.name)
			and not exists (select 1 from fencelock.waits where name = n.name)
		limit 20000 for update skip locked) unused;
	-- What came before the rows were locked is seen from here on.
	delete from fencelock.names n where name = any (old)
		and token < fencelock.durable_position() + (select shift from fencelock.cluster)
		and not exists (select 1 from fencelock.holds where name = n.name)
		and not exists (select 1 from fencelock.waits where name = n.name);
	return coalesce(wake, '{}');
end $$;

-- As before, with the sessions that are late, so that they are marked in time.
create or replace function fencelock.poll(nms text[], reqs text[]) returns table
	(i bigint, state text, session text, token bigint, min_left bigint, due boolean, ahead bigint, here bigint, nonce uuid)
language sql volatile as $$
	select u.i,
		case when h.name is not null then 'granted' when w.name is not null then 'waiting' else 'gone' end,
		coalesce(h.session, ''), coalesce(h.token, 0),
		greatest(0, extract(epoch from h.min_until - clock_timestamp()) * 1000)::bigint,
		w.name is not null and (
			not exists (select 1 from fencelock.holds o where o.name = u.name) and fencelock.closed_for() is null
			or exists (select 1 from fencelock.holds o left join fencelock.sessions s on s.id = o.session
				where o.name = u.name and (coalesce(s.expires_at, '-infinity') <= clock_timestamp()
						or fencelock.late(s) and (s.suspected_at <= clock_timestamp()) is not true)
					and coalesce(o.min_until, '-infinity') <= clock_timestamp())
			or exists (select 1 from fencelock.waits a left join fencelock.sessions s on s.id = a.session
				where a.name = u.name and a.ticket < w.ticket and coalesce(s.expires_at, '-infinity') <= clock_timestamp())),
		(select count(*) from (select from fencelock.waits a where a.name = u.name and a.ticket < w.ticket limit 20) front),
		fencelock.durable_position(), h.nonce
	from unnest(nms, reqs) with ordinality u(name, request_id, i)
	left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.session <> ''
	left join fencelock.waits w on w.name = u.name and w.request_id = u.request_id
$$;

-- The name in the way of a set that was refused.
alter type fencelock.answer add attribute name text;

-- As before, with that name.
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
		foreach r in array rs loop
			if kept > 0 then -- some are left of an earlier try: all or none
				wake := wake || (fencelock.release(r.name, r.request_id, 0, false)).wake;
			end if;
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

-- Who asked for a ForceRelease, and the identity that the service of the caller has authenticated, for the victims.
alter table fencelock.revoked add column by_whom text not null default '', add column principal text not null default '';

alter type fencelock.answer add attribute by_whom text;
alter type fencelock.answer add attribute principal text;

drop function fencelock.force_release(text, text, uuid, bigint);

-- As before, with those.
create function fencelock.force_release(nm text, why text, by_whom text, principal text, only_nonce uuid, only_token bigint)
returns fencelock.answer language plpgsql as $$
declare
	a fencelock.answer;
	h record;
	woken text[];
begin
	a.here := fencelock.enter();
	perform 1 from fencelock.names where name = nm for update;
	woken := fencelock.settle(nm);
	a.state := 'not-held';
	a.wake := '{}';
	for h in select o.*, s.channel from fencelock.holds o join fencelock.sessions s on s.id = o.session
		where o.name = nm and (only_nonce is null or o.nonce = only_nonce) and (only_token = 0 or o.token = only_token)
	loop
		a.state := 'ended';
		insert into fencelock.revoked (name, token, reason, why, by_whom, principal) values
			(nm, h.token, 'force-released', force_release.why, force_release.by_whom, force_release.principal)
			on conflict do nothing;
		perform fencelock.record(nm, 'force-released', h.owner, h.kind, h.token, force_release.why);
		delete from fencelock.holds where name = nm and request_id = h.request_id;
		a.wake := a.wake || array[h.channel, h.hold_id];
	end loop;
	a.wake := woken || a.wake || fencelock.settle(nm);
	return a;
end $$;

-- As before, with those. With token 0 no caller had the hold: a minimum of it that still keeps the name closed ends as
-- well.
create or replace function fencelock.release(nm text, req text, tok bigint, keep_minimum boolean) returns fencelock.answer
language plpgsql as $$
declare
	a fencelock.answer;
	h fencelock.holds;
	watched timestamptz;
begin
	a.here := fencelock.enter();
	select recorded_until into watched from fencelock.names where name = nm for update;
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

drop function fencelock.renew(text, text[], text[], bigint[]);

-- As before, with those, and in the time of session_ended. Nobody has ended what is there, so a renewal revives it. It
-- never shortens, but for a clock that was put back.
create function fencelock.renew(ses text, nms text[], reqs text[], toks bigint[], out state text, out gone int[],
	out reasons text[], out whys text[], out bys text[], out principals text[], out moved int[], out sessions text[],
	out here bigint)
	language plpgsql as $$
begin
	here := fencelock.enter();
	update fencelock.sessions s
		set renewed_at = clock_timestamp(), expires_at = clock_timestamp() + ttl, suspected_at = null
		where id = ses and (expires_at > clock_timestamp() or not fencelock.over(s));
	if not found then
		state := 'no-session';
		return;
	end if;
	state := 'renewed';
	select array_agg(u.i) filter (where h.name is null), array_agg(coalesce(v.reason, '')) filter (where h.name is null),
			array_agg(coalesce(v.why, '')) filter (where h.name is null),
			array_agg(coalesce(v.by_whom, '')) filter (where h.name is null),
			array_agg(coalesce(v.principal, '')) filter (where h.name is null),
			array_agg(u.i) filter (where h.name is not null), array_agg(h.session) filter (where h.name is not null)
		into gone, reasons, whys, bys, principals, moved, sessions
		from unnest(nms, reqs, toks) with ordinality u(name, request_id, token, i)
		left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.token = u.token
		left join fencelock.revoked v on v.name = u.name and v.token = u.token
		where h.name is null or h.session <> ses;
end $$;
