//! `springtide dlq replay`: choose, count, ask, put back.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use ingest::event::{Event, now};
use ingest::kafka::Topics;
use ingest::log::{Entry, Letter, Letters, Place, Producer, replay};

use super::Filter;
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(false).args(["places", "reason"]))]
pub struct Args {
    /// Letters as `list` prints them: 0/17 0/18.
    #[arg(value_name = "PARTITION/OFFSET")]
    places: Vec<Place>,
    /// With --reason: every letter of that reason that was not replayed yet.
    #[command(flatten)]
    filter: Filter,
    /// Without asking.
    #[arg(long)]
    yes: bool,
    /// Put this event back in the one letter's place: a file with the JSON that `show` prints, repaired.
    #[arg(long, value_name = "FILE", conflicts_with = "reason")]
    edit: Option<PathBuf>,
}

/// What would happen.
#[derive(Debug, Default)]
struct Plan {
    chosen: HashSet<Place>,
    /// Letters by the topic that they go back to.
    topics: BTreeMap<String, u64>,
    /// Letters that cannot go back, by reason.
    left: BTreeMap<String, u64>,
    /// How many of the chosen ones went back before.
    again: usize,
}

pub async fn run(letters: &Letters, args: &Args, config: &Config) -> anyhow::Result<()> {
    if let Some(file) = &args.edit {
        let [place] = args.places[..] else {
            bail!("--edit repairs one letter: name it, and no other");
        };
        return repaired(letters, place, file, args.yes, config).await;
    }
    ensure!(
        args.places.is_empty() || args.filter.since.is_none() && args.filter.topic.is_none(),
        "--since and --topic choose among the letters of a --reason; leave them out where letters are named"
    );
    let topics = config.kafka_client().topics();
    let plan = plan(letters, args, config, &topics).await?;
    for (why, count) in &plan.left {
        eprintln!("left where they are: {count}, for {why}");
    }
    if plan.chosen.is_empty() {
        eprintln!("nothing to put back");
        return Ok(());
    }
    eprintln!("{}", plan.summary());
    if !(args.yes || confirmed()?) {
        eprintln!("nothing was put back");
        return Ok(());
    }
    let producer = Producer::new(&config.kafka_client()).context("connect to the log")?;
    let mut done = 0_usize;
    let mut scan = letters.scan()?;
    while let Some(entry) = scan.next().await? {
        let Entry::Letter(letter) = entry else { continue };
        if !plan.chosen.contains(&letter.place) {
            continue;
        }
        let place = letter.place;
        let to = producer.replay(&letter).await.with_context(|| {
            format!(
                "letter {place} ({done} of {} were put back before it)",
                plan.chosen.len()
            )
        })?;
        done += 1;
        println!("{place} → {}/{}/{}", to.topic, to.partition, to.offset);
    }
    ensure!(
        done == plan.chosen.len(),
        "{} of the letters are gone since they were counted: retention has removed them",
        plan.chosen.len() - done
    );
    Ok(())
}

async fn plan(letters: &Letters, args: &Args, config: &Config, topics: &Topics) -> anyhow::Result<Plan> {
    for place in &args.places {
        letters.check(*place)?;
    }
    let named: HashSet<Place> = args.places.iter().copied().collect();
    let mut candidates: HashMap<Place, String> = HashMap::new();
    let mut found = HashSet::new();
    let mut replayed = HashSet::new();
    let mut plan = Plan::default();
    let mut scan = letters.scan()?;
    while let Some(entry) = scan.next().await? {
        let letter = match entry {
            Entry::Letter(letter) => letter,
            Entry::Replayed(note) => {
                replayed.insert(note.letter);
                continue;
            }
        };
        let wanted = if named.is_empty() {
            args.filter.takes(&letter, config)
        } else {
            named.contains(&letter.place)
        };
        if !wanted {
            continue;
        }
        found.insert(letter.place);
        match letter.destination(topics) {
            Ok(topic) => {
                candidates.insert(letter.place, topic.to_owned());
            }
            Err(error) => *plan.left.entry(error.to_string()).or_default() += 1,
        }
    }
    if let Some(place) = named.difference(&found).min() {
        bail!("{place} is no letter: `springtide dlq list` prints the letters that there are");
    }
    for (place, topic) in candidates {
        let before = replayed.contains(&place);
        // Whoever names a letter wants it again; whoever names a reason wants the rest.
        if before && named.is_empty() {
            continue;
        }
        plan.again += usize::from(before);
        *plan.topics.entry(topic).or_default() += 1;
        plan.chosen.insert(place);
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
            again => format!(" ({again} of them not for the first time)"),
        };
        format!(
            "letters to put back: {}{again}, {}. What the tables hold already stays as it is.",
            self.chosen.len(),
            topics.join(", ")
        )
    }
}

async fn repaired(letters: &Letters, place: Place, file: &Path, yes: bool, config: &Config) -> anyhow::Result<()> {
    let letter = letters.letter(place).await?;
    let json = tokio::fs::read(file)
        .await
        .with_context(|| format!("read {}", file.display()))?;
    let event = replay::repaired(&config.ingest, &json, now()).with_context(|| {
        format!(
            "{} is not an event that would be stored; start from `springtide dlq show {place} > FILE`",
            file.display()
        )
    })?;
    let client = config.kafka_client();
    for warning in renamed(&letter, &event) {
        eprintln!("{warning}");
    }
    eprintln!(
        "a repaired event goes to {}: {} {} {}",
        client.topics().of(&event),
        event.kind(),
        event.source,
        event.id
    );
    if !(yes || confirmed()?) {
        eprintln!("nothing was put back");
        return Ok(());
    }
    let producer = Producer::new(&client).context("connect to the log")?;
    let to = producer.replay_repaired(&letter, &event).await?;
    println!("{place} → {}/{}/{}", to.topic, to.partition, to.offset);
    Ok(())
}

/// What changes about the event's name, for a repair that was meant to leave it alone.
fn renamed(letter: &Letter, event: &Event) -> Vec<String> {
    let Some(before) = letter.identity() else {
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

fn confirmed() -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    ensure!(
        stdin.is_terminal(),
        "nobody can be asked here: --yes puts them back without"
    );
    eprint!("Put back? [y/N] ");
    std::io::stderr().flush().context("ask")?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer).context("read the answer")?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
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
    fn letters_are_named_one_by_one_or_by_reason_and_never_both() {
        let read = |words: &[&str]| Cli::try_parse_from([&["replay"], words].concat()).map(|cli| cli.args);
        assert_eq!(read(&["0/1", "0/2"]).unwrap().places.len(), 2);
        let by_reason = read(&["--reason", "conflict", "--since", "2h", "--yes"]).unwrap();
        assert!(by_reason.yes && by_reason.filter.since.is_some());
        assert!(read(&["0/1", "--edit", "event.json"]).unwrap().edit.is_some());
        for words in [
            &[][..],
            &["--since", "2h"],
            &["0/1", "--reason", "conflict"],
            &["--reason", "conflict", "--edit", "event.json"],
            &["17"],
        ] {
            assert!(read(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_plan_says_how_many_go_where() {
        let plan = Plan {
            chosen: ["0/1", "0/2"].map(|place| place.parse().unwrap()).into(),
            topics: BTreeMap::from([("t".to_owned(), 2)]),
            left: BTreeMap::new(),
            again: 1,
        };
        let summary = plan.summary();
        assert!(
            summary.starts_with("letters to put back: 2 (1 of them not for the first time), 2 to t."),
            "{summary}"
        );
    }
}
