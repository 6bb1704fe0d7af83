//! Puts records back into their topics: first a plan, for whoever decides, then the sending.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Instant;

use anyhow::Context;
use event_log::{DlqEntry, DlqPosition, DlqReader, DlqRecord, Position, Producer, Topics};

use super::Filter;

/// Which records are meant.
#[derive(Debug, Clone)]
pub enum Selected {
    /// These, also if they were put back before.
    Named(BTreeSet<DlqPosition>),
    /// Those that match and were not put back yet.
    Open(Filter),
}

/// What would happen.
#[derive(Debug, Default)]
pub struct Plan<'t> {
    /// The records that go back, and the topic of each.
    pub chosen: BTreeMap<DlqPosition, &'t str>,
    /// Those that cannot go back, by why.
    pub left: BTreeMap<String, Vec<DlqPosition>>,
    /// Those that were named and do not exist.
    pub missing: BTreeSet<DlqPosition>,
    /// How many of the chosen ones were put back before.
    pub again: usize,
}

/// Reads the queue once, and sends nothing.
pub async fn plan<'t>(
    queue: &DlqReader,
    selected: &Selected,
    topics: &'t Topics,
    topic_prefix: &str,
) -> anyhow::Result<Plan<'t>> {
    let mut plan = Plan::new(selected);
    let mut replayed = HashSet::new();
    let mut scan = queue.scan()?;
    while let Some(entry) = scan.next().await? {
        match entry {
            DlqEntry::Record(record) => plan.look_at(&record, selected, topics, topic_prefix),
            DlqEntry::Replayed(note) => {
                replayed.insert(note.record);
            }
        }
    }
    plan.finish(&replayed, selected);
    Ok(plan)
}

impl<'t> Plan<'t> {
    fn new(selected: &Selected) -> Self {
        let missing = match selected {
            Selected::Named(named) => named.clone(),
            Selected::Open(_) => BTreeSet::new(),
        };
        Self {
            missing,
            ..Self::default()
        }
    }

    fn look_at(&mut self, record: &DlqRecord, selected: &Selected, topics: &'t Topics, topic_prefix: &str) {
        let is_meant = match selected {
            Selected::Named(_) => self.missing.remove(&record.position),
            Selected::Open(filter) => filter.matches(record, topic_prefix),
        };
        if !is_meant {
            return;
        }
        match record.destination(topics) {
            Ok(topic) => {
                self.chosen.insert(record.position, topic);
            }
            Err(error) => self.left.entry(error.to_string()).or_default().push(record.position),
        }
    }

    /// A record that is named is sent again; a filter selects only the rest.
    fn finish(&mut self, replayed: &HashSet<DlqPosition>, selected: &Selected) {
        match selected {
            Selected::Named(_) => {
                let again = self.chosen.keys().filter(|position| replayed.contains(*position));
                self.again = again.count();
            }
            Selected::Open(_) => self.chosen.retain(|position, _| !replayed.contains(position)),
        }
    }
}

/// Puts the chosen records back, in the order of the queue, and takes them out of `chosen`. What
/// remains there is gone from the queue, or was not sent before `until`. Tells each new position.
///
/// # Errors
/// Stops at the first record that the log does not take.
pub async fn send(
    queue: &DlqReader,
    producer: &Producer,
    chosen: &mut BTreeSet<DlqPosition>,
    until: Option<Instant>,
    mut tell: impl FnMut(DlqPosition, Position),
) -> anyhow::Result<()> {
    let count = chosen.len();
    let mut scan = queue.scan()?;
    while !chosen.is_empty() && until.is_none_or(|until| Instant::now() < until) {
        let Some(entry) = scan.next().await? else { break };
        let DlqEntry::Record(record) = entry else { continue };
        let position = record.position;
        if !chosen.contains(&position) {
            continue;
        }
        let done = count - chosen.len();
        let sent = producer.replay(&record).await;
        let to = sent.with_context(|| format!("put back record {position} (after {done} of {count} records)"))?;
        chosen.remove(&position);
        tell(position, to);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use event_log::ClientOptions;

    use super::*;
    use crate::dead_letters::tests::record;

    fn at(position: &str) -> DlqPosition {
        position.parse().unwrap()
    }

    /// 0/1 and 0/2 are invalid and 0/3 is in conflict; 0/4 was made from a row. 0/2 was put back before.
    fn planned<'t>(selected: &Selected, topics: &'t Topics) -> Plan<'t> {
        let mut plan = Plan::new(selected);
        for (position, reason) in [
            ("0/1", "invalid"),
            ("0/2", "invalid"),
            ("0/3", "conflict"),
            ("0/4", "invalid"),
        ] {
            let mut record = DlqRecord {
                position: at(position),
                reason: reason.to_owned(),
                ..record()
            };
            if position == "0/4" {
                record.from = None;
            }
            plan.look_at(&record, selected, topics, "springtide");
        }
        plan.finish(&HashSet::from([at("0/2")]), selected);
        plan
    }

    #[test]
    fn a_filter_selects_those_that_were_not_put_back() {
        let topics = ClientOptions::default().topics();
        let filter = Filter {
            cause: Some("invalid".to_owned()),
            ..Filter::default()
        };
        let plan = planned(&Selected::Open(filter), &topics);
        assert_eq!(plan.chosen, BTreeMap::from([(at("0/1"), topics.feedback.as_str())]));
        assert_eq!(plan.left.values().next().unwrap(), &[at("0/4")]);
        assert!(plan.missing.is_empty() && plan.again == 0);
    }

    #[test]
    fn named_records_are_put_back_again_and_unknown_ones_are_missing() {
        let topics = ClientOptions::default().topics();
        let named = ["0/2", "0/3", "0/9"].map(at).into();
        let plan = planned(&Selected::Named(named), &topics);
        assert_eq!(plan.chosen.keys().copied().collect::<Vec<_>>(), [at("0/2"), at("0/3")]);
        assert_eq!((plan.again, plan.left.len()), (1, 0));
        assert_eq!(plan.missing, BTreeSet::from([at("0/9")]));
    }
}
