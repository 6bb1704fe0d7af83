//! The follower: brings the versions that the newest signed assignment names to this replica, and puts the assignment in
//! force once they are all resident. Learns of a new one by announcement, and by looking at the store now and then.
//!
//! Everything slow (fetch, verify, decode, build) happens beside the serving engine; the engine sees an install between
//! two decode steps. What cannot be verified is never installed, and the old assignment stays in force. It decides
//! nothing: which version an alias names is the release's business.

mod memory;
mod report;
mod resident;
mod trust;

pub use report::{Reporter, Told};
pub use resident::{Stage, Staged};

use crate::engine::{Handle, Version};
use crate::fleet::Swap;
use crate::routing::Routing;
use anyhow::Context;
use futures::{Stream, StreamExt};
use ingest::kafka::ClientOptions;
use ingest::log::Announcements;
use policy::assignment::{Assignment, CHAMPION, Target};
use policy::sign::TrustedKeys;
use policy::store::Store;
use resident::Residents;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use trust::Trust;

/// Longest wait after a failure, before the store is looked at again.
const BACK_OFF_MAX: Duration = Duration::from_secs(10);
/// Wait before the log is asked for announcements again.
const SUBSCRIBE_AGAIN: Duration = Duration::from_secs(5);

/// What a follower needs.
pub struct Options {
    pub policy: String,
    pub replica: String,
    pub store: Store,
    pub keys_dir: PathBuf,
    pub state_dir: PathBuf,
    pub poll_interval: Duration,
    /// For weights and caches of all resident versions, in bytes.
    pub resident_bytes_max: u64,
}

pub struct Follower {
    options: Options,
    trust: Trust,
    residents: Residents,
    routing: Arc<Routing>,
    swaps: mpsc::Sender<Swap>,
}

impl Follower {
    /// Reads the follower's memory; one that cannot be read is an error, because it guards against old assignments.
    pub fn new(
        options: Options,
        engine: Handle,
        stage: Stage,
        routing: Arc<Routing>,
        swaps: mpsc::Sender<Swap>,
    ) -> anyhow::Result<Self> {
        let trust = Trust::new(
            options.store.clone(),
            &options.policy,
            &options.keys_dir,
            &options.state_dir,
        )?;
        let residents = Residents::new(engine, stage, options.resident_bytes_max);
        Ok(Follower {
            options,
            trust,
            residents,
            routing,
            swaps,
        })
    }

    /// Follows until `shutdown`. Failures are logged and tried again; none ends it.
    pub async fn run(mut self, kafka: ClientOptions, shutdown: CancellationToken) {
        let mut announced = Box::pin(epochs(kafka, self.options.policy.clone()));
        let mut failures = 0u32;
        loop {
            let look = tokio::select! {
                () = shutdown.cancelled() => return,
                look = self.look() => look,
            };
            match look {
                Ok(_) => failures = 0,
                Err(error) => {
                    failures += 1;
                    metrics::counter!("springtide_follow_failures_total").increment(1);
                    tracing::warn!(failures, error = format!("{error:#}"), "could not follow");
                }
            }
            let pause = (self.options.poll_interval * 2u32.saturating_pow(failures.min(10))).min(BACK_OFF_MAX);
            let pause = if failures == 0 {
                self.options.poll_interval
            } else {
                pause
            };
            let wake = tokio::time::sleep(pause);
            tokio::pin!(wake);
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = &mut wake => break,
                    Some(epoch) = announced.next() => {
                        if epoch > self.routing.epoch() {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Looks at the store once. Returns the epoch that is now in force if it is a new one.
    pub async fn look(&mut self) -> anyhow::Result<Option<i64>> {
        let Some((assignment, keys)) = self.trust.newest(self.routing.epoch()).await? else {
            return Ok(None);
        };
        let epoch = assignment.epoch;
        self.apply(assignment, &keys)
            .await
            .with_context(|| format!("apply assignment {epoch}"))?;
        Ok(Some(epoch))
    }

    /// Makes every version of `assignment` resident, then puts it in force.
    async fn apply(&mut self, assignment: Assignment, keys: &TrustedKeys) -> anyhow::Result<()> {
        let epoch = assignment.epoch;
        let mut versions: BTreeMap<i64, Arc<Version>> = BTreeMap::new();
        let mut arrived = Vec::new();
        for (alias, target, required) in order(&assignment) {
            if versions.contains_key(&target.version) {
                continue;
            }
            let ready = self
                .residents
                .bring(&self.options.store, &self.options.policy, keys, target, required)
                .await
                .with_context(|| format!("bring version {} for {alias}", target.version));
            match ready {
                Ok((version, brought)) => {
                    versions.insert(target.version, version);
                    arrived.extend(brought.map(|brought| (target.version, brought)));
                }
                Err(error) if required => return Err(error),
                // users are not served by it; those who ask for it are told that it is not here
                Err(error) => {
                    tracing::warn!(
                        alias,
                        version = target.version,
                        error = format!("{error:#}"),
                        "alias left out"
                    );
                }
            }
        }
        self.routing.apply(assignment, versions);
        metrics::gauge!("springtide_assignment_epoch").set(epoch as f64);
        tracing::info!(epoch, "assignment in force");
        for (version, brought) in arrived {
            let swap = brought.swap(&self.options, version, epoch);
            if self.swaps.try_send(swap).is_err() {
                tracing::debug!("swap not reported: too many wait");
            }
        }
        Ok(())
    }
}

/// Aliases in the order in which they get memory: the arms (required), then the champion, then the rest by name.
fn order(assignment: &Assignment) -> Vec<(&str, Target, bool)> {
    let mut order: Vec<(&str, Target, bool)> = assignment
        .aliases
        .iter()
        .map(|(alias, target)| {
            let arm = assignment.arms.iter().any(|arm| &arm.alias == alias);
            let champion = alias == CHAMPION && assignment.arms.is_empty();
            (alias.as_str(), *target, arm || champion)
        })
        .collect();
    order.sort_by_key(|(alias, _, required)| (!required, *alias != CHAMPION));
    order
}

/// Epochs of the policy as they are announced. Without a log there are none, and the store is looked at anyway.
fn epochs(kafka: ClientOptions, policy: String) -> impl Stream<Item = i64> + Send {
    futures::stream::unfold(None, move |listening: Option<Pin<Box<Announcements>>>| {
        let (kafka, policy) = (kafka.clone(), policy.clone());
        async move {
            let mut announcements = match listening {
                Some(announcements) => announcements,
                None => subscribe(&kafka).await,
            };
            loop {
                match announcements.next().await {
                    Some(a) if a.policy == policy && a.epoch > 0 => return Some((a.epoch, Some(announcements))),
                    Some(_) => {}
                    None => announcements = subscribe(&kafka).await,
                }
            }
        }
    })
}

async fn subscribe(kafka: &ClientOptions) -> Pin<Box<Announcements>> {
    loop {
        match Announcements::subscribe(kafka).await {
            Ok(announcements) => return Box::pin(announcements),
            Err(error) => {
                tracing::debug!(
                    error = format!("{error:#}"),
                    "no announcements; the store is looked at instead"
                );
                tokio::time::sleep(SUBSCRIBE_AGAIN).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::assignment;

    #[test]
    fn the_arms_come_first_and_alone_are_required() {
        let document = assignment(
            1,
            &[("base", 1), ("candidate", 9), ("champion", 7), ("run-0a", 8)],
            &[("base", 0.4), ("champion", 0.6)],
        );
        let names: Vec<(&str, bool)> = order(&document).iter().map(|(a, _, r)| (*a, *r)).collect();
        assert_eq!(
            names,
            [
                ("champion", true),
                ("base", true),
                ("candidate", false),
                ("run-0a", false)
            ]
        );
    }

    #[test]
    fn without_an_experiment_the_champion_is_required() {
        let document = assignment(1, &[("base", 1), ("champion", 7)], &[]);
        let names: Vec<(&str, bool)> = order(&document).iter().map(|(a, _, r)| (*a, *r)).collect();
        assert_eq!(names, [("champion", true), ("base", false)]);
    }
}
