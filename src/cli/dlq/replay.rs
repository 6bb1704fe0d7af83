//! `springtide dlq replay`: selects records, counts them, asks, and puts them back.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use ingest::event::{Event, now};
use ingest::log::Topics;
use ingest::log::{DlqEntry, DlqPosition, DlqReader, DlqRecord, Producer, replay};

use super::Filter;
use crate::cli::output::Confirm;
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(false).args(["positions", "cause"]))]
pub struct Args {
    /// Records as `springtide dlq list` prints them, for example 0/17 0/18.
    #[arg(value_name = "PARTITION/OFFSET")]
    positions: Vec<DlqPosition>,
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    confirm: Confirm,
    /// Send this event instead of the one record: a file with the repaired JSON that `springtide
    /// dlq show` prints.
    #[arg(long, value_name = "FILE", conflicts_with = "cause")]
    edit: Option<PathBuf>,
}

/// What would happen.
#[derive(Debug, Default)]
struct Plan {
    chosen: HashSet<DlqPosition>,
    /// Number of records per topic that they go back to.
    topics: BTreeMap<String, u64>,
    /// Number of records that cannot go back, by why.
    left: BTreeMap<String, u64>,
    /// How many of the chosen ones were replayed before.
    again: usize,
}

impl Args {
    pub async fn run(self, queue: &DlqReader, config: &Config) -> anyhow::Result<()> {
        if let Some(file) = &self.edit {
            let [position] = self.positions[..] else {
                bail!("--edit repairs one record: name exactly one");
            };
            return send_repaired(queue, position, file, self.confirm, config).await;
        }
        ensure!(
            self.positions.is_empty() || self.filter.since.is_none() && self.filter.topic.is_none(),
            "--since and --topic narrow down --cause; leave them out where records are named"
        );
        let client = config.kafka_client()?;
        let plan = plan(queue, &self, config, &client.topics()).await?;
        for (why, count) in &plan.left {
            eprintln!("{count} cannot be put back: {why}");
        }
        if plan.chosen.is_empty() {
            eprintln!("nothing to put back");
            return Ok(());
        }
        eprintln!("{}", plan.summary());
        self.confirm.ask("Put them back?")?;
        let producer = Producer::new(&client).context("connect to the log")?;
        let mut done = 0_usize;
        let mut scan = queue.scan()?;
        while let Some(entry) = scan.next().await? {
            let DlqEntry::Record(record) = entry else { continue };
            if !plan.chosen.contains(&record.position) {
                continue;
            }
            let position = record.position;
            let sent = producer.replay(&record).await;
            let to = sent.with_context(|| {
                format!(
                    "put back record {position} (after {done} of {} records)",
                    plan.chosen.len()
                )
            })?;
            done += 1;
            println!("{position} → {}/{}/{}", to.topic, to.partition, to.offset);
        }
        ensure!(
            done == plan.chosen.len(),
            "retention deleted {} of the records after they were counted",
            plan.chosen.len() - done
        );
        Ok(())
    }
}

async fn plan(queue: &DlqReader, args: &Args, config: &Config, topics: &Topics) -> anyhow::Result<Plan> {
    for position in &args.positions {
        queue.check(*position)?;
    }
    let named: HashSet<DlqPosition> = args.positions.iter().copied().collect();
    let mut candidates: HashMap<DlqPosition, String> = HashMap::new();
    let mut found = HashSet::new();
    let mut replayed = HashSet::new();
    let mut plan = Plan::default();
    let mut scan = queue.scan()?;
    while let Some(entry) = scan.next().await? {
        let record = match entry {
            DlqEntry::Record(record) => record,
            DlqEntry::Replayed(note) => {
                replayed.insert(note.record);
                continue;
            }
        };
        let wanted = if named.is_empty() {
            args.filter.matches(&record, config)
        } else {
            named.contains(&record.position)
        };
        if !wanted {
            continue;
        }
        found.insert(record.position);
        match record.destination(topics) {
            Ok(topic) => {
                candidates.insert(record.position, topic.to_owned());
            }
            Err(error) => *plan.left.entry(error.to_string()).or_default() += 1,
        }
    }
    if let Some(position) = named.difference(&found).min() {
        bail!("there is no record {position}: `springtide dlq list` prints those there are");
    }
    for (position, topic) in candidates {
        let before = replayed.contains(&position);
        // A record that is named is sent again; a cause selects only the rest.
        if before && named.is_empty() {
            continue;
        }
        plan.again += usize::from(before);
        *plan.topics.entry(topic).or_default() += 1;
        plan.chosen.insert(position);
    }
    Ok(plan)
}

impl Plan {
    fn summary(&self) -> String {
        let topics: Vec<_> = self
            .topics
            .iter()
            .map(|(topic, count)| format!("{count} to {topic}"))
            .collect();
        let again = match self.again {
            0 => String::new(),
            again => format!(" ({again} of them again)"),
        };
        format!(
            "records to put back: {}{again}, {}. Rows that are already stored do not change.",
            self.chosen.len(),
            topics.join(", ")
        )
    }
}

async fn send_repaired(
    queue: &DlqReader,
    position: DlqPosition,
    file: &Path,
    confirm: Confirm,
    config: &Config,
) -> anyhow::Result<()> {
    let record = queue.record(position).await?;
    let json = tokio::fs::read(file).await;
    let json = json.with_context(|| format!("read {}", file.display()))?;
    let event = replay::repaired(&config.ingest, &json, now()).with_context(|| {
        format!(
            "{} is not an event that would be stored; start from `springtide dlq show {position} > FILE`",
            file.display()
        )
    })?;
    let client = config.kafka_client()?;
    for warning in renamed(&record, &event) {
        eprintln!("{warning}");
    }
    eprintln!(
        "the repaired event goes to {}: {} {} {}",
        client.topics().of(&event),
        event.kind(),
        event.source,
        event.id
    );
    confirm.ask("Put it back?")?;
    let producer = Producer::new(&client).context("connect to the log")?;
    let to = producer.replay_repaired(&record, &event).await?;
    println!("{position} → {}/{}/{}", to.topic, to.partition, to.offset);
    Ok(())
}

/// Notes about changes of the event's identity, which a repair rarely intends.
fn renamed(record: &DlqRecord, event: &Event) -> Vec<String> {
    let Some(before) = record.identity() else {
        return Vec::new();
    };
    [
        ("tenant", &before.tenant, &event.tenant),
        ("source", &before.source, &event.source),
        ("id", &before.id, &event.id),
    ]
    .into_iter()
    .filter(|(_, before, after)| before != after)
    .map(|(field, before, after)| format!("note: its {field} becomes {after:?}, it was {before:?}"))
    .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn records_are_selected_by_name_or_by_cause() {
        let read = |words: &[&str]| Cli::try_parse_from([&["replay"], words].concat()).map(|cli| cli.args);
        assert_eq!(read(&["0/1", "0/2"]).unwrap().positions.len(), 2);
        let by_cause = read(&["--cause", "conflict", "--since", "2h", "--yes"]).unwrap();
        assert!(by_cause.confirm.yes && by_cause.filter.since.is_some());
        assert!(read(&["--reason", "conflict"]).is_ok()); // the old name
        assert!(read(&["0/1", "--edit", "event.json"]).unwrap().edit.is_some());
        for words in [
            &[][..],
            &["--since", "2h"],
            &["0/1", "--cause", "conflict"],
            &["--cause", "conflict", "--edit", "event.json"],
            &["17"],
        ] {
            assert!(read(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_plan_says_how_many_go_where() {
        let plan = Plan {
            chosen: ["0/1", "0/2"].map(|position| position.parse().unwrap()).into(),
            topics: BTreeMap::from([("t".to_owned(), 2)]),
            left: BTreeMap::new(),
            again: 1,
        };
        let summary = plan.summary();
        assert!(
            summary.starts_with("records to put back: 2 (1 of them again), 2 to t."),
            "{summary}"
        );
    }
}
