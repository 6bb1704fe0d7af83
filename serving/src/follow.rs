//! The follower: loads the versions that the newest signed assignment names, then puts that
//! assignment in force.
//!
//! It learns of a new assignment from an announcement, and also polls the store. Everything slow
//! (fetch, verify, decode, build) happens beside the serving engine, which only pauses to install a
//! version between two passes. A version that cannot be verified is never installed, and the
//! old assignment stays in force. The follower decides nothing: releases decide which version an
//! alias names.

mod command;
mod folders;
mod load;
mod trust;

pub use command::Command;
pub use folders::Folders;
pub(crate) use load::BYTES_PER_CHECKPOINT_BYTE;
pub use load::Host;

use crate::engine::LoadedVersion;
use crate::fleet::Swap;
use crate::routing::RouteTable;
use anyhow::Context;
use artifact::assignment::{Assignment, CHAMPION, Target};
use artifact::sign::TrustedKeys;
use futures::{Stream, StreamExt};
use ingest::log::ClientOptions;
use ingest::log::announcements::{self, Announcements};
use load::{Loader, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use trust::Trust;

/// Wait before subscribing to announcements again.
const RESUBSCRIBE_WAIT: Duration = Duration::from_secs(5);

pub struct Options {
    pub policy: String,
    pub replica: String,
    pub store: Store,
    pub keys_dir: PathBuf,
    pub state_dir: PathBuf,
    pub poll_interval: Duration,
    /// Longest wait before the next try after a failure. A new assignment is tried at once.
    pub back_off_max: Duration,
    /// Of the replica.
    pub cluster: String,
    /// Loads only the version of this alias; `None`: those of all aliases.
    pub alias: Option<String>,
    /// Memory for weights and caches of all loaded versions, in bytes.
    pub resident_bytes_max: u64,
}

pub struct Follower {
    options: Options,
    trust: Trust,
    loader: Loader,
    routes: Arc<RouteTable>,
    swaps: mpsc::Sender<Swap>,
}

impl Follower {
    /// Reads the trust state of earlier runs. An unreadable state is an error, because it protects
    /// against old assignments.
    pub fn new(
        options: Options,
        host: Host,
        routes: Arc<RouteTable>,
        swaps: mpsc::Sender<Swap>,
    ) -> anyhow::Result<Self> {
        let trust = Trust::new(
            options.store.clone(),
            &options.policy,
            &options.keys_dir,
            &options.state_dir,
        )?;
        Ok(Follower {
            loader: Loader::new(&options, host),
            options,
            trust,
            routes,
            swaps,
        })
    }

    /// Runs until `shutdown`. Failures are logged and retried. `kafka`: where assignments are
    /// announced; without it, the store is only polled.
    pub async fn run(mut self, kafka: Option<ClientOptions>, shutdown: CancellationToken) {
        let mut announced = match kafka {
            Some(kafka) => announced_epochs(kafka, self.options.policy.clone()).boxed(),
            None => futures::stream::pending().boxed(),
        };
        let mut failures = 0u32;
        loop {
            let followed = tokio::select! {
                () = shutdown.cancelled() => return,
                followed = self.follow() => followed,
            };
            let interval = self.options.poll_interval;
            let wait = match followed {
                Ok(()) => {
                    failures = 0;
                    metrics::gauge!("springtide_follow_failing").set(0.0);
                    interval
                }
                Err(error) => {
                    failures += 1;
                    metrics::counter!("springtide_follow_failures_total").increment(1);
                    metrics::gauge!("springtide_follow_failing").set(1.0);
                    tracing::warn!(failures, error = format!("{error:#}"), "could not follow");
                    (interval * 2u32.saturating_pow(failures.min(10))).min(self.options.back_off_max)
                }
            };
            let wake = tokio::time::sleep(wait);
            tokio::pin!(wake);
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = &mut wake => break,
                    Some(epoch) = announced.next() => {
                        if epoch > self.routes.epoch() {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Polls the store once and applies a new assignment. Without one, engines elsewhere are mended.
    async fn follow(&mut self) -> anyhow::Result<()> {
        let Some((assignment, keys)) = self.trust.newest(self.routes.epoch()).await? else {
            while self
                .loader
                .mend(&self.routes.shares())
                .await
                .context("mend an engine")?
            {}
            return Ok(());
        };
        let epoch = assignment.epoch;
        self.apply(assignment.in_cluster(&self.options.cluster), &keys)
            .await
            .with_context(|| format!("apply assignment {epoch}"))
    }

    /// Loads every version of `assignment`, then puts it in force.
    async fn apply(&mut self, assignment: Assignment, keys: &TrustedKeys) -> anyhow::Result<()> {
        let epoch = assignment.epoch;
        let mut versions: BTreeMap<i64, Arc<LoadedVersion>> = BTreeMap::new();
        let mut swaps = Vec::new();
        self.loader.vouch(&assignment.aliases);
        let order = match &self.options.alias {
            None => load_order(&assignment),
            Some(alias) => vec![only(&assignment, alias)?],
        };
        let needed = order.iter().filter(|(_, _, required)| *required);
        let needed: BTreeSet<i64> = needed.map(|(_, target, _)| target.version).collect();
        for (alias, target, required) in order {
            if versions.contains_key(&target.version) {
                continue;
            }
            let kept = needed.iter().chain(versions.keys()).copied().collect();
            let wanted = Wanted {
                epoch,
                target,
                required,
                kept: &kept,
            };
            let version = self
                .loader
                .load(keys, wanted)
                .await
                .with_context(|| format!("load version {} for {alias}", target.version));
            match version {
                Ok((version, swap)) => {
                    versions.insert(target.version, version);
                    swaps.extend(swap);
                }
                Err(error) if required => return Err(error),
                // no arm uses it; a request that names it is refused
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(alias, version = target.version, error, "alias left out");
                }
            }
        }
        let (aliases, serials) = (assignment.aliases.clone(), versions.keys().copied().collect());
        self.routes.apply(assignment, versions);
        self.loader.in_force(&aliases, serials);
        metrics::gauge!("springtide_assignment_epoch").set(epoch as f64);
        tracing::info!(epoch, "assignment in force");
        for mut swap in swaps {
            swap.at = OffsetDateTime::now_utc();
            if self.swaps.try_send(swap).is_err() {
                tracing::debug!("swap not reported: too many wait");
            }
        }
        Ok(())
    }
}

/// Aliases in the order in which they get memory: the arms (required), then the champion, then the
/// rest by name.
pub(crate) fn load_order(assignment: &Assignment) -> Vec<(&str, Target, bool)> {
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

/// The one alias that is followed.
fn only<'a>(assignment: &'a Assignment, alias: &'a str) -> anyhow::Result<(&'a str, Target, bool)> {
    let target = assignment.aliases.get(alias).with_context(|| {
        let known: Vec<&str> = assignment.aliases.keys().map(String::as_str).collect();
        format!(
            "no version has the alias {alias:?}; the assignment names {}",
            known.join(", ")
        )
    })?;
    Ok((alias, *target, true))
}

/// The policy's announced epochs. The stream never ends; without a log it yields nothing, and the
/// follower only polls.
fn announced_epochs(kafka: ClientOptions, policy: String) -> impl Stream<Item = i64> + Send {
    futures::stream::unfold(None, move |subscribed: Option<Announcements>| {
        let (kafka, policy) = (kafka.clone(), policy.clone());
        async move {
            let mut announcements = match subscribed {
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

async fn subscribe(kafka: &ClientOptions) -> Announcements {
    loop {
        match announcements::subscribe(kafka).await {
            Ok(announcements) => return announcements,
            Err(error) => {
                let error = format!("{error:#}");
                tracing::debug!(error, "no announcements; only polling the store");
                tokio::time::sleep(RESUBSCRIBE_WAIT).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::assignment;

    #[test]
    fn arms_are_loaded_first_and_only_they_are_required() {
        let document = assignment(
            1,
            &[("base", 1), ("candidate", 9), ("champion", 7), ("run-0a", 8)],
            &[("base", 0.4), ("champion", 0.6)],
        );
        let names: Vec<(&str, bool)> = load_order(&document).iter().map(|(a, _, r)| (*a, *r)).collect();
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
    fn one_alias_can_be_followed_alone_and_must_exist() {
        let document = assignment(1, &[("base", 1), ("champion", 7)], &[("champion", 1.0)]);
        let (alias, target, required) = only(&document, "base").unwrap();
        assert_eq!((alias, target.version, required), ("base", 1, true));
        let error = only(&document, "bass").unwrap_err().to_string();
        assert!(error.contains("base, champion"), "{error}");
    }

    #[test]
    fn without_arms_only_the_champion_is_required() {
        let document = assignment(1, &[("base", 1), ("champion", 7)], &[]);
        let names: Vec<(&str, bool)> = load_order(&document).iter().map(|(a, _, r)| (*a, *r)).collect();
        assert_eq!(names, [("champion", true), ("base", false)]);
    }
}
