-- Locks, sessions and queues. Every function is one transaction of the driver. All of them take the row of the name first
-- and hold it to the end, so that what happens to one name happens in one order; only then they look, with fresh
-- snapshots (READ COMMITTED). Time is clock_timestamp(): now() is the start of the transaction, which may have waited.

create schema if not exists fencelock;

create table fencelock.migrations (
	version    int primary key,
	applied_at timestamptz not null default clock_timestamp()
);

-- The timeline that the sessions were last prolonged under, see fencelock.position; and what tells a client that all that
-- it knew was deleted: drawn anew whenever the row is not there.
create table fencelock.cluster (
	one         boolean primary key default true check (one),
	timeline    int not null,
	incarnation uuid not null default gen_random_uuid()
);

-- A name that was ever used. Never deleted: token is the greatest that was granted.
create table fencelock.names (
	name           text collate "C" primary key,
	token          bigint not null default 0,
	revision       bigint not null default 0, -- counts what happened to the name while somebody was interested
	recorded_from  bigint not null default 0, -- changes after this revision are kept
	recorded_until timestamptz                -- null or past: nobody is interested, and nothing is kept
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);

-- One for each client and TTL. A session is over when its row is gone, or expires_at has passed and somebody deletes it.
create table fencelock.sessions (
	id         text primary key,
	channel    text not null, -- where its client listens
	ttl        interval not null,
	expires_at timestamptz not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);

create table fencelock.holds (
	name       text collate "C" not null,
	request_id text not null,
	hold_id    text not null,
	session    text not null, -- '' once the holder has gone and only the minimum is left
	owner      text not null,
	kind       smallint not null, -- 0 exclusive, 1 shared, 2 permits
	permits    int not null,
	limit_n    int not null, -- 0 but for permits
	token      bigint not null,
	since      timestamptz not null,
	min_until  timestamptz,
	queued     boolean not null,
	metadata   jsonb,
	primary key (name, request_id) -- and no other index, which every grant and release would have to write
) with (autovacuum_vacuum_scale_factor = 0.01);

create table fencelock.waits (
	name       text collate "C" not null,
	ticket     bigint not null,
	request_id text not null,
	hold_id    text not null,
	session    text not null,
	owner      text not null,
	kind       smallint not null,
	permits    int not null,
	limit_n    int not null,
	min_hold   interval,
	metadata   jsonb,
	primary key (name, ticket),
	unique (name, request_id)
) with (autovacuum_vacuum_scale_factor = 0.01);

-- Holds that were taken away, so that their holders can be told why. Kept for an hour.
create table fencelock.revoked (
	name   text collate "C" not null,
	token  bigint not null,
	reason text not null,
	at     timestamptz not null default clock_timestamp(),
	primary key (name, token)
);

create table fencelock.changes (
	name     text collate "C" not null,
	revision bigint not null,
	type     text not null,
	owner    text not null,
	kind     smallint not null,
	token    bigint not null,
	reason   text not null,
	primary key (name, revision)
);

-- Where this server is in its history: 10 bits of timeline, 43 bits of log position in units of 64 bytes. It rises with
-- every commit, and across a failover, where log positions, sequences and counters in rows may fall. The control file
-- would tell the timeline of before for a while after a promotion; the name of the log file does not.
create function fencelock.position() returns bigint language sql volatile as $$
	select (('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint << 43)
		| ((pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint >> 6)
$$;

-- As position, but of what is on disk: a crash takes back what is not, so that only this may never fall.
create function fencelock.durable_position() returns bigint language sql volatile as $$
	select (('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint << 43)
		| ((pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint >> 6)
$$;

-- What every function does before it may wait for a row: it waits 4 s at most, unless the role has a bound of its own. A
-- client that was cut off cannot take back what it asked for, and would otherwise wait here, on a connection of the
-- server's, as long as the transaction lasts that has the row. The driver's patience for an answer is 5 s.
create function fencelock.be_patient() returns void language plpgsql as $$
begin
	if current_setting('lock_timeout') = '0' then
		perform set_config('lock_timeout', '4s', true);
	end if;
end $$;

-- What every writing function does first. A commit that other servers have not confirmed is none, whatever the role's
-- settings are. The first call on a new timeline gives every session its whole TTL again: its client could not renew it
-- while nobody was primary, and the clock of the new one may be ahead.
create function fencelock.enter() returns bigint language plpgsql as $$
declare
	here bigint := fencelock.durable_position();
	known int;
begin
	perform fencelock.be_patient();
	if current_setting('synchronous_commit') not in ('on', 'remote_apply') then
		perform set_config('synchronous_commit', 'on', true);
	end if;
	select timeline into known from fencelock.cluster;
	if known is distinct from (here >> 43)::int then
		insert into fencelock.cluster (timeline) values ((here >> 43)::int) on conflict do nothing;
		select timeline into known from fencelock.cluster for update;
		if known <> (here >> 43)::int then
			update fencelock.cluster set timeline = (here >> 43)::int;
			update fencelock.sessions set expires_at = greatest(expires_at, clock_timestamp() + ttl);
		end if;
	end if;
	return here;
end $$;

select fencelock.enter();

create function fencelock.lock_name(nm text) returns fencelock.names language plpgsql as $$
declare n fencelock.names;
begin
	select * into n from fencelock.names where name = nm for update;
	if not found then
		insert into fencelock.names (name) values (nm) on conflict do nothing;
		select * into n from fencelock.names where name = nm for update;
	end if;
	return n;
end $$;

-- Keeps what happened for those who watch. The caller has the row of the name.
create function fencelock.record(nm text, typ text, own text, knd smallint, tok bigint, why text) returns void
language plpgsql as $$
declare rev bigint;
begin
	update fencelock.names set revision = revision + 1
		where name = nm and recorded_until > clock_timestamp() returning revision into rev;
	if found then
		insert into fencelock.changes values (nm, rev, typ, own, knd, tok, why);
		if rev % 64 = 0 then
			update fencelock.names set recorded_from = greatest(recorded_from, rev - 1024) where name = nm;
			delete from fencelock.changes where name = nm and revision <= rev - 1024;
		end if;
	end if;
end $$;

-- Whether a session still counts. One whose time is over is deleted, which is final: its client renews only what is there.
create function fencelock.session_ended(ses text) returns boolean language plpgsql as $$
begin
	if exists (select 1 from fencelock.sessions where id = ses and expires_at > clock_timestamp()) then
		return false;
	end if;
	delete from fencelock.sessions where id = ses and expires_at <= clock_timestamp();
	return not exists (select 1 from fencelock.sessions where id = ses);
end $$;

-- Whether holds of the name keep out another one. The caller has the row of the name.
create function fencelock.barred(nm text, knd smallint, prm int, lim int) returns boolean language sql volatile as $$
	select case knd
		when 0 then exists (select 1 from fencelock.holds where name = nm)
		when 1 then exists (select 1 from fencelock.holds where name = nm and kind <> 1)
		else (select coalesce(sum(permits), 0) from fencelock.holds where name = nm) + prm > lim
	end
$$;

-- Makes a hold, with the next token of its name, and returns it. The caller has the row of the name.
create function fencelock.grant_hold(h fencelock.holds) returns fencelock.holds language plpgsql as $$
declare watched timestamptz;
begin
	update fencelock.names set token = greatest(token + 1, fencelock.position())
		where name = h.name returning token, recorded_until into h.token, watched;
	h.since := clock_timestamp();
	insert into fencelock.holds values (h.*);
	if watched is not null then
		perform fencelock.record(h.name, 'acquired', h.owner, h.kind, h.token, '');
	end if;
	return h;
end $$;

-- Ends what has had its time and grants what has become free, in the order of the queue. Returns whom to wake, as
-- channel and hold id. The caller has the row of the name.
create function fencelock.settle(nm text) returns text[] language plpgsql as $$
declare
	h fencelock.holds;
	w fencelock.waits;
	wake text[] := '{}';
	chan text;
begin
	for h in
		select o.* from fencelock.holds o left join fencelock.sessions s on s.id = o.session
		where o.name = nm and (s.id is null or s.expires_at <= clock_timestamp()) order by o.session
	loop
		if fencelock.session_ended(h.session) then
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
		select channel into chan from fencelock.sessions where id = w.session and expires_at > clock_timestamp();
		if not found then
			delete from fencelock.waits where name = nm and ticket = w.ticket;
			continue;
		end if;
		exit when fencelock.barred(nm, w.kind, w.permits, w.limit_n);
		perform fencelock.grant_hold(row(nm, w.request_id, w.hold_id, w.session, w.owner, w.kind, w.permits, w.limit_n,
			0, null, clock_timestamp() + w.min_hold, true, w.metadata)::fencelock.holds);
		delete from fencelock.waits where name = nm and ticket = w.ticket;
		wake := wake || array[chan, w.hold_id];
	end loop;
	return wake;
end $$;

create type fencelock.answer as (
	state     text,    -- granted, waiting, held, mismatch, no-session, ended, not-held
	token     bigint,
	queued    boolean,
	min_left  bigint,  -- ms for which the name stays closed whatever its holder does
	holder    text,
	hold_id   text,
	retry     bigint,  -- ms until the holder's time is over, unless renewed
	reason    text,
	wake      text[],  -- channel and hold id of each that was granted meanwhile
	here      bigint   -- fencelock.durable_position()
);

create function fencelock.granted(a fencelock.answer, h fencelock.holds) returns fencelock.answer language plpgsql as $$
begin
	a.state := 'granted';
	a.token := h.token;
	a.queued := h.queued;
	if h.min_until is not null then
		a.min_left := greatest(0, extract(epoch from h.min_until - clock_timestamp()) * 1000)::bigint;
	end if;
	return a;
end $$;

-- Who is in the way: the hold that ends first. The caller has the row of the name.
create function fencelock.held_by(a fencelock.answer, nm text) returns fencelock.answer language plpgsql as $$
begin
	a.state := 'held';
	select case when o.session = '' then '' else o.owner end, case when o.session = '' then '' else o.hold_id end,
			greatest(1, extract(epoch from greatest(s.expires_at, o.min_until) - clock_timestamp()) * 1000)::bigint
		into a.holder, a.hold_id, a.retry
		from fencelock.holds o left join fencelock.sessions s on s.id = o.session
		where o.name = nm order by o.session = '', greatest(s.expires_at, o.min_until) limit 1;
	return a;
end $$;

-- A commit that grants nothing need not be waited for: what a crash forgets of it is a place in a queue, whose owner asks
-- again, and locks of rows.
create function fencelock.nothing_granted(a fencelock.answer) returns fencelock.answer language plpgsql as $$
begin
	if a.wake is null or a.wake = '{}' then
		perform set_config('synchronous_commit', 'off', true);
	end if;
	return a;
end $$;

-- One acquire: the hold of this request if it has one, else a new one, a place in the queue, or who is in the way.
create function fencelock.acquire(r fencelock.holds, may_wait boolean, minimum interval) returns fencelock.answer
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
	select exists (select 1 from fencelock.sessions where id = r.session and expires_at > clock_timestamp()),
			exists (select 1 from fencelock.holds where name = r.name)
				or exists (select 1 from fencelock.waits where name = r.name)
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

-- Acquires of several free names in one commit: those that nobody holds, waits for or watches, whose rows nobody else has,
-- on sessions that live. Of these requests it returns the places in the array, from 1, and the tokens; to the others it
-- does nothing. It waits for the row of no name, but for who makes the same new name just now, in the order of the names.
-- Plans that are made anew for every array cost more than they save, and one that was made while a table was empty would
-- scan it when it is large.
create function fencelock.acquire_free(rs fencelock.holds[], out places bigint[], out tokens bigint[], out here bigint)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare mine text[];
begin
	here := fencelock.enter();
	insert into fencelock.names (name)
		select distinct r.name from unnest(rs) r where not exists (select 1 from fencelock.names where name = r.name) order by 1
		on conflict do nothing;
	select array_agg(n.name) into mine from (
		select name from fencelock.names where name = any (array(select name from unnest(rs)))
			and (recorded_until is null or recorded_until <= clock_timestamp())
		for update skip locked) n;
	with asked as materialized (
		select distinct on (r.name) * from unnest(rs) with ordinality r(name, request_id, hold_id, session, owner, kind, permits,
			limit_n, token, since, min_until, queued, metadata, i) where r.name = any (mine)
	), granted as (
		update fencelock.names n
			set token = greatest(token + 1, fencelock.position())
			from (select name, request_id, hold_id, session, owner, kind, permits, limit_n, metadata, i from asked) a
			where n.name = a.name
				and not exists (select 1 from fencelock.holds where name = a.name offset 0)
				and not exists (select 1 from fencelock.waits where name = a.name offset 0)
				and exists (select 1 from fencelock.sessions where id = a.session and expires_at > clock_timestamp() offset 0)
			returning a.*, n.token
	), held as (
		insert into fencelock.holds
			select name, request_id, hold_id, session, owner, kind, permits, limit_n, token, clock_timestamp(), null, false, metadata
			from granted
	)
	select array_agg(i), array_agg(token) into places, tokens from granted;
end $$;

-- All of several names, or none: without waiting. The names come in the order of collation C, and are locked in it.
create function fencelock.acquire_all(rs fencelock.holds[], minimum interval) returns setof fencelock.answer
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
			where o.name = r.name and o.request_id = r.request_id and s.expires_at > clock_timestamp())::int;
	end loop;
	if kept < cardinality(rs) then
		foreach r in array rs loop
			if kept > 0 then -- some are left of an earlier try: all or none
				wake := wake || (fencelock.release(r.name, r.request_id, 0, false)).wake;
			end if;
			a.wake := wake || fencelock.settle(r.name);
			wake := a.wake;
			if exists (select 1 from fencelock.holds where name = r.name and limit_n <> r.limit_n)
				or exists (select 1 from fencelock.waits where name = r.name and limit_n <> r.limit_n) then
				a.state := 'mismatch';
				a.holder := r.name;
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

-- Gives back a hold with its token; with token 0, whatever the request has: its hold, or its place in the queue.
create function fencelock.release(nm text, req text, tok bigint, keep_minimum boolean) returns fencelock.answer
language plpgsql as $$
declare
	a fencelock.answer;
	h fencelock.holds;
	watched timestamptz;
begin
	a.here := fencelock.enter();
	select recorded_until into watched from fencelock.names where name = nm for update;
	select * into h from fencelock.holds
		where name = nm and request_id = req and (tok = 0 or token = tok) and session <> '';
	if found and not fencelock.session_ended(h.session) then
		a.state := 'ended';
		if watched is not null then
			perform fencelock.record(nm, 'released', h.owner, h.kind, h.token, '');
		end if;
		if keep_minimum and h.min_until > clock_timestamp() then
			update fencelock.holds set session = '' where name = nm and request_id = req;
		else
			delete from fencelock.holds where name = nm and request_id = req;
		end if;
	elsif tok = 0 then
		delete from fencelock.waits where name = nm and request_id = req;
		a.state := case when found then 'ended' else 'not-held' end;
	else
		a.state := 'not-held';
		select reason into a.reason from fencelock.revoked where name = nm and token = tok;
	end if;
	if exists (select 1 from fencelock.waits where name = nm) then
		a.wake := fencelock.settle(nm);
	end if;
	return a;
end $$;

-- Releases of several holds in one commit, as acquire_free: those of names that nobody waits for or watches, and that have
-- no minimum.
create function fencelock.release_free(nms text[], reqs text[], toks bigint[], out places bigint[], out here bigint)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare mine text[];
begin
	here := fencelock.enter();
	select array_agg(n.name) into mine from (
		select name from fencelock.names where name = any (nms)
			and (recorded_until is null or recorded_until <= clock_timestamp())
		for update skip locked) n;
	with gone as (
		delete from fencelock.holds h
			using unnest(nms, reqs, toks) with ordinality u(name, request_id, token, i)
			where h.name = u.name and h.request_id = u.request_id and h.token = u.token and u.name = any (mine)
				and h.session <> '' and h.min_until is null
				and not exists (select 1 from fencelock.waits where name = u.name offset 0)
				and exists (select 1 from fencelock.sessions where id = h.session and expires_at > clock_timestamp() offset 0)
			returning u.i
	)
	select array_agg(i) into places from gone;
end $$;

-- Prolongs a session, never shortens it, and says which of the holds are no longer there: their places in the arrays,
-- from 1, and why; and which are on another session, and on which. state is no-session if the session is over, and with it
-- all of its holds.
create function fencelock.renew(ses text, nms text[], reqs text[], toks bigint[],
	out state text, out gone int[], out reasons text[], out moved int[], out sessions text[], out here bigint)
	language plpgsql as $$
begin
	here := fencelock.enter();
	update fencelock.sessions set expires_at = greatest(expires_at, clock_timestamp() + ttl)
		where id = ses and expires_at > clock_timestamp();
	if not found then
		state := 'no-session';
		return;
	end if;
	state := 'renewed';
	select array_agg(u.i) filter (where h.name is null), array_agg(coalesce(v.reason, '')) filter (where h.name is null),
			array_agg(u.i) filter (where h.name is not null), array_agg(h.session) filter (where h.name is not null)
		into gone, reasons, moved, sessions
		from unnest(nms, reqs, toks) with ordinality u(name, request_id, token, i)
		left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.token = u.token
		left join fencelock.revoked v on v.name = u.name and v.token = u.token
		where h.name is null or h.session <> ses;
end $$;

-- Moves holds to another session of their client, with another TTL. What the old session had left stays, as a minimum: a
-- hold never ends earlier than it would have.
create function fencelock.move(ses text, nms text[], reqs text[], toks bigint[]) returns bigint language plpgsql as $$
declare here bigint := fencelock.enter();
begin
	update fencelock.holds h set session = ses, min_until = greatest(h.min_until, s.expires_at)
		from unnest(nms, reqs, toks) u(name, request_id, token), fencelock.sessions s
		where h.name = u.name and h.request_id = u.request_id and h.token = u.token
			and s.id = h.session and s.expires_at > clock_timestamp() and h.session <> ses
			and exists (select 1 from fencelock.sessions t where t.id = ses and t.expires_at > clock_timestamp());
	return here;
end $$;

create function fencelock.begin_session(ses text, chan text, ttl_ms bigint) returns bigint language plpgsql as $$
declare here bigint := fencelock.enter();
begin
	insert into fencelock.sessions values
		(ses, chan, ttl_ms * interval '1 ms', clock_timestamp() + ttl_ms * interval '1 ms') on conflict do nothing;
	return here;
end $$;

-- Ends what a session has, but for the requests that its client knows, and the session itself if it knows none at all
-- and says so. Returns whom to wake. What nobody knows was asked for by a call that was given up before it was answered.
create function fencelock.sweep(ses text, known text[], and_session boolean) returns text[] language plpgsql as $$
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
		wake := wake || (fencelock.release(r.name, r.request_id, 0, false)).wake;
	end loop;
	if and_session then
		delete from fencelock.sessions where id = ses;
	end if;
	return wake;
end $$;

-- Ends sessions whose time is over, with what they leave: a client that died does not clean up. A few at a time.
create function fencelock.reap() returns text[] language plpgsql as $$
declare wake text[];
begin
	if not pg_try_advisory_xact_lock(hashtextextended('fencelock.reap', 0)) then
		return '{}'; -- somebody is at it
	end if;
	delete from fencelock.revoked where at < clock_timestamp() - interval '1 hour';
	select fencelock.settle_names(array_agg(name)) into wake from (
		select name from fencelock.holds o left join fencelock.sessions s on s.id = o.session
			where (s.id is null or s.expires_at <= clock_timestamp())
				and (o.min_until is null or o.min_until <= clock_timestamp())
		union select name from fencelock.waits w left join fencelock.sessions s on s.id = w.session
			where s.id is null or s.expires_at <= clock_timestamp()
		limit 100) over_due;
	delete from fencelock.sessions s where expires_at <= clock_timestamp()
		and not exists (select 1 from fencelock.holds where session = s.id)
		and not exists (select 1 from fencelock.waits where session = s.id);
	delete from fencelock.changes c using fencelock.names n
		where n.name = c.name and n.recorded_until <= clock_timestamp();
	return coalesce(wake, '{}');
end $$;

-- How it stands with requests that wait: granted, with what was granted, waiting, or gone. due says that settling the
-- name would change something; ahead is how many wait in front of it, 20 at most: who has
-- more looks once a second all the same (pollEvery and pollFast in wait.go). It writes nothing and waits for nobody.
create function fencelock.poll(nms text[], reqs text[]) returns table
	(i bigint, state text, session text, token bigint, min_left bigint, due boolean, ahead bigint, here bigint)
language sql volatile as $$
	select u.i,
		case when h.name is not null then 'granted' when w.name is not null then 'waiting' else 'gone' end,
		coalesce(h.session, ''), coalesce(h.token, 0),
		greatest(0, extract(epoch from h.min_until - clock_timestamp()) * 1000)::bigint,
		w.name is not null and (
			not exists (select 1 from fencelock.holds o where o.name = u.name)
			or exists (select 1 from fencelock.holds o left join fencelock.sessions s on s.id = o.session
				where o.name = u.name and coalesce(s.expires_at, '-infinity') <= clock_timestamp()
					and coalesce(o.min_until, '-infinity') <= clock_timestamp())
			or exists (select 1 from fencelock.waits a left join fencelock.sessions s on s.id = a.session
				where a.name = u.name and a.ticket < w.ticket and coalesce(s.expires_at, '-infinity') <= clock_timestamp())),
		(select count(*) from (select from fencelock.waits a where a.name = u.name and a.ticket < w.ticket limit 20) front),
		fencelock.durable_position()
	from unnest(nms, reqs) with ordinality u(name, request_id, i)
	left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.session <> ''
	left join fencelock.waits w on w.name = u.name and w.request_id = u.request_id
$$;

-- Settles names for those who found that something is due.
create function fencelock.settle_names(nms text[]) returns text[] language plpgsql as $$
declare
	nm text;
	wake text[] := '{}';
begin
	perform fencelock.enter();
	for nm in select distinct n collate "C" from unnest(nms) n order by 1 loop
		perform fencelock.lock_name(nm);
		wake := wake || fencelock.settle(nm);
	end loop;
	return wake;
end $$;

create function fencelock.force_release(nm text, why text) returns fencelock.answer language plpgsql as $$
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
	for h in select o.*, s.channel from fencelock.holds o join fencelock.sessions s on s.id = o.session where o.name = nm loop
		a.state := 'ended';
		insert into fencelock.revoked values (nm, h.token, 'force-released') on conflict do nothing;
		perform fencelock.record(nm, 'force-released', h.owner, h.kind, h.token, why);
		delete from fencelock.holds where name = nm and request_id = h.request_id;
		a.wake := a.wake || array[h.channel, h.hold_id];
	end loop;
	a.wake := woken || a.wake || fencelock.settle(nm);
	return a;
end $$;

-- Begins, or goes on, to keep what happens to a name, for ten minutes. Returns the revision.
create function fencelock.interest(nm text) returns bigint language plpgsql as $$
declare n fencelock.names;
begin
	perform fencelock.be_patient();
	select * into n from fencelock.names where name = nm;
	if found and n.recorded_until > clock_timestamp() + interval '5 minutes' then
		return n.revision;
	end if;
	n := fencelock.lock_name(nm);
	if n.recorded_until is null or n.recorded_until <= clock_timestamp() then
		-- What happened in between is not kept: a gap, which a new revision of its own makes visible.
		delete from fencelock.changes where name = nm;
		update fencelock.names set revision = revision + 1, recorded_from = revision + 1 where name = nm;
	end if;
	perform set_config('synchronous_commit', 'off', true); -- a crash that forgets it is a gap that Watch tells of
	update fencelock.names set recorded_until = clock_timestamp() + interval '10 minutes'
		where name = nm returning revision into n.revision;
	return n.revision;
end $$;

-- What happened to a name after a revision. compacted: that is no longer kept. wake: whom to wake.
create function fencelock.changes_since(nm text, since bigint,
	out compacted boolean, out news fencelock.changes[], out revision bigint, out wake text[]) language plpgsql as $$
declare n fencelock.names;
begin
	revision := fencelock.interest(nm);
	if exists (select 1 from fencelock.holds o left join fencelock.sessions s on s.id = o.session
			where o.name = nm and o.session <> '' and coalesce(s.expires_at, '-infinity') <= clock_timestamp()) then
		perform fencelock.lock_name(nm);
		wake := fencelock.settle(nm);
	end if;
	select * into n from fencelock.names where name = nm for share;
	revision := n.revision;
	compacted := since < n.recorded_from or since > n.revision;
	select array_agg(c order by c.revision) into news from fencelock.changes c where c.name = nm and c.revision > since;
end $$;

-- The living holds of the names with a prefix, from one name on, whole names only.
create view fencelock.held as
	select o.name, o.owner, o.hold_id, o.kind, o.permits, o.token, o.since, o.metadata,
		(extract(epoch from s.expires_at - clock_timestamp()) * 1000)::bigint as expires_in_ms
	from fencelock.holds o join fencelock.sessions s on s.id = o.session
	where s.expires_at > clock_timestamp();
