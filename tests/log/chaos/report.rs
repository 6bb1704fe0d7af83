//! The report: a table for people and JSON for comparison.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::Size;
use super::audit::Audit;
use super::driver::Kill;
use super::ledger::Ledger;
use fixture::write_figures;

/// A pause within this time after a kill is attributed to it.
const REACH: Duration = Duration::from_secs(20);

pub struct Report<'a> {
    pub size: &'a Size,
    pub took: Duration,
    pub settled_in: Duration,
    pub kills: &'a [Kill],
    pub ledger: &'a Ledger,
    /// The logs of all ingest processes.
    pub logs: String,
    pub ended_by_itself: Vec<String>,
    pub audit: &'a Audit,
}

impl Report<'_> {
    /// Prints the table and writes `target/chaos/ingest.json`.
    pub fn publish(&self) {
        let file = write_figures("ingest.json", &self.document());
        print!("{}", self.table());
        println!("{:<44}{}", "full report", file.display());
    }

    fn by_kind(&self) -> BTreeMap<&'static str, (usize, Duration)> {
        let mut kinds: BTreeMap<_, (usize, Duration)> = BTreeMap::new();
        for kill in self.kills {
            let (count, longest) = kinds.entry(kill.kind.name()).or_default();
            *count += 1;
            *longest = (*longest).max(self.ledger.longest_gap(kill.at, REACH));
        }
        kinds
    }

    fn in_commit(&self) -> usize {
        self.kills.iter().filter(|kill| kill.in_commit).count()
    }

    fn count_in_logs(&self, text: &str) -> usize {
        self.logs.matches(text).count()
    }

    fn document(&self) -> Value {
        let kinds = self.by_kind().into_iter().map(|(kind, (count, longest))| {
            let row = json!({"count": count, "longest_without_ack_seconds": longest.as_secs_f64()});
            (kind.to_owned(), row)
        });
        json!({
            "seed": self.size.seed,
            "seconds": self.took.as_secs_f64(),
            "settled_seconds": self.settled_in.as_secs_f64(),
            "events_per_second_offered": self.size.rate,
            "kills": kinds.collect::<Map<String, Value>>(),
            "kills_in_the_very_commit": self.in_commit(),
            "acks": self.ledger.acks(),
            "retried": self.ledger.retries(),
            "fenced": self.count_in_logs("was claimed by another sink"),
            "sink_started_over": self.count_in_logs("sink restarts from the offsets"),
            "ingest_ended_by_itself": self.ended_by_itself,
            "audit": self.audit,
        })
    }

    fn table(&self) -> String {
        let mut table = format!("\n{:<44}{:>10}{:>26}\n", "killed", "times", "longest without an ack");
        for (kind, (count, longest)) in self.by_kind() {
            table += &format!("{kind:<44}{count:>10}{:>24.1} s\n", longest.as_secs_f64());
        }
        let audit = self.audit;
        let sum = |numbers: &BTreeMap<&str, u64>| numbers.values().sum::<u64>();
        let mut row = |name: &str, number: u64| table += &format!("{name:<44}{number:>10}\n");
        row("  of these during a commit", self.in_commit() as u64);
        row("acks", self.ledger.acks());
        row("events acknowledged", audit.acked_events);
        row("rows", sum(&audit.rows));
        let count = |number: i64| u64::try_from(number).unwrap_or_default();
        row("sessions that closed", count(audit.episodes));
        row("turns that came after the close", count(audit.late_turns));
        row("generations misjudged", count(audit.generations_misjudged));
        row(
            "sessions split, misplaced or misjudged",
            count(audit.split + audit.turns_misplaced + audit.sessions_misjudged),
        );
        row("lost", audit.lost + audit.poison_lost);
        row("doubled", audit.doubled);
        row("refused as conflicts (409)", audit.conflicts_refused);
        for (reason, count) in &audit.dead {
            row(&format!("dead: {reason}"), *count);
        }
        row("dead letters repeated", audit.dead_repeated);
        for (why, count) in self.ledger.retries() {
            row(&format!("sent again: {why}"), count);
        }
        row(
            "stale sinks fenced",
            self.count_in_logs("was claimed by another sink") as u64,
        );
        row("ingest ended by itself", self.ended_by_itself.len() as u64);
        let seconds = (self.took.as_secs_f64(), self.settled_in.as_secs_f64());
        table += &format!(
            "{:<44}{:>8.0} s, settled in {:.0} s, seed {}\n",
            "took", seconds.0, seconds.1, self.size.seed
        );
        table
    }
}
