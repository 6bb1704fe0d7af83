//! `springtide audit`: the record of what people and keys changed. It uses the database.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use control::times::rfc3339;
use edge::audit::{self, Actor, FAULTS_MAX, Head, Row, Verified};
use serde_json::json;
use sqlx::PgPool;

use super::App;
use super::output::{Output, table};
use crate::{audited, database, private};

/// In the state folder: the last row that `verify` found in order.
pub const HEAD_FILE: &str = "audit.head";
const ROWS_MAX: i64 = 10_000;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Show who changed what, the newest first.
    ///
    /// Example: springtide audit list --action key
    List {
        /// Only this action (`key.revoke`), or actions on this kind of thing (`key`).
        #[arg(long)]
        action: Option<String>,
        /// Only changes of this id or name.
        #[arg(long)]
        subject: Option<String>,
        /// Rows to show.
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=ROWS_MAX))]
        limit: i64,
        #[command(flatten)]
        output: Output,
    },
    /// Check that no row was changed, removed or inserted, and that the audit has every key,
    /// sampler, tenant, reward definition, run and requested release as its table has it. Fails if
    /// not.
    ///
    /// It remembers the last row in the state folder. The next check also finds rows that were
    /// removed from the end, or a chain that was made anew.
    Verify {
        /// A last row that an earlier check printed, instead of the remembered one.
        #[arg(long, value_name = "ID:HASH")]
        head: Option<Head>,
        #[command(flatten)]
        output: Output,
    },
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let pool = database::connect(&app.config).await?;
        database::check_schema(&pool).await?;
        match self {
            Self::List {
                action,
                subject,
                limit,
                output,
            } => {
                let rows = audit::list(&pool, action.as_deref(), subject.as_deref(), limit).await;
                let rows = rows.context("read the audit")?;
                output.print(&rows, || page(&rows))
            }
            Self::Verify { head, output } => {
                let file = app.config.state_dir.join(HEAD_FILE);
                let noted = match head {
                    Some(head) => Some(head),
                    None => remembered(&file)?,
                };
                let found = verify(&pool, noted).await?;
                let document = json!({"head": found.head.to_string(), "rows": found.head.id, "faults": found.faults});
                output.print(&document, || match found.faults.is_empty() {
                    true => format!(
                        "{} rows, in order, as the tables say; the last is {}\n(note it outside this machine: \
                         `springtide audit verify --head` then finds what was removed since)",
                        found.head.id, found.head
                    ),
                    false => found.faults.join("\n"),
                })?;
                match found.faults.len() {
                    0 => {}
                    count @ FAULTS_MAX.. => bail!("the audit is not in order: at least {count} faults"),
                    count => bail!("the audit is not in order: {count} faults"),
                }
                if let Err(error) = remember(&file, found.head) {
                    tracing::warn!("cannot remember the last row for the next check: {error:#}");
                }
                Ok(())
            }
        }
    }
}

/// Reads everything in one snapshot: what changes meanwhile is no fault.
async fn verify(pool: &PgPool, noted: Option<Head>) -> anyhow::Result<Verified> {
    let mut snapshot = edge::database::begin_with(pool, "begin isolation level repeatable read read only")
        .await
        .context("begin")?;
    let begun = audited::has_begun(&mut snapshot).await.context("read the audit")?;
    ensure!(
        begun,
        "the audit does not say which rows are older than it: run `springtide migrate` once"
    );
    let mut found = audit::verify(&mut *snapshot, noted).await.context("read the audit")?;
    let faults = audited::faults(&mut snapshot).await;
    found
        .faults
        .extend(faults.context("compare the tables with the audit")?);
    found.faults.truncate(FAULTS_MAX);
    Ok(found)
}

fn remembered(file: &Path) -> anyhow::Result<Option<Head>> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("read {}", file.display())),
    };
    let head = text.parse().with_context(|| format!("read {}", file.display()))?;
    Ok(Some(head))
}

fn remember(file: &Path, head: Head) -> anyhow::Result<()> {
    let folder = file.parent().context("no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    private::replace(file, &format!("{head}\n"), None)
}

fn page(rows: &[Row]) -> String {
    let row = |row: &Row| {
        let key = row.key_id.map_or_else(String::new, |key| format!(" (key {key})"));
        [
            row.id.to_string(),
            rfc3339(row.at),
            format!("{}{key}", row.actor),
            row.tenant.clone(),
            row.action.clone(),
            row.subject.clone(),
            row.detail.clone(),
            row.reason.clone(),
        ]
    };
    let columns = [">id", "at", "who", "tenant", "action", "subject", "detail", "reason"];
    table(columns, rows.iter().map(row))
}

/// The person at the command line. Access to the database is what authorizes them.
pub struct CommandLine(String);

impl CommandLine {
    pub fn new() -> Self {
        let uid = nix::unistd::getuid();
        let user = nix::unistd::User::from_uid(uid).ok().flatten();
        let user = user.map_or_else(|| uid.to_string(), |user| user.name);
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self(format!("{user}@{}", host.trim()))
    }

    pub fn actor(&self) -> Actor<'_> {
        Actor {
            key: None,
            name: &self.0,
        }
    }
}
