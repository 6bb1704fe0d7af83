//! `springtide dlq`: the dead-letter queue. It reads the log itself, so it works while every role
//! is down.

mod replay;
mod view;

use std::collections::{BTreeMap, VecDeque};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use ingest::log::{DlqEntry, DlqPosition, DlqReader, DlqRecord};
use serde_json::Value;
use time::OffsetDateTime;

use super::App;
use super::output::{self, Output};
use super::values::since;
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
    /// Replaying a record twice is harmless: tenant, source and id identify an event, and resending
    /// it is a no-op.
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

/// Selects records.
#[derive(Debug, Clone, clap::Args)]
pub struct Filter {
    /// Only records that were put aside for this: undecodable, invalid, conflict, orphan or
    /// refused.
    #[arg(long, alias = "reason")]
    cause: Option<String>,
    /// Only from this topic: its full name, or `generation` or `feedback`.
    #[arg(long)]
    topic: Option<String>,
    /// Only since this time (2026-11-21T03:00:00Z) or age (90s, 30m, 2h, 7d).
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<OffsetDateTime>,
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
        let replayed = queue.replayed().await?;
        let mut newest = VecDeque::new();
        let mut matching = 0_usize;
        let mut causes: BTreeMap<String, u64> = BTreeMap::new();
        let mut scan = queue.scan()?;
        while let Some(entry) = scan.next().await? {
            let DlqEntry::Record(record) = entry else { continue };
            *causes.entry(record.reason.clone()).or_default() += 1;
            let note = replayed.get(&record.position);
            if !self.filter.matches(&record, config) || self.open && note.is_some() {
                continue;
            }
            matching += 1;
            newest.push_back((record.time, record.position, view::row(&record, note)));
            if newest.len() > self.limit {
                newest.pop_front();
            }
        }
        if matching == 0 {
            eprintln!("{}", no_match(queue.topic(), &causes));
        } else if matching > newest.len() {
            eprintln!(
                "{matching} records; these are the newest {}, --limit shows more",
                newest.len()
            );
        }
        newest
            .make_contiguous()
            .sort_by_key(|(time, position, _)| (*time, *position));
        let rows: Vec<Value> = newest.into_iter().map(|(.., row)| row).collect();
        self.output.print(&rows, || view::page(&rows))
    }
}

/// Says why nothing is listed, and what there is.
fn no_match(topic: &str, causes: &BTreeMap<String, u64>) -> String {
    if causes.is_empty() {
        return format!("{topic} holds no records");
    }
    let known: Vec<_> = causes.iter().map(|(cause, count)| format!("{count} {cause}")).collect();
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

impl Filter {
    fn matches(&self, record: &DlqRecord, config: &Config) -> bool {
        let from = record.from.as_ref().map(|from| from.topic.as_str());
        let topic = self.topic.as_deref().is_none_or(|topic| {
            let short = format!("{}.{topic}.v1", config.kafka.topic_prefix);
            from.is_some_and(|from| from == topic || from == short)
        });
        let cause = self.cause.as_ref().is_none_or(|cause| *cause == record.reason);
        // A record without a time may be of any time.
        let since = match (self.since, record.time) {
            (Some(since), Some(time)) => time >= since,
            _ => true,
        };
        topic && cause && since
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ingest::log::Position;
    use time::macros::datetime;

    fn record() -> DlqRecord {
        DlqRecord {
            position: "0/17".parse().unwrap(),
            time: Some(datetime!(2026-11-21 03:00 UTC)),
            reason: "invalid".to_owned(),
            detail: String::new(),
            from: Some(Position {
                topic: "springtide.feedback.v1".to_owned(),
                partition: 1,
                offset: 2,
            }),
            content_type: "application/protobuf".to_owned(),
            trace: Vec::new(),
            key: Vec::new(),
            value: Vec::new(),
            shortened: None,
        }
    }

    #[test]
    fn a_filter_matches_what_it_names() {
        let filter = |cause: Option<&str>, topic: Option<&str>, since| Filter {
            cause: cause.map(str::to_owned),
            topic: topic.map(str::to_owned),
            since,
        };
        let matches = |filter: Filter| filter.matches(&record(), &Config::default());
        assert!(matches(filter(None, None, None)));
        assert!(matches(filter(Some("invalid"), Some("feedback"), None)));
        assert!(matches(filter(None, Some("springtide.feedback.v1"), None)));
        assert!(matches(filter(None, None, Some(datetime!(2026-11-21 03:00 UTC)))));
        assert!(!matches(filter(Some("conflict"), None, None)));
        assert!(!matches(filter(None, Some("generation"), None)));
        assert!(!matches(filter(None, None, Some(datetime!(2026-11-21 03:01 UTC)))));
    }

    #[test]
    fn an_empty_list_says_what_the_topic_holds() {
        assert_eq!(no_match("t", &BTreeMap::new()), "t holds no records");
        let causes = BTreeMap::from([("conflict".to_owned(), 2), ("invalid".to_owned(), 1)]);
        assert_eq!(
            no_match("t", &causes),
            "no record matches; t holds 2 conflict, 1 invalid"
        );
    }
}
