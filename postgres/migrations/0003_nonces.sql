-- Every hold has a nonce: it names the hold in public, and no other hold has the same. A guard tells two holds of one token
-- apart by it, which exist after a restore. It is drawn where a hold is granted; holds of before have none.
alter table fencelock.holds add column nonce uuid;

alter type fencelock.answer add attribute nonce uuid;

-- As before, with a nonce.
create or replace function fencelock.grant_hold(h fencelock.holds) returns fencelock.holds language plpgsql as $$
declare watched timestamptz;
begin
	update fencelock.names set token = greatest(token + 1, fencelock.position())
		where name = h.name returning token, recorded_until into h.token, watched;
	h.since := clock_timestamp();
	h.nonce := gen_random_uuid();
	insert into fencelock.holds values (h.*);
	if watched is not null then
		perform fencelock.record(h.name, 'acquired', h.owner, h.kind, h.token, '');
	end if;
	return h;
end $$;

-- As before, with a row of one more column.
create or replace function fencelock.settle(nm text) returns text[] language plpgsql as $$
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
			0, null, clock_timestamp() + w.min_hold, true, w.metadata, null)::fencelock.holds);
		delete from fencelock.waits where name = nm and ticket = w.ticket;
		wake := wake || array[chan, w.hold_id];
	end loop;
	return wake;
end $$;

-- As before, with the nonce of the hold.
create or replace function fencelock.granted(a fencelock.answer, h fencelock.holds) returns fencelock.answer language plpgsql as $$
begin
	a.state := 'granted';
	a.token := h.token;
	a.queued := h.queued;
	a.nonce := h.nonce;
	if h.min_until is not null then
		a.min_left := greatest(0, extract(epoch from h.min_until - clock_timestamp()) * 1000)::bigint;
	end if;
	return a;
end $$;

drop function fencelock.acquire_free(fencelock.holds[]);

-- As before, with the nonces too.
create function fencelock.acquire_free(rs fencelock.holds[], out places bigint[], out tokens bigint[], out nonces uuid[], out here bigint)
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
			limit_n, token, since, min_until, queued, metadata, nonce, i) where r.name = any (mine)
	), granted as (
		update fencelock.names n
			set token = greatest(token + 1, fencelock.position())
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

drop function fencelock.poll(text[], text[]);

-- As before, with the nonce of what was granted.
create function fencelock.poll(nms text[], reqs text[]) returns table
	(i bigint, state text, session text, token bigint, min_left bigint, due boolean, ahead bigint, here bigint, nonce uuid)
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
		fencelock.durable_position(), h.nonce
	from unnest(nms, reqs) with ordinality u(name, request_id, i)
	left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.session <> ''
	left join fencelock.waits w on w.name = u.name and w.request_id = u.request_id
$$;

-- As before, with the nonce.
create or replace view fencelock.held as
	select o.name, o.owner, o.hold_id, o.kind, o.permits, o.token, o.since, o.metadata,
		(extract(epoch from s.expires_at - clock_timestamp()) * 1000)::bigint as expires_in_ms, o.nonce
	from fencelock.holds o join fencelock.sessions s on s.id = o.session
	where s.expires_at > clock_timestamp();
