-- What ForceRelease said, for the holders whose holds it ended.
alter table fencelock.revoked add column why text not null default '';

alter type fencelock.answer add attribute why text;

drop function fencelock.force_release(text, text);

-- Ends the holds of a name, or with a nonce or a token (0: any) the hold that has them. The row of the name is locked while
-- it compares, so nobody is granted in between.
create function fencelock.force_release(nm text, why text, only_nonce uuid, only_token bigint) returns fencelock.answer
language plpgsql as $$
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
		insert into fencelock.revoked (name, token, reason, why) values (nm, h.token, 'force-released', force_release.why)
			on conflict do nothing;
		perform fencelock.record(nm, 'force-released', h.owner, h.kind, h.token, force_release.why);
		delete from fencelock.holds where name = nm and request_id = h.request_id;
		a.wake := a.wake || array[h.channel, h.hold_id];
	end loop;
	a.wake := woken || a.wake || fencelock.settle(nm);
	return a;
end $$;

-- As before, with what ForceRelease said.
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
		select v.reason, v.why into a.reason, a.why from fencelock.revoked v where v.name = nm and v.token = tok;
	end if;
	if exists (select 1 from fencelock.waits where name = nm) then
		a.wake := fencelock.settle(nm);
	end if;
	return a;
end $$;

drop function fencelock.renew(text, text[], text[], bigint[]);

-- As before, with what ForceRelease said.
create function fencelock.renew(ses text, nms text[], reqs text[], toks bigint[], out state text, out gone int[],
	out reasons text[], out whys text[], out moved int[], out sessions text[], out here bigint)
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
			array_agg(u.i) filter (where h.name is not null), array_agg(h.session) filter (where h.name is not null)
		into gone, reasons, whys, moved, sessions
		from unnest(nms, reqs, toks) with ordinality u(name, request_id, token, i)
		left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.token = u.token
		left join fencelock.revoked v on v.name = u.name and v.token = u.token
		where h.name is null or h.session <> ses;
end $$;
