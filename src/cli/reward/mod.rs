//! `springtide reward`: reward definitions, and what another one would have made of stored
//! feedback. Writes nothing into the database.

mod definition;
mod line;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::Context;
use control::times::{rfc3339, since};
use ingest::offset::last_caught_up_to;
use ingest::rescore::{Reader, Request, Rescored};
use ingest::reward::{Outcome, stored};
use serde_json::json;
use sqlx::PgPool;
use time::OffsetDateTime;

use super::App;
use super::output::{Output, table};
use crate::database;
use definition::Source;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// List every version that a surface's reward definition has had.
    Definitions(Definitions),
    /// Score closed trajectories by another definition, as JSON Lines. What was trained on does not
    /// change.
    ///
    /// Example: springtide reward rescore --surface chat --definition next.toml --since 7d
    Rescore(Rescore),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Definitions {
    /// Only of this surface.
    #[arg(long)]
    surface: Option<String>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, clap::Args)]
pub struct Rescore {
    /// Surface whose trajectories are scored.
    #[arg(long)]
    surface: String,
    /// Number of a stored definition, or a TOML file such as the next springtide.toml.
    ///
    /// The file has the surface as [[ingest.surface]], and [[ingest.metric]] as needed.
    #[arg(long, value_name = "VERSION|FILE")]
    definition: Source,
    /// Only sampled since this time (2026-11-21T03:00:00Z) or age (90s, 30m, 2h, 7d).
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<OffsetDateTime>,
    /// Only sampled before this time or age.
    #[arg(long, value_name = "TIME", value_parser = since)]
    until: Option<OffsetDateTime>,
    /// Only of this tenant.
    #[arg(long)]
    tenant: Option<String>,
    /// Ignore feedback that arrived too late for this definition. By default the time of the
    /// feedback itself counts.
    #[arg(long)]
    as_seen: bool,
    /// Only trajectories whose score changes.
    #[arg(long)]
    changed: bool,
    /// Write to this file, which must not exist [default: standard output].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let pool = database::connect(&app.config).await?;
        database::check_schema(&pool).await?;
        match self {
            Self::Definitions(args) => args.run(&pool).await,
            Self::Rescore(args) => args.run(app, pool).await,
        }
    }
}

impl Definitions {
    async fn run(self, pool: &PgPool) -> anyhow::Result<()> {
        let surface = self.surface.as_deref();
        let versions = stored::versions(pool, surface).await.context("read definitions")?;
        if let (true, Some(surface)) = (versions.is_empty(), surface) {
            eprintln!("no definition of {surface:?} was ever in force");
        }
        let mut document = Vec::new();
        let mut rows = Vec::new();
        for version in versions {
            let created_at = rfc3339(version.created_at);
            rows.push([
                version.surface.clone(),
                version.version.to_string(),
                created_at.clone(),
                version.definition.to_string(),
            ]);
            document.push(json!({
                "surface": version.surface,
                "version": version.version,
                "created_at": created_at,
                "definition": version.definition,
            }));
        }
        self.output.print(&document, || {
            table(["surface", ">version", "since", "definition"], rows)
        })
    }
}

impl Rescore {
    async fn run(self, app: &App, pool: PgPool) -> anyhow::Result<()> {
        let config = &app.config;
        let rule = self.definition.rule(&pool, config, &self.surface).await?;
        let names = config.kafka_client()?.topics();
        let known = last_caught_up_to(&pool, &[names.generation, names.feedback]).await;
        let known = known.context("read how far the database is")?.with_context(|| {
            let prefix = &config.kafka.topic_prefix;
            format!("no topic of {prefix:?} (kafka.topic_prefix) was read yet: let ingest read the log first")
        })?;
        let request = Request {
            rule,
            judges: config.ingest.judges()?,
            since: self.since,
            until: self.until,
            tenant: self.tenant,
            as_seen: self.as_seen,
            known: known - time::Duration::seconds_f64(config.ingest.close_grace_seconds),
        };
        let mut reader = Reader::new(pool, request).await?;
        let mut out: Box<dyn Write> = match self.out {
            None => Box::new(io::stdout().lock()),
            Some(file) => {
                let created = File::create_new(&file).with_context(|| format!("create {}", file.display()))?;
                Box::new(BufWriter::new(created))
            }
        };
        let mut tally = Tally::default();
        loop {
            let page = reader.next().await?;
            if page.is_empty() {
                break;
            }
            for rescored in &page {
                let changed = tally.add(rescored);
                let Some(outcome) = &rescored.outcome else { continue };
                if self.changed && !changed {
                    continue;
                }
                writeln!(out, "{}", line::line(rescored, outcome)).context("write a line")?;
            }
        }
        out.flush().context("write the last lines")?;
        eprintln!("{tally}");
        Ok(())
    }
}

/// The summary for people.
#[derive(Default)]
struct Tally {
    rewarded: u64,
    rewards: f64,
    censored: BTreeMap<&'static str, u64>,
    changed: u64,
    open: u64,
    cut: u64,
}

impl Tally {
    /// Returns whether the score changes. Counts an episode once.
    fn add(&mut self, rescored: &Rescored) -> bool {
        let Some(outcome) = &rescored.outcome else {
            let left_out = if rescored.is_cut { &mut self.cut } else { &mut self.open };
            *left_out += u64::from(!rescored.repeats);
            return false;
        };
        let changed = line::changed(rescored, outcome);
        if rescored.repeats {
            return changed;
        }
        match outcome {
            Outcome::Rewarded { reward, .. } => {
                self.rewarded += 1;
                self.rewards += reward;
            }
            Outcome::Censored { code } => *self.censored.entry(*code).or_default() += 1,
        }
        self.changed += u64::from(changed);
        changed
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let censored: u64 = self.censored.values().sum();
        write!(
            f,
            "{} trajectories: {} rewarded",
            self.rewarded + censored,
            self.rewarded
        )?;
        if self.rewarded > 0 {
            write!(f, " (mean {:.4})", self.rewards / self.rewarded as f64)?;
        }
        write!(f, ", {censored} censored")?;
        if censored > 0 {
            let codes = self.censored.iter().map(|(code, count)| format!("{count} {code}"));
            write!(f, " ({})", codes.collect::<Vec<_>>().join(", "))?;
        }
        write!(f, "; {} differ from their stored score", self.changed)?;
        if self.open > 0 {
            write!(
                f,
                "\nleft out: {} whose horizon is not over by this definition",
                self.open
            )?;
        }
        if self.cut > 0 {
            write!(f, "\nleft out: {} episodes of which turns have expired", self.cut)?;
        }
        Ok(())
    }
}
