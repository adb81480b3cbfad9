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
			where o.name = r.name and o.request_id = r.request_id and s.expires_at > clock_timestamp())::int;
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
	if found and h.session <> '' and not fencelock.session_ended(h.session) then
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

-- As before, with those.
create function fencelock.renew(ses text, nms text[], reqs text[], toks bigint[], out state text, out gone int[],
	out reasons text[], out whys text[], out bys text[], out principals text[], out moved int[], out sessions text[],
	out here bigint)
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
