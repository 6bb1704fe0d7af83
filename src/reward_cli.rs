//! `springtide reward …`: how surfaces score, and what another definition would have made of what was said. Reads the database
//! and writes nothing into it; scoring is the crate `ingest`'s.

mod definition;
mod line;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::Context;
use ingest::rescore::{Reader, Request, Rescored};
use ingest::reward::{Outcome, stored};
use ingest::sink::last_caught_up_to;
use serde_json::json;
use sqlx::PgPool;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::config::Config;
use crate::moment::since;
use crate::roles::database;
use definition::Source;

/// How surfaces score.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Every version that a surface's definition has had, one JSON object a line.
    Definitions {
        /// Only of this surface.
        #[arg(long)]
        surface: Option<String>,
    },
    /// Score closed trajectories again by another definition, one JSON object a line. What was trained on stays what it was.
    Rescore(Rescore),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Rescore {
    /// Whose trajectories.
    #[arg(long)]
    surface: String,
    /// The number of a stored version, or a TOML file with the surface as [[ingest.surface]], and [[ingest.metric]] as needed:
    /// such as the next springtide.toml.
    #[arg(long, value_name = "VERSION|FILE")]
    definition: Source,
    /// Sampled since then: 2026-11-21T03:00:00Z, or so long ago: 90s, 30m, 2h, 7d.
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<OffsetDateTime>,
    /// Sampled before then.
    #[arg(long, value_name = "TIME", value_parser = since)]
    until: Option<OffsetDateTime>,
    /// Only of this tenant.
    #[arg(long)]
    tenant: Option<String>,
    /// Leave out what would have come too late for this definition; without, all counts by its own time.
    #[arg(long)]
    as_seen: bool,
    /// Only what is scored differently now.
    #[arg(long)]
    changed: bool,
    /// A file that does not exist yet, instead of standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<()> {
    match command {
        Command::Definitions { surface } => definitions(config, surface.as_deref()).await,
        Command::Rescore(what) => rescore(config, &what).await,
    }
}

fn writer(out: Option<&PathBuf>) -> anyhow::Result<Box<dyn Write>> {
    let Some(file) = out else {
        return Ok(Box::new(io::stdout().lock()));
    };
    let created = File::create_new(file).with_context(|| format!("create {}", file.display()))?;
    Ok(Box::new(BufWriter::new(created)))
}

async fn connect(config: &Config) -> anyhow::Result<PgPool> {
    let pool = database::connect(config).await?;
    database::check_schema(&pool).await?;
    Ok(pool)
}

async fn definitions(config: &Config, surface: Option<&str>) -> anyhow::Result<()> {
    let pool = connect(config).await?;
    let versions = stored::versions(&pool, surface).await.context("read definitions")?;
    if let (true, Some(surface)) = (versions.is_empty(), surface) {
        eprintln!("no definition of {surface:?} was ever in force");
    }
    for version in versions {
        let line = json!({
            "surface": version.surface,
            "version": version.version,
            "created_at": version.created_at.format(&Rfc3339).context("write a time")?,
            "definition": version.definition,
        });
        println!("{line}");
    }
    Ok(())
}

async fn rescore(config: &Config, what: &Rescore) -> anyhow::Result<()> {
    let pool = connect(config).await?;
    let rule = what.definition.rule(&pool, config, &what.surface).await?;
    let names = config.kafka_client().topics();
    let known = last_caught_up_to(&pool, &[names.generation, names.feedback]).await;
    let known = known.context("read how far the tables are")?.with_context(|| {
        let prefix = &config.kafka.topic_prefix;
        format!(
            "nothing was read yet from the topics of {prefix:?} (kafka.topic_prefix): let ingest read the log first"
        )
    })?;
    let request = Request {
        rule,
        since: what.since,
        until: what.until,
        tenant: what.tenant.clone(),
        as_seen: what.as_seen,
        known: known - time::Duration::seconds_f64(config.ingest.close_grace_seconds),
    };
    let mut reader = Reader::new(pool, request).await?;
    let mut out = writer(what.out.as_ref())?;
    let mut tally = Tally::default();
    loop {
        let page = reader.next().await?;
        if page.is_empty() {
            break;
        }
        for rescored in &page {
            let changed = tally.note(rescored);
            let Some(outcome) = &rescored.outcome else { continue };
            if what.changed && !changed {
                continue;
            }
            let line = serde_json::to_string(&line::Line::new(rescored, outcome))?;
            writeln!(out, "{line}").context("write")?;
        }
    }
    out.flush().context("write")?;
    eprint!("{tally}");
    Ok(())
}

/// What came of it, for people.
#[derive(Default)]
struct Tally {
    rewarded: u64,
    rewards: f64,
    censored: BTreeMap<&'static str, u64>,
    changed: u64,
    open: u64,
    inexact: u64,
}

impl Tally {
    /// Whether it is scored differently now.
    fn note(&mut self, rescored: &Rescored) -> bool {
        let Some(outcome) = &rescored.outcome else {
            self.open += 1;
            return false;
        };
        match outcome {
            Outcome::Rewarded { reward, .. } => {
                self.rewarded += 1;
                self.rewards += reward;
            }
            Outcome::Censored { code } => *self.censored.entry(*code).or_default() += 1,
        }
        self.inexact += u64::from(!rescored.exact);
        let changed = line::changed(rescored, outcome);
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
        let mut separator = " (";
        for (code, count) in &self.censored {
            write!(f, "{separator}{count} {code}")?;
            separator = ", ";
        }
        let close = if censored > 0 { ")" } else { "" };
        writeln!(f, "{close}; {} differ from what they were", self.changed)?;
        if self.open > 0 {
            writeln!(
                f,
                "left out: {} whose horizon is not over by this definition",
                self.open
            )?;
        }
        if self.inexact > 0 {
            writeln!(
                f,
                "{} were stored by an older program: their horizon is counted from their first token",
                self.inexact
            )?;
        }
        Ok(())
    }
}
