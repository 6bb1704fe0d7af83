//! `springtide dlq …`: what could not be stored, why, and how to put it back. Talks to the log itself, so that it works
//! while every role is down; what a letter is and how it goes back is the crate `ingest`'s.

mod replay;
mod view;

use std::collections::{BTreeMap, VecDeque};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use ingest::log::{Entry, Letter, Letters, Place};
use time::OffsetDateTime;

use crate::config::Config;
use crate::moment::since;

/// Dead letters: records that could not be stored, with their reason.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// One line for each letter: where it lies, when, why, where it came from, what it is called. Never what it holds.
    List(List),
    /// A whole letter: its event as JSON on standard output (or its bytes in hexadecimal), the rest beside it. May hold
    /// user text.
    Show {
        /// As `list` prints it: 0/17.
        #[arg(value_name = "PARTITION/OFFSET")]
        place: Place,
        /// Write the record's bytes as they are to this file, which must not exist yet.
        #[arg(long, value_name = "FILE")]
        raw: Option<PathBuf>,
    },
    /// Put letters back where they came from, as they were or repaired. Twice is harmless: tenant, source and id identify
    /// an event, and the same again changes nothing.
    Replay(replay::Args),
}

#[derive(Debug, Clone, clap::Args)]
pub struct List {
    #[command(flatten)]
    filter: Filter,
    /// Only letters that were not replayed.
    #[arg(long)]
    open: bool,
    /// How many to print at most, the newest.
    #[arg(long, default_value_t = 200, value_name = "N")]
    limit: usize,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

/// Which letters.
#[derive(Debug, Clone, clap::Args)]
pub struct Filter {
    /// Only this reason: undecodable, invalid, conflict, orphan, refused.
    #[arg(long)]
    reason: Option<String>,
    /// Only from this topic: its name, or `generation` or `feedback`.
    #[arg(long)]
    topic: Option<String>,
    /// Only letters since then: 2026-11-21T03:00:00Z, or so long ago: 90s, 30m, 2h, 7d.
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<OffsetDateTime>,
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<()> {
    let letters = Letters::open(&config.kafka_client()).await?;
    match command {
        Command::List(what) => list(&letters, &what, config).await,
        Command::Show { place, raw } => show(&letters, place, raw.as_deref()).await,
        Command::Replay(args) => replay::run(&letters, &args, config).await,
    }
}

async fn list(letters: &Letters, what: &List, config: &Config) -> anyhow::Result<()> {
    let replayed = letters.replayed().await?;
    let mut newest: VecDeque<view::Row> = VecDeque::new();
    let mut matching = 0_usize;
    let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
    let mut scan = letters.scan()?;
    while let Some(entry) = scan.next().await? {
        let Entry::Letter(letter) = entry else { continue };
        *reasons.entry(letter.reason.clone()).or_default() += 1;
        let note = replayed.get(&letter.place);
        if !what.filter.takes(&letter, config) || what.open && note.is_some() {
            continue;
        }
        matching += 1;
        newest.push_back(view::Row::new(&letter, note));
        if newest.len() > what.limit {
            newest.pop_front();
        }
    }
    if matching == 0 {
        eprintln!("{}", nothing(letters.topic(), &reasons));
    } else if matching > newest.len() {
        eprintln!(
            "{matching} letters; the newest {} of them (more with --limit):",
            newest.len()
        );
    }
    print!("{}", view::page(newest.make_contiguous(), what.json)?);
    Ok(())
}

/// Why nothing is listed, with what there is.
fn nothing(topic: &str, reasons: &BTreeMap<String, u64>) -> String {
    if reasons.is_empty() {
        return format!("{topic} holds no letters");
    }
    let there: Vec<_> = reasons
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"))
        .collect();
    format!("no letter is like that; {topic} holds {}", there.join(", "))
}

async fn show(letters: &Letters, place: Place, raw: Option<&Path>) -> anyhow::Result<()> {
    let letter = letters.letter(place).await?;
    eprint!("{}", view::heading(&letter));
    if let Some(file) = raw {
        write_new(file, &letter.value)?;
        eprintln!("its {} bytes are in {}", letter.value.len(), file.display());
        return Ok(());
    }
    println!("{}", view::content(&letter)?);
    Ok(())
}

/// A new file that only its owner reads.
fn write_new(file: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut opened = options
        .open(file)
        .with_context(|| format!("create {}", file.display()))?;
    opened
        .write_all(bytes)
        .with_context(|| format!("write {}", file.display()))
}

impl Filter {
    fn takes(&self, letter: &Letter, config: &Config) -> bool {
        let from = letter.from.as_ref().map(|from| from.topic.as_str());
        let topic = self.topic.as_deref().is_none_or(|topic| {
            let short = format!("{}.{topic}.v1", config.kafka.topic_prefix);
            from.is_some_and(|from| from == topic || from == short)
        });
        let reason = self.reason.as_ref().is_none_or(|reason| *reason == letter.reason);
        // A letter without a time could be of any time.
        let since = match (self.since, letter.time) {
            (Some(since), Some(time)) => time >= since,
            _ => true,
        };
        topic && reason && since
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ingest::log::Position;
    use time::macros::datetime;

    fn letter() -> Letter {
        Letter {
            place: "0/17".parse().unwrap(),
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
        }
    }

    #[test]
    fn a_filter_takes_what_it_names() {
        let filter = |reason: Option<&str>, topic: Option<&str>, since| Filter {
            reason: reason.map(str::to_owned),
            topic: topic.map(str::to_owned),
            since,
        };
        let takes = |filter: Filter| filter.takes(&letter(), &Config::default());
        assert!(takes(filter(None, None, None)));
        assert!(takes(filter(Some("invalid"), Some("feedback"), None)));
        assert!(takes(filter(None, Some("springtide.feedback.v1"), None)));
        assert!(takes(filter(None, None, Some(datetime!(2026-11-21 03:00 UTC)))));
        assert!(!takes(filter(Some("conflict"), None, None)));
        assert!(!takes(filter(None, Some("generation"), None)));
        assert!(!takes(filter(None, None, Some(datetime!(2026-11-21 03:01 UTC)))));
    }

    #[test]
    fn where_nothing_matches_what_there_is_is_told() {
        assert_eq!(nothing("t", &BTreeMap::new()), "t holds no letters");
        let reasons = BTreeMap::from([("conflict".to_owned(), 2), ("invalid".to_owned(), 1)]);
        assert_eq!(
            nothing("t", &reasons),
            "no letter is like that; t holds 2 conflict, 1 invalid"
        );
    }
}
