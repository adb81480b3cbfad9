-- least program: 6
-- Waits that would close a cycle of holders that wait for each other are refused. Programs that know six steps go on:
-- their waits have no holds above them, and close no cycle.

-- The request ids of the holds that the caller of the wait keeps until it has been granted.
alter table fencelock.waits add column above text[];

create index waits_above on fencelock.waits using gin (above) where above is not null;

-- A cycle, from the blocker of the refused request to the hold that the request is made under: names and owners.
alter type fencelock.answer add attribute cycle_names text[];
alter type fencelock.answer add attribute cycle_owners text[];

-- The holds of its name that w waits for, each of them by itself: those that are in the way of w or of a wait before it.
create function fencelock.blockers(w fencelock.waits) returns table (request_id text, owner text)
language sql volatile as $$
	select o.request_id, o.owner
		from fencelock.holds o join fencelock.sessions s on s.id = o.session and s.expires_at > clock_timestamp()
		where o.name = w.name and exists (
			select 1 from fencelock.waits e join fencelock.sessions t on t.id = e.session and t.expires_at > clock_timestamp()
			where e.name = w.name and (e.ticket = w.ticket or e.ticket < w.ticket and not (e.kind = 1 and w.kind = 1))
				and case e.kind
					when 0 then true
					when 1 then o.kind <> 1
					else o.permits + e.permits > e.limit_n
				end)
$$;

-- The cycle that a wait of r, made under holds, closes; names is null without one. Breadth first, from the blockers of r
-- towards these holds, over 1000 blockers at most.
create function fencelock.cycle(r fencelock.holds, under text[], out names text[], out owners text[])
language plpgsql as $$
declare
	waits fencelock.waits[] := array(select w from fencelock.waits w where w.name = r.name and w.request_id = r.request_id);
	seen text[] := array[r.request_id];
	blocked int[] := '{0}'; -- by wait: the link that leads to it
	b record;
	x fencelock.waits;
	link_names text[] := '{}';
	link_owners text[] := '{}';
	before int[] := '{}'; -- by link: the link before it
	i int := 1;
	n int := 0;
begin
	while i <= cardinality(waits) loop
		for b in select * from fencelock.blockers(waits[i]) loop
			n := n + 1;
			if n > 1000 then
				return;
			end if;
			link_names[n] := (waits[i]).name;
			link_owners[n] := b.owner;
			before[n] := blocked[i];
			if b.request_id = any (under) then
				while n > 0 loop
					names := link_names[n] || names;
					owners := link_owners[n] || owners;
					n := before[n];
				end loop;
				return;
			end if;
			for x in select w.* from fencelock.waits w
				join fencelock.sessions s on s.id = w.session and s.expires_at > clock_timestamp()
				where w.above @> array[b.request_id]
			loop
				if x.request_id <> all (seen) then
					seen := seen || x.request_id;
					waits := waits || x;
					blocked := blocked || n;
				end if;
			end loop;
		end loop;
		i := i + 1;
	end loop;
end $$;

-- As acquire without holds above the request. Waits under holds begin one after the other: each sees all before it.
create function fencelock.acquire(r fencelock.holds, may_wait boolean, minimum interval, under text[])
returns fencelock.answer language plpgsql as $$
declare
	a fencelock.answer := fencelock.acquire(r, may_wait, minimum);
begin
	if a.state <> 'waiting'
		or not exists (select 1 from fencelock.waits where name = r.name and request_id = r.request_id and above is null)
	then
		return a;
	end if;
	perform pg_advisory_xact_lock(hashtextextended('fencelock.cycle', 0));
	select names, owners into a.cycle_names, a.cycle_owners from fencelock.cycle(r, under);
	if a.cycle_names is null then
		update fencelock.waits set above = under where name = r.name and request_id = r.request_id;
	else
		a.state := 'deadlock';
		delete from fencelock.waits where name = r.name and request_id = r.request_id;
	end if;
	return a;
end $$;
