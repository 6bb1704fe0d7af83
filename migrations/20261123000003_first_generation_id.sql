-- where a moment begins among generations: their ids are in the order of time, so what asks by time need not read them all.

-- The smallest UUIDv7 of a moment's millisecond: `sampled_at >= at` implies `id >= first_generation_id(at)`, which finds
-- partitions and the primary key. Immutable: the epoch of a moment depends on no time zone.
create function first_generation_id(at timestamptz) returns uuid
language sql immutable parallel safe as $$
    select (lpad(to_hex(floor(extract(epoch from greatest(at, 'epoch')) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;
