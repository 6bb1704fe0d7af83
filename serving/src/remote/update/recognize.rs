//! Engines that take no weights from us. Those that name their weights, because a follower changes
//! them, serve the version of that name after a probe. Others that return token ids serve whatever
//! version a probe proves, and are probed again and again, because they do not say when they change.
//! Those that do not serve the version of the alias that the configuration names, on the operator's word.

use super::{Updater, change, weights_name};
use crate::engine::LoadedVersion;
use crate::remote::placement::State;
use artifact::assignment::Target;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two probes of an engine that takes no weights.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// After a probe that no version passed.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

impl Updater {
    /// Notes which versions engines without token ids are said to hold soon, beside those before.
    pub fn vouch(&self, aliases: &BTreeMap<String, Target>) {
        for engine in 0..self.held.len() {
            let alias = self.pool.client(engine).vouched_alias();
            if let Some(target) = alias.and_then(|alias| aliases.get(alias)) {
                self.pool.vouch(engine, target.version);
            }
        }
    }

    /// Requests are routed to these versions from now on. Waiting ones of versions that no engine holds
    /// are routed again.
    pub fn in_force(&self, aliases: &BTreeMap<String, Target>, serials: BTreeSet<i64>) {
        for engine in 0..self.held.len() {
            if let Some(alias) = self.pool.client(engine).vouched_alias() {
                let target = aliases.get(alias);
                self.pool.vouch_only(engine, target.map(|target| target.version));
            }
        }
        self.pool.in_force(serials);
    }

    /// Whether an engine that takes no weights holds the version. Probes those that serve none, or one
    /// that is not in `kept`.
    pub(super) async fn recognize_anywhere(
        &mut self,
        version: &Arc<LoadedVersion>,
        kept: &BTreeSet<i64>,
    ) -> anyhow::Result<bool> {
        for engine in self.unchangeable() {
            let free = match self.pool.state(engine) {
                State::Unproven => true,
                State::Serving(serial) => !kept.contains(&serial),
                State::Down | State::Draining(_) | State::Changing => false,
            };
            let named = free && self.may_hold(engine, version, self.name(engine).await.as_deref());
            if !named {
                continue;
            }
            self.check_provable(version)?;
            if self.holds(engine, version).await {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Probes the engines that take no weights and whose time has come against these versions: first the
    /// one that an engine served. One that holds none of them gets no traffic.
    pub async fn recognize(&mut self, candidates: &[Arc<LoadedVersion>]) {
        for engine in self.unchangeable() {
            let before = match self.pool.state(engine) {
                // whoever watches it notices another name
                State::Serving(_) if self.pool.client(engine).names_weights() => continue,
                State::Serving(serial) => Some(serial),
                State::Unproven => None,
                State::Down | State::Draining(_) | State::Changing => continue,
            };
            if Instant::now() < self.probe_at[engine] {
                continue;
            }
            let is_old = |version: &&Arc<LoadedVersion>| Some(version.serial) == before;
            let old = candidates.iter().filter(is_old);
            let others = candidates.iter().filter(|one| !is_old(one));
            let mut holds = false;
            let name = self.name(engine).await;
            for version in old.chain(others) {
                if !self.may_hold(engine, version, name.as_deref()) {
                    continue;
                }
                holds = self.holds(engine, version).await;
                if holds {
                    break;
                }
            }
            if !holds {
                self.probe_at[engine] = Instant::now() + RETRY_INTERVAL;
                if before.is_some() {
                    let engine = self.pool.client(engine).url();
                    tracing::warn!(engine, "holds no version that is in force; out of traffic");
                }
                self.pool.set_state(engine, State::Unproven, None);
            }
        }
    }

    /// What an engine calls its weights, if it does.
    async fn name(&self, engine: usize) -> Option<String> {
        self.pool.client(engine).weights_name().await.ok().flatten()
    }

    /// Whether a probe is worth the time: the engine names no weights, or those of this version.
    fn may_hold(&self, engine: usize, version: &LoadedVersion, name: Option<&str>) -> bool {
        !self.pool.client(engine).names_weights() || name.is_some_and(|name| name == weights_name(version))
    }

    /// Engines that take no weights, but return token ids.
    fn unchangeable(&self) -> Vec<usize> {
        let engines = 0..self.held.len();
        let unchangeable = |&engine: &usize| {
            let client = self.pool.client(engine);
            !client.takes_weights() && !client.takes_adapters() && client.vouched_alias().is_none()
        };
        engines.filter(unchangeable).collect()
    }

    /// Probes an engine; if it holds the version, it serves it from now on.
    async fn holds(&mut self, engine: usize, version: &Arc<LoadedVersion>) -> bool {
        let url = self.pool.client(engine).url().to_owned();
        match change::probe(&self.pool, &self.options, engine, version, &weights_name(version)).await {
            Ok(probed) => {
                self.probe_at[engine] = Instant::now() + PROBE_INTERVAL;
                let served = State::Serving(version.serial);
                if self.pool.state(engine) != served {
                    tracing::info!(
                        engine = url,
                        version = version.serial,
                        probed_tokens = probed.tokens,
                        largest_difference = probed.largest_difference,
                        "engine holds version"
                    );
                }
                metrics::counter!("springtide_remote_probed_tokens_total").increment(probed.tokens as u64);
                let name = weights_name(version);
                self.pool.set_state(engine, served, Some(&name));
                true
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::debug!(
                    engine = url,
                    version = version.serial,
                    error,
                    "engine does not hold version"
                );
                false
            }
        }
    }
}
