//! Inserts events as rows, with one statement per table and batch: `select … from unnest(columns)`.

use std::collections::{BTreeMap, HashMap, HashSet};

use event_log::event::{EpisodeEnd, Event, Feedback, Generation, Retraction, Sampling, Target, Value, time_of};
use sqlx::PgConnection;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

use super::record::Record;
use crate::reward::episode::{JOIN_MAX, OPEN_TURNS_MAX, TURNS_MAX};
use crate::reward::starts_at;
use crate::reward::stored::Surfaces;

/// An event to insert.
pub(crate) struct Row<'a, T> {
    pub record: &'a Record,
    pub event: &'a Event,
    pub body: &'a T,
}

/// An id that is unique in its tenant.
pub(crate) type TenantId = (String, Uuid);

impl<T> Row<'_, T> {
    /// The tenant, with an id of the body.
    pub(super) fn in_tenant(&self, id: Uuid) -> TenantId {
        (self.event.tenant.clone(), id)
    }
}

/// What was found about the proof of a generation.
pub(crate) struct Checked {
    /// [`Generation::unsigned_digest`].
    pub digest: [u8; 32],
    /// `None`: its sampler is not registered yet.
    pub proven: Option<bool>,
}

/// `(tenant, source, id, kind)`.
pub(super) type Key<'a> = (&'a str, &'a str, &'a str, &'a str);
type OwnedKey = (String, String, String, String);

/// Inserts the identities of events. Returns the stored digests of those that exist already.
pub(super) async fn keys(
    connection: &mut PgConnection,
    keys: &BTreeMap<Key<'_>, [u8; 32]>,
) -> sqlx::Result<HashMap<OwnedKey, Vec<u8>>> {
    let [tenants, sources, ids, kinds] = key_columns(keys.keys());
    let digests: Vec<Vec<u8>> = keys.values().map(|digest| digest.to_vec()).collect();
    let inserted = sqlx::query!(
        "insert into event_key (tenant_id, source, event_id, kind, digest) \
         select * from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[]) \
         on conflict do nothing",
        &tenants,
        &sources,
        &ids,
        &kinds,
        &digests
    )
    .execute(&mut *connection)
    .await?;
    if inserted.rows_affected() == keys.len() as u64 {
        return Ok(HashMap::new());
    }
    let older = sqlx::query_file!("src/rows/insert/older_keys.sql", &tenants, &sources, &ids, &kinds)
        .fetch_all(connection)
        .await?;
    let older = older.into_iter();
    let older = older.map(|row| ((row.tenant_id, row.source, row.event_id, row.kind), row.digest));
    Ok(older.collect())
}

fn key_columns<'a>(keys: impl Iterator<Item = &'a Key<'a>>) -> [Vec<String>; 4] {
    let mut columns = [const { Vec::new() }; 4];
    for (tenant, source, id, kind) in keys {
        for (column, value) in columns.iter_mut().zip([tenant, source, id, kind]) {
            column.push((*value).to_owned());
        }
    }
    columns
}

/// Lists of lists as one flat column with the bounds of each list, because `unnest` flattens nested
/// arrays. As in SQL slices, bounds start at 1 and are inclusive. For an empty
/// list, `until` is `from - 1`.
#[derive(Default)]
struct Slices<T> {
    values: Vec<T>,
    from: Vec<i32>,
    until: Vec<i32>,
}

impl<T> Slices<T> {
    fn push(&mut self, list: impl Iterator<Item = T>) {
        // A batch is bounded by its bytes far below 2³¹ values.
        self.from.push(bound(self.values.len() + 1));
        self.values.extend(list);
        self.until.push(bound(self.values.len()));
    }
}

fn bound(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// [`Event::check`] ensures that the value fits in 31 bits.
fn narrow(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// One column of a batch: a field of the body, or an expression of the row.
macro_rules! column {
    ($rows:ident, $row:ident => $value:expr) => {
        &$rows.iter().map(|$row| $value).collect::<Vec<_>>()
    };
    ($rows:ident, $field:ident) => {
        column!($rows, row => row.body.$field.clone())
    };
}

/// Inserts generations. `checked` has those with a proof. Returns the ids that did not exist.
pub(super) async fn generations(
    connection: &mut PgConnection,
    rows: &[Row<'_, Generation>],
    checked: &HashMap<Uuid, Checked>,
) -> sqlx::Result<HashSet<Uuid>> {
    if rows.is_empty() {
        return Ok(HashSet::new());
    }
    let mut prompts = Slices::default();
    let mut tokens = Slices::default();
    let mut logprobs = Slices::default();
    let mut masks = Slices::default();
    for row in rows {
        prompts.push(row.body.prompt_ids.iter().copied().map(narrow));
        tokens.push(row.body.token_ids.iter().copied().map(narrow));
        logprobs.push(row.body.logprobs.iter().copied());
        masks.push(row.body.train_mask.iter().flatten().copied());
    }
    let stored = sqlx::query_file_scalar!(
        "src/rows/insert/generations.sql",
        column!(rows, id),
        column!(rows, row => row.event.tenant.clone()),
        column!(rows, policy),
        column!(rows, row => row.body.versions.last().map_or(0, |span| span.version)),
        column!(rows, row => row.body.versions.iter().map(|span| span.version).min().unwrap_or(0)),
        column!(rows, row => spans(row.body)),
        column!(rows, row => row.body.versions.last().map_or_else(Vec::new, |span| span.root.to_vec())),
        column!(rows, line),
        column!(rows, replica),
        column!(rows, row => row.body.purpose.as_str().to_owned()),
        column!(rows, run_id) as _,
        column!(rows, task_id) as _,
        column!(rows, group_id) as _,
        column!(rows, surface),
        column!(rows, episode_id),
        column!(rows, row => narrow(row.body.segment)),
        column!(rows, row => narrow(row.body.turn)),
        column!(rows, parent_id) as _,
        column!(rows, user_key),
        column!(rows, arm),
        column!(rows, arm_probability),
        column!(rows, row => row.body.prompt_prefix.map_or(0, |prefix| narrow(prefix.length))),
        column!(rows, row => row.body.prompt_prefix.map(|prefix| prefix.hash.to_vec())) as _,
        column!(rows, row => row.body.train_mask.is_some()),
        column!(rows, row => row.body.payload.as_ref().map(|payload| payload.digest.to_vec())) as _,
        column!(rows, temperature),
        column!(rows, top_p),
        // The column is signed and keeps the same 64 bits.
        column!(rows, row => row.body.seed.map(u64::cast_signed)) as _,
        column!(rows, row => row.body.finish_reason.as_str().to_owned()),
        column!(rows, declined),
        column!(rows, shown) as _,
        column!(rows, consent),
        column!(rows, row => time_of(row.body.id).unwrap_or(row.event.time)),
        column!(rows, decline_suppressed),
        column!(rows, exploration_share) as _,
        column!(rows, row => row.event.time),
        column!(rows, row => row.body.sampling.as_ref().map(sampling)) as _,
        &prompts.from,
        &prompts.until,
        &tokens.from,
        &tokens.until,
        &masks.from,
        &masks.until,
        &prompts.values,
        &tokens.values,
        &logprobs.values,
        &masks.values,
        column!(rows, row => row.body.proof.as_ref().map(|proof| proof.sampler.clone())) as _,
        column!(rows, row => row.body.proof.as_ref().map(|proof| proof.signature.to_vec())) as _,
        column!(rows, row => checked.get(&row.body.id).map(|checked| checked.digest.to_vec())) as _,
        column!(rows, row => checked.get(&row.body.id).and_then(|checked| checked.proven)) as _,
        column!(rows, untrainable) as _,
        column!(rows, engine) as _,
    )
    .fetch_all(connection)
    .await?;
    Ok(stored.into_iter().collect())
}

fn spans(generation: &Generation) -> serde_json::Value {
    let spans = generation.versions.iter();
    spans
        .map(|span| serde_json::json!([span.version, span.tokens]))
        .collect()
}

fn sampling(sampling: &Sampling) -> serde_json::Value {
    serde_json::to_value(sampling).unwrap_or_default()
}

/// Whether its trajectory is its episode.
fn is_turn(row: &Row<'_, Generation>, surfaces: &Surfaces) -> bool {
    let surface = surfaces.get(&row.body.surface);
    surface.is_some_and(|(_, rule)| rule.is_of_episodes())
}

/// When its horizon starts.
fn horizon_starts_at(row: &Row<'_, Generation>) -> OffsetDateTime {
    let sampled_at = time_of(row.body.id).unwrap_or(row.event.time);
    starts_at(sampled_at, row.event.time)
}

fn horizon_seconds(row: &Row<'_, Generation>, surfaces: &Surfaces) -> f64 {
    let surface = surfaces.get(&row.body.surface);
    surface.map_or(0.0, |(_, rule)| rule.definition.horizon_seconds)
}

/// Stores when to close each generation. Unknown surfaces have no horizon. Returns the turns that join
/// their episodes, which close them ([`open_episodes`]).
pub(super) async fn open_generations(
    connection: &mut PgConnection,
    rows: &[Row<'_, Generation>],
    checked: &HashMap<Uuid, Checked>,
    surfaces: &Surfaces,
) -> sqlx::Result<HashSet<Uuid>> {
    if rows.is_empty() {
        return Ok(HashSet::new());
    }
    let joining = sqlx::query_file_scalar!(
        "src/rows/insert/open_generations.sql",
        column!(rows, id),
        column!(rows, row => row.event.tenant.clone()),
        column!(rows, surface),
        column!(rows, row => horizon_starts_at(row)),
        column!(rows, row => horizon_seconds(row, surfaces)),
        column!(rows, row => checked.get(&row.body.id).is_some_and(|checked| checked.proven == Some(true))),
        column!(rows, row => is_turn(row, surfaces).then_some(row.body.episode_id)) as _
    )
    .fetch_all(connection)
    .await?;
    Ok(joining.into_iter().collect())
}

/// Opens the episodes of turns, or moves when to look at them: one horizon after their last turn, but
/// not for ever. Those that exist are locked ([`super::join::hold`]). `joining`: see
/// [`open_generations`].
pub(super) async fn open_episodes(
    connection: &mut PgConnection,
    rows: &[Row<'_, Generation>],
    joining: &HashSet<Uuid>,
    surfaces: &Surfaces,
) -> sqlx::Result<()> {
    let turns = rows.iter().filter(|row| joining.contains(&row.body.id));
    let turns: Vec<&Row<'_, Generation>> = turns.collect();
    if turns.is_empty() {
        return Ok(());
    }
    sqlx::query_file!(
        "src/rows/insert/open_episodes.sql",
        column!(turns, row => row.event.tenant.clone()),
        column!(turns, episode_id),
        column!(turns, surface),
        column!(turns, row => horizon_starts_at(row)),
        column!(turns, row => horizon_seconds(row, surfaces)),
        JOIN_MAX.as_seconds_f64(),
        TURNS_MAX as i64,
        OPEN_TURNS_MAX as i64
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Inserts feedback. Returns the ids that did not exist, each with whether its target had closed.
/// The generations in `held` are open and stay so.
pub(super) async fn feedback(
    connection: &mut PgConnection,
    rows: &[Row<'_, Feedback>],
    held: &HashSet<Uuid>,
) -> sqlx::Result<HashMap<TenantId, bool>> {
    if rows.is_empty() {
        return Ok(HashMap::new());
    }
    let stored = sqlx::query_file!(
        "src/rows/insert/feedback.sql",
        column!(rows, id),
        column!(rows, row => row.event.tenant.clone()),
        column!(rows, row => match row.body.target {
            Target::Generation(id) => Some(id),
            Target::Episode(_) => None,
        }) as _,
        column!(rows, row => match row.body.target {
            Target::Generation(_) => None,
            Target::Episode(id) => Some(id),
        }) as _,
        column!(rows, metric_name),
        column!(rows, row => match row.body.value {
            Value::Bool(value) => Some(value),
            _ => None,
        }) as _,
        column!(rows, row => match row.body.value {
            Value::Float(value) => Some(value),
            _ => None,
        }) as _,
        column!(rows, row => match &row.body.value {
            Value::Text(value) => Some(value.clone()),
            _ => None,
        }) as _,
        column!(rows, row => Json(&row.body.tags)) as _,
        column!(rows, row => row.event.time),
        column!(rows, row => row.event.teacher) as _,
        column!(rows, row => matches!(row.body.target, Target::Generation(id) if held.contains(&id))),
    )
    .fetch_all(connection)
    .await?;
    let stored = stored.into_iter();
    Ok(stored.map(|row| ((row.tenant_id, row.id), row.late)).collect())
}

/// Inserts references to payloads. API and readers check that a payload exists; the sink does not,
/// so that it can read the log while the object store is unavailable.
pub(super) async fn payload_references(
    connection: &mut PgConnection,
    rows: &[Row<'_, Generation>],
) -> sqlx::Result<()> {
    let (mut ids, mut kinds, mut tenants) = (Vec::new(), Vec::new(), Vec::new());
    let (mut digests, mut sizes, mut types) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        for (kind, payload) in [("prompt", &row.body.payload), ("experts", &row.body.experts)] {
            let Some(payload) = payload else { continue };
            ids.push(row.body.id);
            kinds.push(kind.to_owned());
            tenants.push(row.event.tenant.clone());
            digests.push(payload.digest.to_vec());
            sizes.push(i64::try_from(payload.size_bytes).unwrap_or(i64::MAX));
            types.push(payload.media_type.clone());
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into payload_reference (generation_id, kind, tenant_id, digest, size_bytes, media_type) \
         select * from unnest($1::uuid[], $2::text[], $3::text[], $4::bytea[], $5::bigint[], $6::text[])",
        &ids,
        &kinds,
        &tenants,
        &digests,
        &sizes,
        &types
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Takes from these rows what they say of users that were erased.
pub(super) async fn unlink_erased(
    connection: &mut PgConnection,
    generations: &[Row<'_, Generation>],
    feedback: &[Row<'_, Feedback>],
    retractions: &[Row<'_, Retraction>],
) -> sqlx::Result<()> {
    let generations: Vec<Uuid> = generations.iter().map(|row| row.body.id).collect();
    let said = feedback.iter().map(|row| row.body.id);
    let said: Vec<Uuid> = said.chain(retractions.iter().map(|row| row.body.feedback_id)).collect();
    sqlx::query!("select unlink_arrived($1, $2)", &generations, &said)
        .execute(connection)
        .await?;
    Ok(())
}

/// Inserts retractions. Returns the ids that did not exist, each with whether the trajectory had
/// closed.
pub(super) async fn retractions(
    connection: &mut PgConnection,
    rows: &[Row<'_, Retraction>],
) -> sqlx::Result<HashMap<TenantId, bool>> {
    if rows.is_empty() {
        return Ok(HashMap::new());
    }
    let stored = sqlx::query_file!(
        "src/rows/insert/retractions.sql",
        column!(rows, id),
        column!(rows, row => row.event.tenant.clone()),
        column!(rows, feedback_id),
        column!(rows, reason),
        column!(rows, row => row.event.time),
    )
    .fetch_all(connection)
    .await?;
    let stored = stored.into_iter();
    Ok(stored.map(|row| ((row.tenant_id, row.id), row.late)).collect())
}

/// Inserts the ends of episodes. The earliest end of an episode counts.
pub(super) async fn episode_ends(connection: &mut PgConnection, rows: &[Row<'_, EpisodeEnd>]) -> sqlx::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into episode_end (tenant_id, episode_id, ended_at) \
         select tenant_id, episode_id, min(ended_at) \
         from unnest($1::text[], $2::uuid[], $3::timestamptz[]) as e (tenant_id, episode_id, ended_at) \
         group by tenant_id, episode_id order by tenant_id, episode_id \
         on conflict (tenant_id, episode_id) do update set ended_at = least(episode_end.ended_at, excluded.ended_at)",
        column!(rows, row => row.event.tenant.clone()),
        column!(rows, episode_id),
        column!(rows, row => row.event.time),
    )
    .execute(connection)
    .await?;
    Ok(())
}
