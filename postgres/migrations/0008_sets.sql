-- least program: 7
-- A repeated or late acquire_all changes nothing unless its request still has the whole set, or never had it.
-- What a Watch grants is durable before anybody can see it.

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
