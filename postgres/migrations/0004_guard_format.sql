-- The table of fencing tokens in format 2: one text for each resource, and one for the terms, with an id that is drawn here.
-- Clients of format 1 fail on each check from now on. docs/FENCING-SPEC.md says what the texts are.

do $$
begin
	if exists (select from pg_attribute
		where attrelid = 'fencelock.fencing_tokens'::regclass and attname = 'state' and not attisdropped)
	then
		return; -- a guard has made the table in this format
	end if;
	alter table fencelock.fencing_tokens add column state text not null default '';

	update fencelock.fencing_tokens set state = epoch || ' 0 ' || token || ' - ' || sequence where resource <> '' and token > 0;

	update fencelock.fencing_tokens
		set state = '2 ' || md5(gen_random_uuid()::text) || ' ' || epoch || ' ' || token || ' =' || space
		where resource = '';

	insert into fencelock.fencing_tokens (resource, state)
		select '', '2 ' || md5(gen_random_uuid()::text) || ' 0 0 -'
		where not exists (select from fencelock.fencing_tokens);

	alter table fencelock.fencing_tokens drop column epoch, drop column token, drop column sequence, drop column space;
end $$;

-- Raises FL413 if guards of this database remember elsewhere, where this schema's functions do not look: two memories admit
-- what one would refuse. Schemas that these migrations have made are lock services of their own, each with its guard.
create function fencelock.one_memory() returns void language plpgsql stable as $$
declare
	other text;
begin
	select min(c.relnamespace::regnamespace::text) into other from pg_catalog.pg_class c
		where c.relname = 'fencing_tokens' and c.relkind in ('r', 'p') and c.relpersistence <> 't'
			and c.relnamespace <> (select relnamespace from pg_catalog.pg_class where oid = 'fencelock.fencing_tokens'::regclass)
			and not exists (select from pg_catalog.pg_proc p where p.proname = 'require_guard' and p.pronamespace = c.relnamespace);
	if other is not null then
		raise exception 'the guards of this database remember in %.fencing_tokens and in fencelock.fencing_tokens', other using
			errcode = 'FL413', hint = 'docs/UPGRADE.md, "One fencing memory", says how to make one of both.';
	end if;
end $$;

select pg_advisory_xact_lock(hashtext('fencing_tokens'));
select fencelock.one_memory();

drop function fencelock.guard(text, bigint, text);

-- Admits a write to a resource with the token of its lock, and the generation and nonce of the hold if they are known, or
-- raises:
--   FL400  there is no token, or it is not of an exclusive hold, or another argument cannot be read.
--   FL409  the token is stale: a greater one was admitted. The detail is that one.
--   FL410  the token is of another space than the first claim's, or its generation has the number of another one. The
--          detail is the space, or the generation that was admitted.
--   FL411  another hold with the same token was admitted.
--   FL412  the guard's terms are missing, or of another format: docs/FENCING.md, "The day after".
--   FL413  the database has a second memory of guards, see one_memory.
-- The resource stays locked until the transaction ends, so that later holders wait for it or are refused.
create function fencelock.guard(resource text, token bigint, space text default '', generation text default '0',
	nonce text default '') returns void language plpgsql
	security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
	text_of_terms text;
	text_of_seen text;
	terms text[]; -- id, epoch, floor, space behind an equals sign or a hyphen
	seen text[]; -- epoch, generation, token, nonce, sequence
	number numeric := split_part(guard.generation, '.', 1);
	highest bigint;
	shown text := coalesce(nullif(guard.nonce, ''), '-');
begin
	if coalesce(guard.token, 0) <= 0 or coalesce(guard.resource, '') = '' then
		raise exception 'no fencing token of an exclusive hold for %', quote_literal(guard.resource) using errcode = 'FL400';
	elsif guard.generation !~ '^(0|[1-9][0-9]{0,18}\.[0-9a-f]{32})$' or shown !~ '^(-|[0-9a-f]{32})$'
		or guard.token > 4611686018427387904 then
		raise exception 'the generation %, the nonce % or the token % is not one of a hold', quote_literal(guard.generation),
			quote_literal(guard.nonce), guard.token using errcode = 'FL400';
	end if;
	perform fencelock.one_memory();
	insert into fencelock.fencing_tokens as t (resource) values (guard.resource)
		on conflict (resource) do update set checks = t.checks + 1
		returning state into text_of_seen;
	select state into text_of_terms from fencelock.fencing_tokens t where t.resource = '';
	if text_of_terms like '2 % -' then -- the first claim sets the space
		update fencelock.fencing_tokens t set state = left(state, -1) || '=' || guard.space
			where t.resource = '' and state = text_of_terms;
		select state into text_of_terms from fencelock.fencing_tokens t where t.resource = '';
	end if;
	terms := regexp_match(text_of_terms, '^2 (\S+) (\d+) (\d+) (=.*)$');
	if terms is null then
		raise exception 'the terms of the guard are %, want those of format 2', coalesce(quote_literal(text_of_terms), 'missing')
			using errcode = 'FL412';
	end if;
	seen := string_to_array(nullif(text_of_seen, ''), ' ');
	if seen is null or seen[1]::bigint < terms[2]::bigint then
		seen := array[terms[2], '0', '0', '-', '0'];
	elsif seen[1]::bigint > terms[2]::bigint then
		raise exception '% was seen in a later epoch than that of the terms of the guard', quote_literal(guard.resource)
			using errcode = 'FL412';
	end if;
	highest := greatest(seen[3]::bigint, terms[3]::bigint);
	if terms[4] <> '=' and guard.space <> substr(terms[4], 2) then
		raise exception 'the fencing token for % is of space %, not %', quote_literal(guard.resource),
			quote_literal(guard.space), quote_literal(substr(terms[4], 2)) using errcode = 'FL410', detail = substr(terms[4], 2);
	elsif number = split_part(seen[2], '.', 1)::numeric and guard.generation <> seen[2] then
		raise exception 'the fencing token for % is of generation %, not %', quote_literal(guard.resource), guard.generation,
			seen[2] using errcode = 'FL410', detail = seen[2];
	elsif guard.token < terms[3]::bigint or number < split_part(seen[2], '.', 1)::numeric
		or guard.generation = seen[2] and guard.token < seen[3]::bigint then
		raise exception 'the fencing token % for % is stale: % was admitted before', guard.token,
			quote_literal(guard.resource), highest using errcode = 'FL409', detail = highest::text;
	elsif guard.generation <> seen[2] or guard.token > seen[3]::bigint then
		seen := array[seen[1], guard.generation, guard.token::text, shown, '0'];
	elsif seen[4] <> '-' and shown <> seen[4] then
		raise exception 'the fencing token % for % was admitted for another hold', guard.token,
			quote_literal(guard.resource) using errcode = 'FL411';
	else
		seen[4] := shown;
	end if;
	update fencelock.fencing_tokens t set state = array_to_string(seen, ' ')
		where t.resource = guard.resource and state <> array_to_string(seen, ' ');
end $$;

-- As before, with the column of format 2. A trigger after the change sees the row that no other trigger can move any more,
-- and TRUNCATE is refused where it has a trigger of its own:
--
--   create trigger fenced after insert or update or delete on accounts
--     for each row execute function fencelock.require_guard('accounts/', 'id');
--   create trigger fenced_truncate before truncate on accounts
--     for each statement execute function fencelock.require_guard('accounts/', 'id');
create or replace function fencelock.require_guard() returns trigger language plpgsql
	security definer set search_path = pg_catalog, pg_temp as $$
declare
	wanted text := tg_argv[0];
	old_value text;
	new_value text;
begin
	if tg_op = 'TRUNCATE' then
		raise exception 'TRUNCATE of % needs fencelock.guard for each of its rows', tg_table_name using errcode = 'FL403';
	end if;
	if tg_nargs > 1 then
		if tg_op <> 'INSERT' then
			old_value := to_jsonb(old) ->> tg_argv[1];
		end if;
		if tg_op <> 'DELETE' then
			new_value := to_jsonb(new) ->> tg_argv[1];
		end if;
	end if;
	if exists (
		select 1 from (values (old_value), (new_value)) v(value)
		where (value is not null or tg_nargs = 1) and not exists (
			select 1 from fencelock.fencing_tokens t
			where t.resource = wanted || coalesce(value, '') and t.state <> ''
				and t.xmin::text = pg_current_xact_id()::xid::text)
	) then
		raise exception 'a write to % needs fencelock.guard(%, token) in its transaction', tg_table_name,
			quote_literal(wanted || coalesce(new_value, old_value, '')) using errcode = 'FL403';
	end if;
	return case when tg_op = 'DELETE' then old else new end;
end $$;
