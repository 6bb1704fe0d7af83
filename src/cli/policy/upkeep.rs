//! `fsck`, `gc`, `keep`, `unkeep`, `squash`: keep the store in order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use control::times;
use runs::publish::{referenced, squash};
use serde_json::json;
use store::{Finding, GcReport, Pin, SQUASH_SPANS, Severity, SquashOutcome};
use time::OffsetDateTime;

use super::StoreArgs;
use crate::cli::output::{Confirm, Output, bytes};
use crate::config::Config;
use crate::database;

/// Publishing takes less than this, and clocks differ by less.
const GRACE_MIN: Duration = Duration::from_secs(600);

/// Which versions are live.
#[derive(Debug, Clone, clap::Args)]
struct Live {
    /// Versions and objects younger than this are kept: 90s, 30m, 2h, 7d.
    #[arg(long, value_name = "AGE", default_value = "24h", value_parser = times::age)]
    grace: Duration,
    /// Number of latest assignments whose versions are kept, for aliases that go back.
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    assignments: usize,
}

impl Live {
    fn keep(&self, versions: BTreeSet<i64>) -> anyhow::Result<store::Retention> {
        Ok(store::Retention {
            grace: self.grace.try_into().context("--grace is too long")?,
            assignments: self.assignments,
            versions,
        })
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Fsck {
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    live: Live,
    /// Read and hash every object instead of comparing names and sizes only.
    #[arg(long)]
    deep: bool,
    #[command(flatten)]
    output: Output,
}

impl Fsck {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let needed = async {
            let pool = database::connect_now(config).await?;
            referenced::versions(&pool, &place.store, &place.policy).await
        };
        let (needed, unasked) = match needed.await {
            Ok(needed) => (needed, None),
            Err(error) => (BTreeSet::new(), Some(error)),
        };
        let keep = self.live.keep(needed)?;
        let mut report = place.store.fsck(&place.policy, &place.keys, &keep, self.deep).await?;
        report.findings.extend(unasked.map(|error| Finding {
            severity: Severity::Note,
            kind: "database",
            at: "the database".to_owned(),
            message: format!("it was not asked which versions lines, runs and canaries need: {error:#}"),
        }));
        self.output.print(&report, || {
            let mut text = format!(
                "{} versions, {} squashed deltas, {} assignments, {} objects ({})\n",
                report.versions,
                report.squashed_deltas,
                report.assignments,
                report.objects,
                bytes(report.object_bytes)
            );
            for (line, head) in &report.heads {
                text += &format!("{line}: version {head} is the newest\n");
            }
            for finding in &report.findings {
                let severity = match finding.severity {
                    Severity::Error => "ERROR",
                    Severity::Warning => "warning",
                    Severity::Note => "note",
                };
                text += &format!("{severity}: {}: {}\n", finding.at, finding.message);
            }
            match (report.is_healthy(), self.deep) {
                (false, _) => {}
                (true, true) => text += &format!("the store is whole: {} objects were read", report.objects_read),
                (true, false) => text += "the store is whole by names and sizes; --deep reads the objects",
            }
            text
        })?;
        if !report.is_healthy() {
            bail!("the store is NOT whole: fix what is marked ERROR");
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Gc {
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    live: Live,
    /// Only show what would be deleted.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    output: Output,
}

impl Gc {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        ensure!(
            self.live.grace >= GRACE_MIN || self.dry_run,
            "--grace is shorter than ten minutes, so versions that are being published would be deleted; give more"
        );
        let pool = database::connect(config).await.context(
            "connect to the database, which knows the versions that lines and runs need; nothing is deleted without it",
        )?;
        let needed = || async {
            let needed = referenced::versions(&pool, &place.store, &place.policy).await;
            needed.map_err(|error| store::Error::Retention(format!("{error:#}")))
        };
        let keep = self.live.keep(needed().await?)?;
        let (store, policy, keys) = (&place.store, &place.policy, &place.keys);
        let before = OffsetDateTime::now_utc() - keep.grace;
        let spent = async |live: &BTreeSet<i64>| referenced::spent_private(&pool, store, policy, live, before).await;
        if !self.dry_run && !self.confirm.yes {
            let preview = store.collect_garbage(policy, keys, &keep, true, needed).await?;
            eprint!("{}", text(&preview, &spent(&preview.live).await?, true));
            self.confirm.ask("Delete them?")?;
        }
        let done = store.collect_garbage(policy, keys, &keep, self.dry_run, needed).await?;
        let spent = spent(&done.live).await?;
        for key in spent.keys().filter(|_| !self.dry_run) {
            store.delete_private(key).await?;
        }
        let deleted = done.deleted.iter();
        let document = json!({
            "dry_run": self.dry_run,
            "deleted": deleted.map(|(digest, size)| json!({"digest": digest, "size_bytes": size})).collect::<Vec<_>>(),
            "deleted_bytes": done.deleted_bytes(),
            "folds": done.squashed_deltas.iter().map(|(from, to)| json!({"from": from, "to": to})).collect::<Vec<_>>(),
            "given_up": done.unreachable,
            "needed": done.live,
            "put_back": done.restored,
            "rebuilt_parts": done.rebuilt_parts,
            "run_files": spent,
            "kept_objects": done.kept_objects,
            "kept_bytes": done.kept_bytes,
        });
        self.output.print(&document, || text(&done, &spent, self.dry_run))
    }
}

fn text(done: &GcReport, spent: &BTreeMap<String, u64>, dry_run: bool) -> String {
    let (deleted, lost) = match dry_run {
        true => ("would be deleted", "could no longer be rebuilt"),
        false => ("deleted", "can no longer be rebuilt"),
    };
    let mut text = format!(
        "{} objects ({}) and {} squashed deltas {deleted}\n",
        done.deleted.len(),
        bytes(done.deleted_bytes()),
        done.squashed_deltas.len()
    );
    text += &format!(
        "{} files of runs ({}) {deleted}: states that nothing continues from, reports of shards\n",
        spent.len(),
        bytes(spent.values().sum())
    );
    text += &format!(
        "{} versions {lost}: {}\n",
        done.unreachable.len(),
        ranges(&done.unreachable)
    );
    text += &format!("{} versions are live: {}\n", done.live.len(), ranges(&done.live));
    text += &format!("{} objects ({}) stay\n", done.kept_objects, bytes(done.kept_bytes));
    if !done.restored.is_empty() {
        text += &format!(
            "{} objects turned out to be needed and were restored\n",
            done.restored.len()
        );
    }
    if !done.rebuilt_parts.is_empty() {
        text += &format!(
            "{} lists of parts were missing and were made again\n",
            done.rebuilt_parts.len()
        );
    }
    text
}

/// Like `1–7, 9`.
fn ranges(serials: &BTreeSet<i64>) -> String {
    let mut ranges: Vec<(i64, i64)> = vec![];
    for &serial in serials {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == serial => *last = serial,
            _ => ranges.push((serial, serial)),
        }
    }
    let text = |(first, last): &(i64, i64)| match first == last {
        true => first.to_string(),
        false => format!("{first}–{last}"),
    };
    match ranges.is_empty() {
        true => "none".into(),
        false => ranges.iter().map(text).collect::<Vec<_>>().join(", "),
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Keep {
    /// Number of the version, or an alias such as champion.
    version: String,
    /// Why; kept for audits.
    #[arg(long)]
    reason: String,
    #[command(flatten)]
    at: StoreArgs,
}

impl Keep {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        // A version that cannot be rebuilt any more cannot be kept.
        let path = place.store.reachable(&place.policy, version, &place.keys).await;
        path.with_context(|| format!("find a path to version {version}"))?;
        let pin = Pin {
            version,
            reason: self.reason,
            created_at: OffsetDateTime::now_utc(),
        };
        match place.store.pin(&place.policy, &pin).await? {
            true => println!("gc keeps version {version} until `springtide policy unkeep {version}`"),
            false => println!("version {version} was already kept; its first reason stays"),
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Unkeep {
    /// Number of the version, or an alias such as champion.
    version: String,
    #[command(flatten)]
    at: StoreArgs,
}

impl Unkeep {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        match place.store.unpin(&place.policy, version).await? {
            true => println!("gc may delete version {version} when nothing else needs it"),
            false => println!("version {version} was not kept"),
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Squash {
    /// A version; its line is squashed up to it [default: the newest version of every line].
    version: Option<String>,
    /// Steps that one delta covers; may be repeated [default: 8 and 64].
    #[arg(long = "span", value_name = "STEPS")]
    spans: Vec<u32>,
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    output: Output,
}

impl Squash {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let spans = match self.spans.is_empty() {
            true => SQUASH_SPANS.to_vec(),
            false => self.spans,
        };
        ensure!(
            spans.iter().all(|&span| span >= 2),
            "--span is less than 2; a squashed delta covers at least two steps"
        );
        let heads: BTreeSet<i64> = match &self.version {
            Some(version) => BTreeSet::from([place.serial(version).await?]),
            None => {
                let catalog = place.store.catalog(&place.policy, &place.keys).await?;
                catalog.heads().into_values().collect()
            }
        };
        let key = place.publisher_key()?;
        let mut squasher = squash::Squasher::new(&place.store, &place.policy, &key);
        let (mut created, mut document, mut text) = (0, Vec::new(), String::new());
        for head in heads {
            for attempt in squasher.squash(head, usize::MAX, &spans, &place.keys).await? {
                let (from, to) = (attempt.from, attempt.to);
                let (outcome, words) = match attempt.outcome {
                    SquashOutcome::Created(squashed) => {
                        created += 1;
                        let size = bytes(squashed.delta.size_bytes);
                        ("made", format!("{size} for {} steps", squashed.steps))
                    }
                    SquashOutcome::Exists(_) => ("exists", "exists already".to_owned()),
                    SquashOutcome::NotSmaller {
                        bytes: size,
                        steps_bytes,
                    } => (
                        "not_smaller",
                        format!("{} is not less than the steps' own {}", bytes(size), bytes(steps_bytes)),
                    ),
                };
                document.push(json!({"from": from, "to": to, "outcome": outcome}));
                text += &format!("{from} → {to}: {words}\n");
            }
        }
        self.output
            .print(&document, || text + &format!("{created} squashed deltas made"))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn consecutive_versions_are_shown_as_a_range() {
        assert_eq!(super::ranges(&[1, 2, 3, 5, 8, 9].into()), "1–3, 5, 8–9");
        assert_eq!(super::ranges(&[].into()), "none");
    }
}
