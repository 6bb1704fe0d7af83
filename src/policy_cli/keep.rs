//! `fsck`, `gc`, `pin`, `unpin`, `fold`: keeping the store in order.

use std::process::ExitCode;

use anyhow::{Context, ensure};
use policy::sign::SigningKey;
use policy::store::{self, Folded, Keep, SPANS, Severity};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use trainer::publish::{Copies, Publisher};
use trainer::upkeep;

use super::{At, print_json, size};
use crate::config::Config;
use crate::moment;
use crate::roles::database;

/// The key that whoever publishes signs with.
pub(super) const PUBLISHER_KEY: &str = "trainer";

/// Which versions are needed.
#[derive(Debug, Clone, clap::Args)]
struct Needed {
    /// Whatever is younger is kept: `90s`, `30m`, `2h`, `7d`.
    #[arg(long, value_name = "AGE", default_value = "24h", value_parser = moment::age)]
    grace: Duration,
    /// How many of the latest assignments count: the versions that aliases may go back to.
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    assignments: usize,
}

impl Needed {
    fn keep(&self, versions: BTreeSet<i64>) -> anyhow::Result<Keep> {
        Ok(Keep {
            grace: self.grace.try_into().context("the grace time is too long")?,
            assignments: self.assignments,
            versions,
        })
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Fsck {
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    needed: Needed,
    /// Read and hash every object, not only look at names and sizes.
    #[arg(long)]
    deep: bool,
    /// For programs.
    #[arg(long)]
    json: bool,
}

impl Fsck {
    /// Fails where something is broken that is needed.
    pub async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let place = self.at.open(config).await?;
        let keep = self.needed.keep(BTreeSet::new())?;
        let report = place.store.fsck(&place.policy, &place.keys, &keep, self.deep).await?;
        if self.json {
            print_json(&report)?;
        } else {
            println!(
                "{} versions, {} folds, {} assignments, {} objects ({})",
                report.versions,
                report.folds,
                report.assignments,
                report.objects,
                size::bytes(report.object_bytes)
            );
            for (line, head) in &report.heads {
                println!("{line}: version {head} is the newest");
            }
            for finding in &report.findings {
                let severity = match finding.severity {
                    Severity::Error => "ERROR",
                    Severity::Warning => "warning",
                    Severity::Note => "note",
                };
                println!("{severity}: {}: {}", finding.at, finding.message);
            }
            match (report.is_whole(), self.deep) {
                (false, _) => println!("the store is NOT whole"),
                (true, true) => println!("the store is whole: {} objects were read", report.objects_read),
                (true, false) => println!("the store is whole, as far as names and sizes tell: --deep reads the bytes"),
            }
        }
        Ok(match report.is_whole() {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        })
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Gc {
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    needed: Needed,
    /// Only say what would be deleted.
    #[arg(long)]
    dry_run: bool,
    /// For programs.
    #[arg(long)]
    json: bool,
}

/// Publications take less, and clocks differ by less.
const GRACE_MIN: Duration = Duration::from_secs(600);

impl Gc {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        ensure!(
            self.needed.grace >= GRACE_MIN || self.dry_run,
            "--grace is shorter than ten minutes: what is being published would be taken for garbage; give more"
        );
        let pool = database::connect(config).await.context(
            "reach the database, which knows the lines' heads and what runs stand on: nothing is deleted without it",
        )?;
        let needed = || async {
            let needed = upkeep::needed(&pool, &place.store, &place.policy).await;
            needed.map_err(|error| store::Error::Needed(format!("{error:#}")))
        };
        let keep = self.needed.keep(needed().await?)?;
        let done = place
            .store
            .collect(&place.policy, &place.keys, &keep, self.dry_run, needed)
            .await?;
        if self.json {
            return print_json(&json!({
                "dry_run": self.dry_run,
                "deleted": done.deleted.iter().map(|(digest, size)| json!({"digest": digest, "size_bytes": size})).collect::<Vec<_>>(),
                "deleted_bytes": done.deleted_bytes(),
                "folds": done.folds.iter().map(|(from, to)| json!({"from": from, "to": to})).collect::<Vec<_>>(),
                "given_up": done.given_up,
                "needed": done.live,
                "put_back": done.put_back,
                "kept_objects": done.kept_objects,
                "kept_bytes": done.kept_bytes,
            }));
        }
        let (would, now) = match self.dry_run {
            true => ("would be deleted", "could not be put together any longer"),
            false => ("deleted", "cannot be put together any longer"),
        };
        println!(
            "{} objects ({}) and {} folds {would}",
            done.deleted.len(),
            size::bytes(done.deleted_bytes()),
            done.folds.len()
        );
        println!("{} versions {now}: {}", done.given_up.len(), ranges(&done.given_up));
        println!("{} versions are needed: {}", done.live.len(), ranges(&done.live));
        println!("{} objects ({}) stay", done.kept_objects, size::bytes(done.kept_bytes));
        if !done.put_back.is_empty() {
            println!(
                "{} objects turned out to be needed and were put back",
                done.put_back.len()
            );
        }
        Ok(())
    }
}

/// `1–7, 9`.
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
pub struct Pin {
    /// Serial, or an alias.
    version: String,
    /// Why, for whoever finds it.
    #[arg(long)]
    reason: String,
    #[command(flatten)]
    at: At,
}

impl Pin {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        // what cannot be reached any longer cannot be kept
        let path = place.store.reachable(&place.policy, version, &place.keys).await;
        path.with_context(|| format!("find a way to version {version}"))?;
        let pin = store::Pin {
            version,
            reason: self.reason,
            created_at: OffsetDateTime::now_utc(),
        };
        match place.store.pin(&place.policy, &pin).await? {
            true => println!("version {version} is kept until it is unpinned"),
            false => println!("version {version} was pinned before; its first reason stays"),
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Unpin {
    /// Serial, or an alias.
    version: String,
    #[command(flatten)]
    at: At,
}

impl Unpin {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        match place.store.unpin(&place.policy, version).await? {
            true => println!("version {version} is no longer pinned"),
            false => println!("version {version} was not pinned"),
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Fold {
    /// The version whose line is folded; default: the newest of every line.
    version: Option<String>,
    /// Steps that a fold stands for; may be given more than once. Default: 8 and 64.
    #[arg(long = "span", value_name = "STEPS")]
    spans: Vec<u32>,
    #[command(flatten)]
    at: At,
}

impl Fold {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let spans = match self.spans.is_empty() {
            true => SPANS.to_vec(),
            false => self.spans,
        };
        ensure!(
            spans.iter().all(|&span| span >= 2),
            "--span is less than 2: a fold stands for at least two steps"
        );
        let heads: BTreeSet<i64> = match &self.version {
            Some(version) => BTreeSet::from([place.serial(version).await?]),
            None => {
                let catalog = place.store.catalog(&place.policy, &place.keys).await?;
                catalog.heads().into_values().collect()
            }
        };
        let key = SigningKey::load_or_create(&place.keys_dir, PUBLISHER_KEY).context("load the signing key")?;
        let mut folder = upkeep::Folder::new(&place.store, &place.policy, &key, &place.keys);
        let mut made = 0;
        for head in heads {
            for attempt in folder.fold(head, usize::MAX, &spans).await? {
                let (from, to) = (attempt.from, attempt.to);
                match attempt.folded {
                    Folded::Made(fold) => {
                        made += 1;
                        println!(
                            "{from} → {to}: {} for {} steps",
                            size::bytes(fold.delta.size_bytes),
                            fold.steps
                        );
                    }
                    Folded::There(_) => println!("{from} → {to}: there already"),
                    Folded::NotWorth { bytes, steps_bytes } => println!(
                        "{from} → {to}: {} would not save anything over the steps' own {}",
                        size::bytes(bytes),
                        size::bytes(steps_bytes)
                    ),
                }
            }
        }
        println!("{made} folds made");
        Ok(())
    }
}

/// Publishes for a person at the terminal.
pub(super) async fn publisher(config: &Config, at: &At) -> anyhow::Result<Publisher> {
    let place = at.open(config).await?;
    let pool = database::connect(config).await?;
    database::check_schema(&pool).await?;
    Ok(Publisher {
        pool,
        store: place.store,
        key: Arc::new(SigningKey::load_or_create(&place.keys_dir, PUBLISHER_KEY).context("load the signing key")?),
        trusted: Arc::new(place.keys),
        announce: None,
        policy: place.policy,
        image_every: config.trainer.image_every,
        checkpoints_kept: config.trainer.checkpoints_kept,
        copies: Copies::new(&config.policy.quantised),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn serials_in_a_row_are_told_as_a_range() {
        assert_eq!(super::ranges(&[1, 2, 3, 5, 8, 9].into()), "1–3, 5, 8–9");
        assert_eq!(super::ranges(&[].into()), "none");
    }
}
