//! The dead-letter queue, for `springtide dlq` and the control API: which records there are, and
//! putting them back. It uses the log alone.

pub mod letter;
pub mod replay;

use std::collections::BTreeMap;

use event_log::{DlqEntry, DlqReader, DlqRecord};
use serde::Serialize;
use time::OffsetDateTime;

use crate::times::since;

pub use letter::Letter;

/// Selects records.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Filter {
    /// Only records that were put aside for this: undecodable, invalid, conflict, orphan or
    /// refused.
    #[arg(long)]
    pub cause: Option<String>,
    /// Only from this topic: its full name, or `generation` or `feedback`.
    #[arg(long)]
    pub topic: Option<String>,
    /// Only since this time (2026-11-21T03:00:00Z) or age (90s, 30m, 2h, 7d).
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub since: Option<OffsetDateTime>,
}

/// The number of records of one cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    pub all: u64,
    /// Those that were not put back yet.
    pub open: u64,
}

/// A part of the queue.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Listed {
    /// The newest ones that match, newest first. Without what they hold.
    pub records: Vec<Letter>,
    /// How many match.
    pub matching: usize,
    /// Of all that were read, by cause.
    pub causes: BTreeMap<String, Count>,
    /// Whether the queue has older records, which were not read.
    pub truncated: bool,
}

impl Filter {
    pub fn matches(&self, record: &DlqRecord, topic_prefix: &str) -> bool {
        let from = record.from.as_ref().map(|from| from.topic.as_str());
        let topic = self.topic.as_deref().is_none_or(|topic| {
            let short = format!("{topic_prefix}.{topic}.v1");
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

/// The newest records that match, at most `limit`. `open`: only those that were not put back yet.
pub async fn list(
    queue: &DlqReader,
    filter: &Filter,
    open: bool,
    limit: usize,
    topic_prefix: &str,
) -> anyhow::Result<Listed> {
    let replayed = queue.replayed().await?;
    let mut listed = Listed {
        truncated: queue.is_truncated(),
        ..Listed::default()
    };
    let mut newest = BTreeMap::new();
    let mut scan = queue.scan()?;
    while let Some(entry) = scan.next().await? {
        let DlqEntry::Record(record) = entry else { continue };
        let note = replayed.get(&record.position);
        let count = listed.causes.entry(letter::short(&record.reason)).or_default();
        count.all += 1;
        count.open += u64::from(note.is_none());
        if !filter.matches(&record, topic_prefix) || open && note.is_some() {
            continue;
        }
        listed.matching += 1;
        newest.insert((record.time, record.position), Letter::new(&record, note));
        if newest.len() > limit {
            newest.pop_first();
        }
    }
    listed.records = newest.into_values().rev().collect();
    Ok(listed)
}

#[cfg(test)]
pub(crate) mod tests {
    use event_log::Position;
    use time::macros::datetime;

    use super::*;

    pub fn record() -> DlqRecord {
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
        let matches = |filter: Filter| filter.matches(&record(), "springtide");
        assert!(matches(filter(None, None, None)));
        assert!(matches(filter(Some("invalid"), Some("feedback"), None)));
        assert!(matches(filter(None, Some("springtide.feedback.v1"), None)));
        assert!(matches(filter(None, None, Some(datetime!(2026-11-21 03:00 UTC)))));
        assert!(!matches(filter(Some("conflict"), None, None)));
        assert!(!matches(filter(None, Some("generation"), None)));
        assert!(!matches(filter(None, None, Some(datetime!(2026-11-21 03:01 UTC)))));
    }
}
