-- The check of a fencing token inside the transaction of the write, for SQL and for clients in other languages. The table is
-- that of packages pgxguard and sqlguard, which postgres.Tx uses. One that is here already is their memory of before.

create table if not exists fencelock.fencing_tokens (
	resource text   primary key, -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    bigint not null default 0,
	token    bigint not null default 0 check (token >= 0),
	sequence bigint not null default 0,
	checks   bigint not null default 0,
	space    text   not null default ''
);

-- Admits a write to a resource with the token of its lock, or raises:
--   FL409  the token is stale: a greater one was admitted. The detail is that one.
--   FL410  the token is of another space than the first claim's. The detail is that one.
--   FL400  there is no token, or it is not of an exclusive hold.
-- The resource stays locked until the transaction ends, so that later holders wait for it or are refused.
create function fencelock.guard(resource text, token bigint, space text default '') returns void language plpgsql
	security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
	seen fencelock.fencing_tokens;
	terms fencelock.fencing_tokens;
begin
	if coalesce(guard.token, 0) <= 0 or coalesce(guard.resource, '') = '' then
		raise exception 'no fencing token of an exclusive hold for %', quote_literal(guard.resource) using errcode = 'FL400';
	end if;
	insert into fencelock.fencing_tokens as t (resource) values (guard.resource)
		on conflict (resource) do update set checks = t.checks + 1
		returning * into seen;
	insert into fencelock.fencing_tokens (resource, space) values ('', guard.space) on conflict do nothing;
	select * into terms from fencelock.fencing_tokens t where t.resource = '';
	if seen.epoch < terms.epoch then
		seen.epoch := terms.epoch;
		seen.token := 0;
		seen.sequence := 0;
	end if;
	if terms.space <> '' and guard.space <> terms.space then
		raise exception 'the fencing token for % is of space %, not %', quote_literal(guard.resource),
			quote_literal(guard.space), quote_literal(terms.space) using errcode = 'FL410', detail = terms.space;
	elsif guard.token < greatest(seen.token, terms.token) then
		raise exception 'the fencing token % for % is stale: % was admitted before', guard.token,
			quote_literal(guard.resource), greatest(seen.token, terms.token)
			using errcode = 'FL409', detail = greatest(seen.token, terms.token)::text;
	elsif guard.token > seen.token then
		update fencelock.fencing_tokens t set epoch = seen.epoch, token = guard.token, sequence = 0
			where t.resource = guard.resource;
	end if;
end $$;

-- A trigger for tables whose rows only a holder may write: a write in a transaction that has not called guard for the row's
-- resource raises FL403. The resource is the first argument, followed by the row's value of the column that the second
-- argument names, if there is one:
--
--   create trigger fenced after insert or update or delete on accounts
--     for each row execute function fencelock.require_guard('accounts/', 'id');
--
-- It looks for a row of the table of tokens that this transaction has written, so that claims are shown outside of
-- savepoints. Who may write to that table could cheat: roles that may not can call guard all the same.
create function fencelock.require_guard() returns trigger language plpgsql
	security definer set search_path = pg_catalog, pg_temp as $$
declare
	wanted text := tg_argv[0];
	old_value text;
	new_value text;
begin
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
			where t.resource = wanted || coalesce(value, '') and t.token > 0
				and t.xmin::text = pg_current_xact_id()::xid::text)
	) then
		raise exception 'a write to % needs fencelock.guard(%, token) in its transaction', tg_table_name,
			quote_literal(wanted || coalesce(new_value, old_value, '')) using errcode = 'FL403';
	end if;
	return case when tg_op = 'DELETE' then old else new end;
end $$;
