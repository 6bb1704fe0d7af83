//! Events as rows: one statement per table and batch, each a `select … from unnest(columns)`.

use std::collections::{BTreeMap, HashMap, HashSet};

use sqlx::PgConnection;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

use super::record::Record;
use crate::event::{Event, Feedback, Generation, Sampling, Target, Value, time_of};
use crate::reward::starts_at;
use crate::reward::stored::Surfaces;
use crate::transaction;

/// One event on its way into a table.
pub(super) struct Row<'a, T> {
    pub record: &'a Record,
    pub event: &'a Event,
    pub body: &'a T,
}

type Key<'a> = (&'a str, &'a str, &'a str);
type OwnedKey = (String, String, String);

/// Stores identities that are new; returns the digests under which the others were stored before.
pub(super) async fn insert_keys(
    connection: &mut PgConnection,
    keys: &BTreeMap<Key<'_>, [u8; 32]>,
) -> sqlx::Result<HashMap<OwnedKey, Vec<u8>>> {
    let (tenants, sources, ids) = key_columns(keys.keys());
    let digests: Vec<Vec<u8>> = keys.values().map(|digest| digest.to_vec()).collect();
    let inserted = sqlx::query!(
        "insert into event_key (tenant_id, source, event_id, digest) \
         select * from unnest($1::text[], $2::text[], $3::text[], $4::bytea[]) \
         on conflict do nothing",
        &tenants,
        &sources,
        &ids,
        &digests
    )
    .execute(&mut *connection)
    .await?;
    if inserted.rows_affected() == keys.len() as u64 {
        return Ok(HashMap::new());
    }
    let older = sqlx::query_file!("src/sink/older_keys.sql", &tenants, &sources, &ids)
        .fetch_all(connection)
        .await?;
    let older = older.into_iter();
    Ok(older
        .map(|row| ((row.tenant_id, row.source, row.event_id), row.digest))
        .collect())
}

fn key_columns<'a>(keys: impl Iterator<Item = &'a Key<'a>>) -> (Vec<String>, Vec<String>, Vec<String>) {
    let mut columns = (Vec::new(), Vec::new(), Vec::new());
    for (tenant, source, id) in keys {
        columns.0.push((*tenant).to_owned());
        columns.1.push((*source).to_owned());
        columns.2.push((*id).to_owned());
    }
    columns
}

/// Lists of lists as one flat column and the bounds of each list: `unnest` flattens arrays of arrays. Bounds count from 1
/// and are inclusive, as SQL slices are; an empty list ends before it begins.
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

/// A value that [`Event::check`] found to fit in 31 bits.
fn narrow(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Stores generations; returns the ids that were free.
pub(super) async fn insert_generations(
    connection: &mut PgConnection,
    rows: &[Row<'_, Generation>],
) -> sqlx::Result<HashSet<Uuid>> {
    if rows.is_empty() {
        return Ok(HashSet::new());
    }
    macro_rules! column {
        ($row:ident => $value:expr) => {
            &rows
                .iter()
                .map(|$row| $value)
                .collect::<Vec<_>>()
        };
        ($field:ident) => {
            column!(row => row.body.$field.clone())
        };
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
        "src/sink/insert_generations.sql",
        column!(id),
        column!(row => row.event.tenant.clone()),
        column!(policy),
        column!(row => row.body.versions.last().map_or(0, |span| span.version)),
        column!(row => row.body.versions.iter().map(|span| span.version).min().unwrap_or(0)),
        column!(row => spans(row.body)),
        column!(row => row.body.versions.last().map_or_else(Vec::new, |span| span.root.to_vec())),
        column!(line),
        column!(replica),
        column!(row => row.body.purpose.as_str().to_owned()),
        column!(run_id) as _,
        column!(task_id) as _,
        column!(group_id) as _,
        column!(surface),
        column!(episode_id),
        column!(row => narrow(row.body.segment)),
        column!(row => narrow(row.body.turn)),
        column!(parent_id) as _,
        column!(user_key),
        column!(arm),
        column!(arm_probability),
        column!(row => row.body.prompt_prefix.map_or(0, |prefix| narrow(prefix.length))),
        column!(row => row.body.prompt_prefix.map(|prefix| prefix.hash.to_vec())) as _,
        column!(row => row.body.train_mask.is_some()),
        column!(row => row.body.payload.as_ref().map(|payload| payload.digest.to_vec())) as _,
        column!(temperature),
        column!(top_p),
        // A seed is 64 bits without a sign; the column keeps the same bits.
        column!(row => row.body.seed.map(u64::cast_signed)) as _,
        column!(row => row.body.finish_reason.as_str().to_owned()),
        column!(declined),
        column!(shown) as _,
        column!(consent),
        column!(row => time_of(row.body.id).unwrap_or(row.event.time)),
        column!(decline_suppressed),
        column!(exploration_share) as _,
        column!(row => row.event.time),
        column!(row => row.body.sampling.as_ref().map(sampling)) as _,
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

/// Notes until when each stored generation waits. A surface that nobody defined waits for nothing.
pub(super) async fn open(
    connection: &mut PgConnection,
    rows: &[Row<'_, Generation>],
    surfaces: &Surfaces,
) -> sqlx::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut ids = Vec::with_capacity(rows.len());
    let mut names = Vec::with_capacity(rows.len());
    let mut closes: Vec<OffsetDateTime> = Vec::with_capacity(rows.len());
    for row in rows {
        let sampled_at = time_of(row.body.id).unwrap_or(row.event.time);
        let start = starts_at(sampled_at, row.event.time);
        let horizon = surfaces
            .get(&row.body.surface)
            .map_or(time::Duration::ZERO, |(_, rule)| rule.definition.horizon());
        ids.push(row.body.id);
        names.push(row.body.surface.clone());
        closes.push(start + horizon);
    }
    sqlx::query!(
        "insert into open_generation (generation_id, surface, closes_at) \
         select * from unnest($1::uuid[], $2::text[], $3::timestamptz[])",
        &ids,
        &names,
        &closes
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Keeps the closer away from the generations that this feedback is about, until the commit. Without it, feedback could
/// be stored as in time while the closer closes without having seen it. Only those need it that the closer may close by
/// then: what was due at `caught_up_to`, and what may become due at any moment.
pub(super) async fn hold_open(
    connection: &mut PgConnection,
    rows: &[Row<'_, Feedback>],
    caught_up_to: Option<OffsetDateTime>,
    surfaces: &Surfaces,
) -> sqlx::Result<()> {
    let (mut generations, episodes) = targets(rows);
    let until = caught_up_to.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let moving = surfaces
        .definitions()
        .filter(|surface| surface.close_on_feedback || surface.close_on_episode_end);
    let moving: Vec<String> = moving.map(|surface| surface.name.clone()).collect();
    let open = hold_generations(&mut *connection, &generations, until, &moving).await?;
    generations.retain(|id| !open.contains(id));
    // What is not open is closed, or another sink is just storing it: it could open and close beside this transaction.
    let unseen = [&*generations, &*episodes].concat();
    if !unseen.is_empty() {
        transaction::expect(&mut *connection, &unseen).await?;
        hold_generations(&mut *connection, &generations, until, &moving).await?;
    }
    if !episodes.is_empty() {
        sqlx::query!(
            "select from open_generation where generation_id in \
                 (select id from generation where episode_id = any($1)) \
               and (closes_at <= $2 or surface = any($3)) \
             order by generation_id for share",
            &episodes,
            until,
            &moving
        )
        .execute(connection)
        .await?;
    }
    Ok(())
}

/// Holds those that are due at `until` or on a surface whose generations may become due sooner; returns all that are open.
async fn hold_generations(
    connection: &mut PgConnection,
    ids: &[Uuid],
    until: OffsetDateTime,
    moving: &[String],
) -> sqlx::Result<HashSet<Uuid>> {
    if ids.is_empty() {
        return Ok(HashSet::new());
    }
    let open = sqlx::query!(
        "select generation_id, closes_at <= $2 or surface = any($3) as \"closable!\" from open_generation \
         where generation_id = any($1)",
        ids,
        until,
        moving
    )
    .fetch_all(&mut *connection)
    .await?;
    let closable = open.iter().filter(|row| row.closable);
    let closable: Vec<Uuid> = closable.map(|row| row.generation_id).collect();
    if !closable.is_empty() {
        sqlx::query!(
            "select from open_generation where generation_id = any($1) order by generation_id for share",
            &closable
        )
        .execute(connection)
        .await?;
    }
    Ok(open.into_iter().map(|row| row.generation_id).collect())
}

fn targets(rows: &[Row<'_, Feedback>]) -> (Vec<Uuid>, Vec<Uuid>) {
    let mut generations = Vec::new();
    let mut episodes = Vec::new();
    for row in rows {
        match row.body.target {
            Target::Generation(id) => generations.push(id),
            Target::Episode(id) => episodes.push(id),
        }
    }
    (generations, episodes)
}

/// Stores feedback; returns the ids that were free, each with whether it came after its trajectory had closed.
pub(super) async fn insert_feedback(
    connection: &mut PgConnection,
    rows: &[Row<'_, Feedback>],
) -> sqlx::Result<HashMap<Uuid, bool>> {
    if rows.is_empty() {
        return Ok(HashMap::new());
    }
    macro_rules! column {
        ($row:ident => $value:expr) => {
            &rows.iter().map(|$row| $value).collect::<Vec<_>>()
        };
    }
    let stored = sqlx::query_file!(
        "src/sink/insert_feedback.sql",
        column!(row => row.body.id),
        column!(row => row.event.tenant.clone()),
        column!(row => match row.body.target {
            Target::Generation(id) => Some(id),
            Target::Episode(_) => None,
        }) as _,
        column!(row => match row.body.target {
            Target::Generation(_) => None,
            Target::Episode(id) => Some(id),
        }) as _,
        column!(row => row.body.metric_name.clone()),
        column!(row => match row.body.value {
            Value::Bool(value) => Some(value),
            _ => None,
        }) as _,
        column!(row => match row.body.value {
            Value::Float(value) => Some(value),
            _ => None,
        }) as _,
        column!(row => match &row.body.value {
            Value::Text(value) => Some(value.clone()),
            _ => None,
        }) as _,
        column!(row => Json(&row.body.tags)) as _,
        column!(row => row.event.time),
    )
    .fetch_all(connection)
    .await?;
    Ok(stored.into_iter().map(|row| (row.id, row.late)).collect())
}
