//! `springtide dlq`: the dead-letter queue. It reads the log itself, so it works while every role
//! is down.

mod replay;
mod view;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use control::dead_letters::{self, Count, Filter, Letter};
use event_log::{DlqPosition, DlqReader};

use super::App;
use super::output::{self, Output};
use crate::config::Config;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// List records: where each one is, when and why it was put aside, its origin and its name.
    /// Never its content.
    ///
    /// Example: springtide dlq list --open --cause invalid --since 2h
    List(List),
    /// Show one record: its event as JSON (or its bytes in hexadecimal) on standard output, the
    /// rest on standard error.
    ///
    /// The output may contain user text.
    Show(Show),
    /// Put records back into their topics, as they were or repaired.
    ///
    /// Name the records, or give --cause to select all of that cause that were not replayed yet.
    /// Replaying a record twice is harmless: tenant, source, id and kind identify an event, and
    /// resending it is a no-op.
    ///
    /// Example: springtide dlq replay 0/17 --edit event.json
    Replay(replay::Args),
}

#[derive(Debug, Clone, clap::Args)]
pub struct List {
    #[command(flatten)]
    filter: Filter,
    /// Only records that were not replayed.
    #[arg(long)]
    open: bool,
    /// Largest number of records to print; the newest are printed.
    #[arg(long, default_value_t = 200, value_name = "COUNT")]
    limit: usize,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, clap::Args)]
pub struct Show {
    /// As `springtide dlq list` prints it, for example 0/17.
    #[arg(value_name = "PARTITION/OFFSET")]
    position: DlqPosition,
    /// Write the record's bytes unchanged to this file, which must not exist.
    #[arg(long, value_name = "FILE")]
    raw: Option<PathBuf>,
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let config = &app.config;
        let queue = DlqReader::open(&config.kafka_client()?).await?;
        match self {
            Self::List(args) => args.run(&queue, config).await,
            Self::Show(args) => args.run(&queue).await,
            Self::Replay(args) => args.run(&queue, config).await,
        }
    }
}

impl List {
    async fn run(self, queue: &DlqReader, config: &Config) -> anyhow::Result<()> {
        let prefix = &config.kafka.topic_prefix;
        let found = dead_letters::list(queue, &self.filter, self.open, self.limit, prefix).await?;
        let rows: Vec<Letter> = found.records.into_iter().rev().collect();
        if found.matching == 0 {
            eprintln!("{}", no_match(queue.topic(), &found.causes));
        } else if found.matching > rows.len() {
            eprintln!(
                "{} records; these are the newest {}, --limit shows more",
                found.matching,
                rows.len()
            );
        }
        self.output.print(&rows, || view::page(&rows))
    }
}

/// Says why nothing is listed, and what there is.
fn no_match(topic: &str, causes: &BTreeMap<String, Count>) -> String {
    if causes.is_empty() {
        return format!("{topic} holds no records");
    }
    let known: Vec<_> = causes
        .iter()
        .map(|(cause, count)| format!("{} {cause}", count.all))
        .collect();
    format!("no record matches; {topic} holds {}", known.join(", "))
}

impl Show {
    async fn run(self, queue: &DlqReader) -> anyhow::Result<()> {
        let record = queue.record(self.position).await?;
        eprint!("{}", view::heading(&record));
        if let Some(file) = self.raw {
            write_new(&file, &record.value)?;
            eprintln!("its {} bytes are in {}", record.value.len(), file.display());
            return Ok(());
        }
        output::print(&view::content(&record)?)
    }
}

/// Writes a new file that only its owner may read.
fn write_new(file: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let opened = options.open(file);
    let mut opened = opened.with_context(|| format!("create {}", file.display()))?;
    opened
        .write_all(bytes)
        .with_context(|| format!("write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_says_what_the_topic_holds() {
        assert_eq!(no_match("t", &BTreeMap::new()), "t holds no records");
        let of = |all| Count { all, open: 0 };
        let causes = BTreeMap::from([("conflict".to_owned(), of(2)), ("invalid".to_owned(), of(1))]);
        assert_eq!(
            no_match("t", &causes),
            "no record matches; t holds 2 conflict, 1 invalid"
        );
    }
}
