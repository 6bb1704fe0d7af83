//! Which versions garbage collection must keep because the database refers to them. Needs no
//! libtorch.

use super::run_state;
use anyhow::Context;
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use store::Store;

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
