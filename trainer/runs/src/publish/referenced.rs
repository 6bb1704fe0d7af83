//! Which versions garbage collection must keep because the database refers to them. Needs no
//! libtorch.

use super::run_state;
use anyhow::Context;
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use store::Store;
use time::OffsetDateTime;
use uuid::Uuid;

/// Longest header of a run state that is read. Longer than safetensors allows.
const HEADER_BYTES_MAX: u64 = 100 << 20;

/// Head of every line.
pub async fn heads(pool: &PgPool, policy: &str) -> Result<BTreeMap<String, i64>, sqlx::Error> {
    let rows = sqlx::query!("select line, head from line where policy = $1", policy)
        .fetch_all(pool)
        .await?;
    Ok(rows.into_iter().map(|row| (row.line, row.head)).collect())
}

/// Heads of lines, versions that aliases name, canaries and what they would go back to, the last two
/// versions known to be good, base versions of runs that have not ended, and base versions of their
/// adapters.
pub async fn versions(pool: &PgPool, store: &Store, policy: &str) -> anyhow::Result<BTreeSet<i64>> {
    let versions = sqlx::query_scalar!(
        r#"
        select head as "version!" from line where policy = $1
        union
        select version from alias where policy = $1 and not withdrawn
        union
        select base_version from run
        where policy = $1 and base_version is not null and status not in ('succeeded', 'failed', 'cancelled')
        union
        select named from canary
        cross join lateral unnest(array[version, control]) as named
        where policy = $1 and state not in ('retired', 'aborted', 'rolled_back') and named is not null
        union
        select version from (select version from version_judgment
                             where policy = $1 and verdict = 'good' order by id desc limit 2) as good
        "#,
        policy
    )
    .fetch_all(pool)
    .await
    .context("read the referenced versions")?;
    let run_states = sqlx::query_scalar!(
        r#"
        select distinct on (s.run_id) s.checkpoint_key
        from step s join run r on r.id = s.run_id
        where r.policy = $1 and r.status not in ('succeeded', 'failed', 'cancelled')
        order by s.run_id, s.step desc
        "#,
        policy
    )
    .fetch_all(pool)
    .await
    .context("read the run states of active runs")?;
    let mut referenced: BTreeSet<i64> = versions.into_iter().collect();
    for key in run_states {
        let base = adapter_base(store, &key).await;
        referenced.extend(base.with_context(|| format!("read the adapter's base from run state {key}"))?);
    }
    Ok(referenced)
}

/// Files of the store's private part that nothing needs any more, with their sizes: run states of attempts
/// that made no step, those of ended runs whose version is not `live`, and shard reports that no
/// publisher fetched. Only of this policy, and only what was written before `before`.
pub async fn spent_private(
    pool: &PgPool,
    store: &Store,
    policy: &str,
    live: &BTreeSet<i64>,
    before: OffsetDateTime,
) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut spent = store.list_private(&format!("shares/{policy}")).await?;
    let states = store.list_private("run").await?;
    let named = states
        .keys()
        .filter_map(|key| Some((key.clone(), run_state::of_key(key)?)));
    let (keys, (runs, steps)): (Vec<String>, (Vec<Uuid>, Vec<i64>)) = named.unzip();
    let rows = sqlx::query!(
        r#"
        select k.key as "key!", s.version as "version?", r.status in ('succeeded', 'failed', 'cancelled') as "ended!",
               exists (select 1 from step later where later.run_id = k.run and later.step >= k.step) as "passed!"
        from unnest($2::text[], $3::uuid[], $4::bigint[]) as k (key, run, step)
        join run r on r.id = k.run and r.policy = $1
        left join step s on s.run_id = k.run and s.step = k.step and s.checkpoint_key = k.key
        "#,
        policy,
        &keys,
        &runs,
        &steps
    )
    .fetch_all(pool)
    .await
    .context("read which steps name the run states")?;
    for row in rows {
        let is_spent = match row.version {
            Some(version) => row.ended && !live.contains(&version),
            // An active run may still commit the step that it was about to make.
            None => row.ended || row.passed,
        };
        if is_spent && let Some(stored) = states.get(&row.key) {
            spent.insert(row.key, *stored);
        }
    }
    spent.retain(|_, stored| stored.modified_at < before);
    Ok(spent
        .into_iter()
        .map(|(key, stored)| (key, stored.size_bytes))
        .collect())
}

/// The base version of a run state's adapter, from the header alone.
async fn adapter_base(store: &Store, key: &str) -> anyhow::Result<Option<i64>> {
    let length = match store.get_private_range(key, 0..8).await {
        // without its run state, a run continues from the published values
        Err(store::Error::NotFound(_)) => return Ok(None),
        read => read?,
    };
    let length = u64::from_le_bytes(length.as_ref().try_into().context("it ends early")?);
    anyhow::ensure!(length <= HEADER_BYTES_MAX, "its header would have {length} bytes");
    let header = store.get_private_range(key, 8..8 + length).await?;
    Ok(run_state::base_in_header(&header)?)
}
