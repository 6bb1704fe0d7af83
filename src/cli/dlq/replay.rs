//! `springtide dlq replay`: selects records, counts them, asks, and puts them back.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use control::dead_letters::Filter;
use control::dead_letters::replay::{self, Plan, Selected};
use event_log::event::{Event, now};
use event_log::{DlqPosition, DlqReader, DlqRecord, Producer};
use ingest::repaired;

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
        for position in &self.positions {
            queue.check(*position)?;
        }
        let client = config.kafka_client()?;
        let topics = client.topics();
        let selected = match self.positions.is_empty() {
            true => Selected::Open(self.filter),
            false => Selected::Named(self.positions.into_iter().collect()),
        };
        let plan = replay::plan(queue, &selected, &topics, &client.topic_prefix).await?;
        if let Some(position) = plan.missing.first() {
            bail!("there is no record {position}: `springtide dlq list` prints those there are");
        }
        for (why, records) in &plan.left {
            eprintln!("{} cannot be put back: {why}", records.len());
        }
        if plan.chosen.is_empty() {
            eprintln!("nothing to put back");
            return Ok(());
        }
        eprintln!("{}", summary(&plan));
        self.confirm.ask("Put them back?")?;
        let producer = Producer::new(&client).context("connect to the log")?;
        let mut chosen: BTreeSet<DlqPosition> = plan.chosen.into_keys().collect();
        replay::send(queue, &producer, &mut chosen, None, |position, to| {
            println!("{position} → {}/{}/{}", to.topic, to.partition, to.offset);
        })
        .await?;
        ensure!(
            chosen.is_empty(),
            "retention deleted {} of the records after they were counted",
            chosen.len()
        );
        Ok(())
    }
}

fn summary(plan: &Plan<'_>) -> String {
    let mut topics: BTreeMap<&str, usize> = BTreeMap::new();
    for topic in plan.chosen.values().copied() {
        *topics.entry(topic).or_default() += 1;
    }
    let topics: Vec<_> = topics
        .iter()
        .map(|(topic, count)| format!("{count} to {topic}"))
        .collect();
    let again = match plan.again {
        0 => String::new(),
        again => format!(" ({again} of them again)"),
    };
    format!(
        "records to put back: {}{again}, {}. Rows that are already stored do not change.",
        plan.chosen.len(),
        topics.join(", ")
    )
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
    let event = repaired(&config.ingest, &json, now()).with_context(|| {
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
            chosen: ["0/1", "0/2"].map(|position| (position.parse().unwrap(), "t")).into(),
            again: 1,
            ..Plan::default()
        };
        let summary = summary(&plan);
        assert!(
            summary.starts_with("records to put back: 2 (1 of them again), 2 to t."),
            "{summary}"
        );
    }
}
