-- who waits for rows need not ask again and again.

-- A statement that closes generations or moves a line says so, on a channel named after its table. A notification is a hint
-- and carries nothing: whoever listens looks, and looks now and then without one.
create function notify_of_change() returns trigger
language plpgsql as $$
begin
    perform pg_notify('springtide_' || tg_table_name, '');
    return null;
end
$$;

create trigger trajectory_notify after insert on trajectory
    for each statement execute function notify_of_change();      -- the realtime run waits for these
create trigger line_notify after insert or update on line
    for each statement execute function notify_of_change();      -- the release loop waits for these
