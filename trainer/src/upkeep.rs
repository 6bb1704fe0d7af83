//! What keeps the policy store in shape beside the runs: folds along the lines, and what of the store the database needs.
//! Needs no libtorch. Deletes nothing: that is asked for by a person (`springtide policy gc`).

use crate::checkpoint;
use crate::publish::Publisher;
use anyhow::Context;
use policy::manifest::Manifest;
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::{self, Folded, SPANS, Store, due};
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How often lines are looked at for folds that are due.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// How far back a look goes: the newest fold of the longest span that still counts begins so far from the head at most.
const LOOK_BACK: usize = 2 * 64 + 1;

/// More than safetensors allows.
const HEADER_BYTES_MAX: u64 = 100 << 20;

/// One fold, and what came of it.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub from: i64,
    pub to: i64,
    pub folded: Folded,
}

/// Makes folds of one policy.
pub struct Folder<'a> {
    pub store: &'a Store,
    pub policy: &'a str,
    pub key: &'a SigningKey,
    pub trusted: &'a TrustedKeys,
    /// Those that were found not to be worth their bytes, or not to be possible; they are not tried again.
    tried: BTreeSet<(i64, i64)>,
    /// Folds over deltas that several machines made are not made: one machine may not have the memory for it.
    leaves_sharded: bool,
}

impl<'a> Folder<'a> {
    pub fn new(store: &'a Store, policy: &'a str, key: &'a SigningKey, trusted: &'a TrustedKeys) -> Self {
        Folder {
            store,
            policy,
            key,
            trusted,
            tried: BTreeSet::new(),
            leaves_sharded: false,
        }
    }

    /// Makes the folds of `spans` steps that are due along the line that ends at `head`, looking `back` versions far.
    pub async fn fold(&mut self, head: i64, back: usize, spans: &[u32]) -> Result<Vec<Attempt>, store::Error> {
        let path = self.store.ancestry(self.policy, head, back, self.trusted).await?;
        let names = self.store.fold_names(self.policy).await?;
        let mut attempts = vec![];
        for &span in spans {
            for (from, to) in due(&path, &names, span) {
                let (ends, bytes) = ((&path[from], &path[to]), steps_bytes(&path[to..from]));
                let sharded = path[to..from].iter().any(|manifest| !manifest.delta_shards.is_empty());
                let (from, to) = (ends.0.version, ends.1.version);
                if self.tried.contains(&(from, to)) {
                    continue;
                }
                // what took several machines to make is not put together on one, unasked
                if sharded && self.leaves_sharded {
                    self.tried.insert((from, to));
                    continue;
                }
                let folded = self
                    .store
                    .fold(self.policy, ends, span, bytes, self.key, self.trusted)
                    .await;
                match &folded {
                    Ok(Folded::NotWorth { .. }) => drop(self.tried.insert((from, to))),
                    // of a part of the line that was given up
                    Err(store::Error::NoPath { .. }) => {
                        self.tried.insert((from, to));
                        continue;
                    }
                    _ => {}
                }
                let folded = folded?;
                attempts.push(Attempt { from, to, folded });
            }
        }
        Ok(attempts)
    }
}

/// What the deltas of these versions take.
fn steps_bytes(path: &[Manifest]) -> u64 {
    let deltas = path.iter().map(|manifest| manifest.delta_bytes().unwrap_or(u64::MAX));
    deltas.fold(0, u64::saturating_add)
}

/// Makes folds along the policy's lines until it is dropped. Failures are logged and tried again.
pub async fn run(publisher: &Publisher) {
    let mut seen: BTreeMap<String, i64> = BTreeMap::new();
    let Publisher {
        store,
        policy,
        key,
        trusted,
        ..
    } = publisher;
    let mut folder = Folder::new(store, policy, key, trusted);
    folder.leaves_sharded = true;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let heads = match heads(&publisher.pool, &publisher.policy).await {
            Ok(heads) => heads,
            Err(error) => {
                tracing::warn!(%error, "could not look for folds that are due");
                continue;
            }
        };
        for (line, head) in heads {
            if seen.get(&line) == Some(&head) {
                continue;
            }
            match folder.fold(head, LOOK_BACK, &SPANS).await {
                Ok(attempts) => {
                    for Attempt { from, to, folded } in attempts {
                        if let Folded::Made(fold) = folded {
                            tracing::info!(line, from, to, bytes = fold.delta.size_bytes, "folded");
                            metrics::counter!("springtide_train_folds_total").increment(1);
                        }
                    }
                    seen.insert(line, head);
                }
                Err(error) => tracing::warn!(line, head, %error, "could not fold; trying again"),
            }
        }
    }
}

/// Head of every line.
pub async fn heads(pool: &PgPool, policy: &str) -> Result<BTreeMap<String, i64>, sqlx::Error> {
    let rows = sqlx::query!("select line, head from line where policy = $1", policy)
        .fetch_all(pool)
        .await?;
    Ok(rows.into_iter().map(|row| (row.line, row.head)).collect())
}

/// The versions that are needed whatever the store itself says: heads of lines, what aliases name, what runs that have not
/// ended began on, and what their adapters are of.
pub async fn needed(pool: &PgPool, store: &Store, policy: &str) -> anyhow::Result<BTreeSet<i64>> {
    let versions = sqlx::query_scalar!(
        r#"
        select head as "version!" from line where policy = $1
        union
        select version from alias where policy = $1 and not withdrawn
        union
        select base_version from run
        where policy = $1 and base_version is not null and status not in ('succeeded', 'failed', 'cancelled')
        "#,
        policy
    )
    .fetch_all(pool)
    .await
    .context("ask the database which versions are needed")?;
    let checkpoints = sqlx::query_scalar!(
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
    .context("ask the database which runs go on")?;
    let mut needed: BTreeSet<i64> = versions.into_iter().collect();
    for key in checkpoints {
        let base = adapter_base(store, &key).await;
        needed.extend(base.with_context(|| format!("read what the adapter in checkpoint {key} is of"))?);
    }
    Ok(needed)
}

/// The version that a checkpoint's adapter is of: from the checkpoint's header alone.
async fn adapter_base(store: &Store, key: &str) -> anyhow::Result<Option<i64>> {
    let length = match store.get_private_range(key, 0..8).await {
        // its run goes on from the published values
        Err(store::Error::NotFound(_)) => return Ok(None),
        read => read?,
    };
    let length = u64::from_le_bytes(length.as_ref().try_into().context("it ends early")?);
    anyhow::ensure!(length <= HEADER_BYTES_MAX, "its header would have {length} bytes");
    let header = store.get_private_range(key, 8..8 + length).await?;
    Ok(checkpoint::base_in_header(&header)?)
}
