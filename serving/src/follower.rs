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
use crate::remote::NoEngine;
use crate::routing::RouteTable;
use anyhow::Context;
use artifact::assignment::{Assignment, CHAMPION, Target};
use artifact::quant::Spec;
use artifact::sign::TrustedKeys;
use event_log::ClientOptions;
use event_log::announcements::{self, Announcements};
use futures::{Stream, StreamExt};
use load::{Loader, Unplaced, Wanted};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::Store;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use trust::Trust;

/// Wait before subscribing to announcements again.
const RESUBSCRIBE_WAIT: Duration = Duration::from_secs(5);

/// How long the arms that have their versions wait for an arm that has none.
const PLACE_WAIT: Duration = Duration::from_secs(5);
/// How often the store is asked for a newer assignment while one is being applied, at most.
const NEWER_INTERVAL_MIN: Duration = Duration::from_millis(200);
/// How many times as long the store is not polled while assignments are announced.
const ANNOUNCED_WAITS: u32 = 20;
/// The longest of these waits, unless polls are rarer anyway.
const ANNOUNCED_WAIT_MAX: Duration = Duration::from_secs(5);

pub struct Options {
    pub policy: String,
    pub replica: String,
    pub store: Store,
    pub keys_dir: PathBuf,
    pub state_dir: PathBuf,
    pub poll_interval: Duration,
    /// Longest wait before the next try after a failure. A new assignment is tried at once.
    pub back_off_max: Duration,
    /// How old the timestamp may be that a replica without saved trust state starts with.
    pub first_timestamp_age_max: Duration,
    /// Of the replica.
    pub cluster: String,
    /// Loads only the version of this alias; `None`: those of all aliases.
    pub alias: Option<String>,
    /// Engines elsewhere and folders get this copy of each version.
    pub quantized: Option<Spec>,
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
        )?
        .with_first_age_max(options.first_timestamp_age_max);
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
        let interval = self.options.poll_interval;
        // whether the assignment in force was announced, the newest epoch that was, and the last poll
        let (mut is_announced, mut newest, mut polled) = (false, 0, Instant::now());
        loop {
            let before = self.routes.epoch();
            let slow = (interval * ANNOUNCED_WAITS).min(interval.max(ANNOUNCED_WAIT_MAX));
            let polls = failures > 0 || !is_announced || newest > before || polled.elapsed() >= slow;
            if polls {
                polled = Instant::now();
            }
            let followed = tokio::select! {
                () = shutdown.cancelled() => return,
                followed = self.follow(polls) => followed,
            };
            if self.routes.epoch() > before {
                is_announced = newest >= self.routes.epoch();
            }
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
                        newest = newest.max(epoch);
                        if epoch > self.routes.epoch() {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Polls the store once, if it `polls`, and applies a new assignment. Without one, engines elsewhere are mended.
    async fn follow(&mut self, polls: bool) -> anyhow::Result<()> {
        let newest = match polls {
            true => self.trust.newest(self.routes.epoch()).await?,
            false => None,
        };
        let Some((assignment, keys)) = newest else {
            let mended = self.loader.mend(&self.routes.shares()).await;
            return mended.context("mend an engine");
        };
        let epoch = assignment.epoch;
        self.apply(assignment.in_cluster(&self.options.cluster), &keys)
            .await
            .with_context(|| format!("apply assignment {epoch}"))
    }

    /// Loads every version of `assignment`, then puts it in force. An arm for which no engine is there waits
    /// for one, and the others do not wait with it.
    async fn apply(&mut self, assignment: Assignment, keys: &TrustedKeys) -> anyhow::Result<()> {
        let epoch = assignment.epoch;
        let mut versions: BTreeMap<i64, Arc<LoadedVersion>> = BTreeMap::new();
        let mut swaps = Vec::new();
        self.loader.vouch(&assignment.aliases);
        let order = match &self.options.alias {
            None => load_order(&assignment),
            Some(alias) => vec![only(&assignment, alias)?],
        };
        for &(alias, target, required) in &order {
            if versions.contains_key(&target.version) {
                continue;
            }
            let wanted = Wanted {
                epoch,
                target,
                required,
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
                Err(error) => left_out(alias, target, &error),
            }
        }
        // an arm that has an engine keeps one: it chooses before those that have none
        let mut needed: Vec<_> = order.iter().filter(|(_, _, required)| *required).collect();
        needed.sort_by_key(|(alias, ..)| {
            let before = self.routes.serial_of(alias);
            !before.is_some_and(|before| self.loader.serves(before))
        });
        let needed: Vec<i64> = needed.into_iter().map(|(_, target, _)| target.version).collect();
        let others = versions.keys().filter(|serial| !needed.contains(serial));
        let others: Vec<i64> = others.copied().collect();
        let mut unplaced = Unplaced::new();
        loop {
            tokio::select! {
                () = self.loader.place(&needed, &others, &mut swaps, &mut unplaced) => break,
                () = newer(&mut self.trust, epoch, self.options.poll_interval) => {
                    tracing::info!(epoch, "a newer assignment goes first");
                    return Ok(());
                }
                () = tokio::time::sleep(PLACE_WAIT) => {}
            }
            // an engine that hangs keeps up only the arm that has no other
            if needed.iter().any(|&serial| self.loader.serves(serial)) && !order.iter().any(|one| self.has_other(one)) {
                break;
            }
        }
        let is_served = needed.iter().any(|&serial| self.loader.serves(serial));
        for one @ &(alias, target, required) in &order {
            if self.loader.serves(target.version) || !versions.contains_key(&target.version) {
                continue;
            }
            let error = unplaced.remove(&target.version);
            let error = error.unwrap_or_else(|| anyhow::anyhow!("its engine has not changed yet"));
            if !required {
                left_out(alias, target, &error);
                versions.remove(&target.version);
                continue;
            }
            if !is_served || self.has_other(one) && !error.is::<NoEngine>() {
                return Err(error.context(format!("place version {} for {alias}", target.version)));
            }
            let error = format!("{error:#}");
            tracing::warn!(
                alias,
                version = target.version,
                error,
                "no engine serves it; its requests wait for one"
            );
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

    /// Whether an arm that waits for its version has another one, which is served meanwhile.
    fn has_other(&self, &(alias, target, required): &(&str, Target, bool)) -> bool {
        let before = self.routes.serial_of(alias).filter(|&before| before != target.version);
        required && !self.loader.serves(target.version) && before.is_some_and(|before| self.loader.serves(before))
    }
}

fn left_out(alias: &str, target: Target, error: &anyhow::Error) {
    let error = format!("{error:#}");
    tracing::warn!(alias, version = target.version, error, "alias left out");
}

/// Waits until the store has an assignment after `epoch`.
async fn newer(trust: &mut Trust, epoch: i64, interval: Duration) {
    loop {
        tokio::time::sleep(interval.max(NEWER_INTERVAL_MIN)).await;
        if matches!(trust.newest(epoch).await, Ok(Some(_))) {
            return;
        }
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
    use crate::engine::{Engine as _, SampleEvent};
    use crate::remote::Pool;
    use crate::remote::placement::Placement;
    use crate::remote::tests::{Fake, Faults, last, updater_of, version};
    use crate::routing::tests::assignment;

    /// A follower of two engines whose store has these versions.
    struct Two {
        follower: Follower,
        routes: Arc<RouteTable>,
        engines: [Fake; 2],
        pool: Pool,
        keys: TrustedKeys,
        _watch: tokio_util::sync::DropGuard,
        _swaps: mpsc::Receiver<Swap>,
        _folder: tempfile::TempDir,
    }

    impl Two {
        async fn new(serials: &[i64]) -> Two {
            let folder = tempfile::tempdir().unwrap();
            let mut published = None;
            for &serial in serials {
                published = Some(load::tests::publish(folder.path(), serial, &version(serial).1).await);
            }
            let (store, keys, _) = published.unwrap();
            let engines = [Fake::start().await, Fake::start().await];
            let (watch, pool, updater) = updater_of(&engines);
            let host = Host::Remote {
                updater: Box::new(updater),
            };
            let routes = Arc::new(RouteTable::default());
            let (swaps, swapped) = mpsc::channel(16);
            let options = load::tests::options(folder.path(), store, u64::MAX);
            Two {
                follower: Follower::new(options, host, routes.clone(), swaps).unwrap(),
                routes,
                engines,
                pool,
                keys,
                _watch: watch,
                _swaps: swapped,
                _folder: folder,
            }
        }

        /// Half of the users have `base`, the others `champion`.
        async fn apply(&mut self, epoch: i64, base: i64, champion: i64) -> anyhow::Result<()> {
            let arms = [("base", 0.5), ("champion", 0.5)];
            let mut document = assignment(epoch, &[("base", base), ("champion", champion)], &arms);
            for target in document.aliases.values_mut() {
                target.root = version(target.version).1.root();
            }
            self.follower.apply(document, &self.keys).await
        }

        async fn until(&self, what: impl Fn(&Placement) -> bool) {
            while !self.pool.placement(&what) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }

        /// Asks for an alias, again and again, until the guard is dropped. Counts answers and failures.
        fn load(&self, alias: &str) -> (tokio_util::sync::DropGuard, tokio::task::JoinHandle<(usize, usize)>) {
            let stop = CancellationToken::new();
            let (stopped, routes, pool) = (stop.clone(), self.routes.clone(), self.pool.clone());
            let model = format!("demo@{alias}");
            let task = tokio::spawn(async move {
                let (mut answered, mut failed) = (0, 0);
                while !stopped.is_cancelled() {
                    let version = routes.route("demo", &model, "user").unwrap().version;
                    // as the API does
                    if let Some(available) = pool.unavailable(&version) {
                        drop(version);
                        available.await;
                        continue;
                    }
                    match last(&pool, version).await {
                        Some(SampleEvent::Finished(_)) => answered += 1,
                        Some(SampleEvent::VersionGone) => {}
                        _ => failed += 1,
                    }
                }
                (answered, failed)
            });
            (stop.drop_guard(), task)
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_release_and_a_rollback_reach_users_while_another_arm_has_no_engine() {
        let mut two = Two::new(&[1, 2, 3]).await;
        while two.apply(1, 1, 2).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        two.until(|engines| engines.servers(1) == 1 && engines.servers(2) == 1)
            .await;
        let dead = two.pool.placement(|engines| engines.serving(1).next().unwrap());
        two.engines[dead].set(Faults {
            dead: true,
            ..Faults::default()
        });
        two.until(|engines| engines.servers(1) == 0).await;
        let (asking, asked) = two.load("champion");
        two.apply(2, 1, 3).await.unwrap();
        assert_eq!(two.routes.epoch(), 2);
        two.until(|engines| engines.servers(3) == 1).await;
        // and back
        two.apply(3, 1, 2).await.unwrap();
        two.until(|engines| engines.servers(2) == 1).await;
        drop(asking);
        let (answered, failed) = asked.await.unwrap();
        assert!(answered > 0 && failed == 0, "{answered} answered, {failed} failed");
        // the other arm gets its engine when one answers again
        two.engines[dead].set(Faults::default());
        while two.pool.placement(|engines| engines.servers(1)) == 0 {
            let _ = two.follower.loader.mend(&two.routes.shares()).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_engine_that_hangs_keeps_up_only_its_own_arm() {
        let mut two = Two::new(&[1, 2, 3, 4]).await;
        while two.apply(1, 1, 2).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let hung = two.pool.placement(|engines| engines.serving(2).next().unwrap());
        two.engines[hung].set(Faults {
            hangs: true,
            ..Faults::default()
        });
        // the champion's engine never answers the command to pause
        two.apply(2, 1, 3).await.unwrap();
        assert_eq!(two.routes.epoch(), 2);
        assert_eq!(two.pool.placement(|engines| engines.promised_to(3)), Some(hung));
        // nobody waits for it: both arms go back to version 1, which the other one has
        two.apply(3, 1, 1).await.unwrap();
        let (asking, asked) = two.load("champion");
        tokio::time::sleep(Duration::from_millis(200)).await;
        drop(asking);
        let (answered, failed) = asked.await.unwrap();
        assert!(answered > 0 && failed == 0, "{answered} answered, {failed} failed");
        // and a version that is needed takes it as soon as it answers, whatever it was told before
        two.engines[hung].set(Faults::default());
        two.apply(4, 1, 4).await.unwrap();
        two.until(|engines| engines.servers(1) == 1 && engines.servers(4) == 1)
            .await;
    }

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
