//! Makes squashed deltas along the lines of a policy, beside the runs. Needs no libtorch and
//! deletes nothing.

use super::Publisher;
use super::referenced::heads;
use artifact::manifest::Manifest;
use artifact::sign::{SigningKey, TrustedKeys};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use store::{SQUASH_SPANS, SquashOutcome, Store, due_squashes};

/// How often lines are checked.
const POLL_EVERY: Duration = Duration::from_secs(30);
/// Versions read per line: the newest squashed delta of the longest span starts at most this far
/// behind the head.
const VERSIONS_MAX: usize = 2 * 64 + 1;

/// One squashed delta, and its outcome.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub from: i64,
    pub to: i64,
    pub outcome: SquashOutcome,
}

/// Makes squashed deltas of one policy.
pub struct Squasher<'a> {
    pub store: &'a Store,
    pub policy: &'a str,
    pub key: &'a SigningKey,
    /// Not tried again: larger than the steps they replace, or impossible.
    skipped: BTreeSet<(i64, i64)>,
    /// Skip spans with sharded deltas, which one machine may not have the memory for.
    skip_sharded: bool,
}

impl<'a> Squasher<'a> {
    pub fn new(store: &'a Store, policy: &'a str, key: &'a SigningKey) -> Self {
        Squasher {
            store,
            policy,
            key,
            skipped: BTreeSet::new(),
            skip_sharded: false,
        }
    }

    /// Makes the squashed deltas of `spans` steps that are due on the last `versions_max` versions
    /// up to `head`.
    pub async fn squash(
        &mut self,
        head: i64,
        versions_max: usize,
        spans: &[u32],
        trusted: &TrustedKeys,
    ) -> Result<Vec<Attempt>, store::Error> {
        let path = self.store.ancestry(self.policy, head, versions_max, trusted).await?;
        let names = self.store.list_squashed_deltas(self.policy).await?;
        let mut attempts = vec![];
        for &span in spans {
            for (from, to) in due_squashes(&path, &names, span) {
                let (ends, steps) = ((&path[from], &path[to]), &path[to..from]);
                let (from, to) = (ends.0.version, ends.1.version);
                let sharded = steps.iter().any(|manifest| !manifest.delta_shards.is_empty());
                // from or to an adapter
                let changes_kind = steps.iter().any(|manifest| manifest.delta.is_none());
                if changes_kind || self.skipped.contains(&(from, to)) || sharded && self.skip_sharded {
                    continue;
                }
                let outcome = self
                    .store
                    .squash(self.policy, ends, span, delta_bytes(steps), self.key, trusted)
                    .await;
                match &outcome {
                    Ok(SquashOutcome::NotSmaller { .. }) => drop(self.skipped.insert((from, to))),
                    // on a branch that was abandoned
                    Err(store::Error::NoPath { .. }) => {
                        self.skipped.insert((from, to));
                        continue;
                    }
                    _ => {}
                }
                let outcome = outcome?;
                attempts.push(Attempt { from, to, outcome });
            }
        }
        Ok(attempts)
    }
}

fn delta_bytes(versions: &[Manifest]) -> u64 {
    let deltas = versions
        .iter()
        .map(|manifest| manifest.delta_bytes().unwrap_or(u64::MAX));
    deltas.fold(0, u64::saturating_add)
}

/// Makes squashed deltas until it is dropped. Errors are logged and tried again.
pub async fn run(publisher: &Publisher) {
    let mut done: BTreeMap<String, i64> = BTreeMap::new();
    let Publisher { store, policy, key, .. } = publisher;
    let mut squasher = Squasher::new(store, policy, key);
    squasher.skip_sharded = true;
    loop {
        tokio::time::sleep(POLL_EVERY).await;
        let trusted = match publisher.signing_keys().await {
            Ok(trusted) => trusted,
            Err(error) => {
                tracing::warn!(%error, "could not squash deltas");
                continue;
            }
        };
        let heads = match heads(&publisher.pool, policy).await {
            Ok(heads) => heads,
            Err(error) => {
                tracing::warn!(%error, "could not read the heads of lines to squash deltas");
                continue;
            }
        };
        for (line, head) in heads {
            if done.get(&line) == Some(&head) {
                continue;
            }
            match squasher.squash(head, VERSIONS_MAX, &SQUASH_SPANS, &trusted).await {
                Ok(attempts) => {
                    for Attempt { from, to, outcome } in attempts {
                        if let SquashOutcome::Created(squashed) = outcome {
                            tracing::info!(
                                line,
                                from,
                                to,
                                bytes = squashed.delta.size_bytes,
                                "made a squashed delta"
                            );
                            metrics::counter!("springtide_train_folds_total").increment(1);
                        }
                    }
                    done.insert(line, head);
                }
                Err(error) => tracing::warn!(line, head, %error, "could not squash deltas; will retry"),
            }
        }
    }
}
