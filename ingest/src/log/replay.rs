//! Dead letters back to where they came from: the record as it was, or one repaired event in its place, and then a note on
//! the topic of dead letters that says so. A crash between the two leaves the letter unmarked; replaying it again is
//! harmless, because (tenant, source, id) identifies an event.

use time::OffsetDateTime;

use super::letter::{EDITED, Letter, REPLAYED};
use super::producer::{Headers, Producer};
use super::{Error as LogError, Position};
use crate::event::Event;
use crate::kafka::Topics;
use crate::options::Options;
use crate::rules::Rules;

/// On a replayed record: `topic/partition/offset` of the letter that it was.
pub const REPLAYED_FROM: &str = "springtide-replayed-from";

/// Why a letter is not put back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A copy of a row: its bytes were never on a topic.
    #[error(
        "the letter was made from a row that the tables hold: send the generation that it waits for, \
         or put a repaired event in its place"
    )]
    FromRow,
    /// Springtide's sink does not read the topic it came from.
    #[error("the letter came from the topic {topic:?}, which nobody reads here: is kafka.topic_prefix right?")]
    ForeignTopic { topic: String },
    #[error("the record was not put back; try again, twice is harmless")]
    NotSent(#[source] LogError),
    #[error("the record was put back and the note about it was not; replay it again to mark it, twice is harmless")]
    NotNoted(#[source] LogError),
}

impl Letter {
    /// The topic that the record goes back to.
    pub fn destination<'a>(&self, topics: &'a Topics) -> Result<&'a str, Error> {
        let from = self.from.as_ref().ok_or(Error::FromRow)?;
        let own = [&topics.generation, &topics.feedback];
        let topic = own.into_iter().find(|topic| **topic == from.topic);
        topic.map(String::as_str).ok_or_else(|| Error::ForeignTopic {
            topic: from.topic.clone(),
        })
    }
}

/// A repaired event as a person wrote it, in the canonical JSON; under the rules that the sink will apply to it.
pub fn repaired(options: &Options, json: &[u8], now: OffsetDateTime) -> anyhow::Result<Event> {
    let event = Event::decode_json(json)?;
    let skew = time::Duration::seconds_f64(options.clock_skew_seconds_max);
    Rules::new(options.metrics()?, skew).check(&event, now)?;
    Ok(event)
}

impl Producer {
    /// Puts the letter's record back as it was, with its key, content type and trace, and notes that. Returns where the
    /// record stands.
    pub async fn replay(&self, letter: &Letter) -> Result<Position, Error> {
        let topic = letter.destination(&self.topics)?;
        let mut headers = match letter.event() {
            Ok(event) => Headers::of(&event),
            Err(_) => Headers::new(),
        };
        headers.set("content-type", &letter.content_type);
        self.put_back(letter, topic, &letter.key, &letter.value, headers, false)
            .await
    }

    /// Puts `event` into the log in the letter's place and notes that. Returns where the record stands.
    pub async fn replay_repaired(&self, letter: &Letter, event: &Event) -> Result<Position, Error> {
        let mut headers = Headers::of(event);
        headers.set("content-type", "application/protobuf");
        let topic = self.topics.of(event);
        self.put_back(letter, topic, &event.key(), &event.encode(), headers, true)
            .await
    }

    async fn put_back(
        &self,
        letter: &Letter,
        topic: &str,
        key: &[u8],
        value: &[u8],
        mut headers: Headers,
        edited: bool,
    ) -> Result<Position, Error> {
        for (key, value) in &letter.trace {
            headers.set(key, value);
        }
        headers.set(REPLAYED_FROM, &format!("{}/{}", self.topics.dlq, letter.place));
        let to = self.send(topic, key, value, headers.0).await.map_err(Error::NotSent)?;
        let mut note = Headers::new();
        note.set("reason", "replayed");
        note.set(REPLAYED, &letter.place.to_string());
        note.set("topic", &to.topic);
        note.set("partition", &to.partition.to_string());
        note.set("offset", &to.offset.to_string());
        if edited {
            note.set(EDITED, "true");
        }
        self.send(&self.topics.dlq, &letter.key, &[], note.0)
            .await
            .map_err(Error::NotNoted)?;
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kafka::ClientOptions;
    use crate::log::Place;

    fn letter(from: Option<&str>) -> Letter {
        Letter {
            place: Place {
                partition: 0,
                offset: 1,
            },
            time: None,
            reason: "invalid".to_owned(),
            detail: String::new(),
            from: from.map(|topic| Position {
                topic: topic.to_owned(),
                partition: 0,
                offset: 2,
            }),
            content_type: "application/protobuf".to_owned(),
            trace: Vec::new(),
            key: Vec::new(),
            value: Vec::new(),
        }
    }

    #[test]
    fn a_letter_goes_back_to_its_topic_and_to_no_foreign_one() {
        let topics = ClientOptions::default().topics();
        let destination = letter(Some(&topics.feedback)).destination(&topics).map(str::to_owned);
        assert_eq!(destination.unwrap(), topics.feedback);
        for foreign in ["blue.feedback.v1", &*topics.dlq, &*topics.version] {
            let error = letter(Some(foreign)).destination(&topics).unwrap_err();
            assert!(matches!(error, Error::ForeignTopic { .. }), "{error}");
        }
    }

    #[test]
    fn a_copy_of_a_row_is_not_put_back() {
        let topics = ClientOptions::default().topics();
        assert!(matches!(letter(None).destination(&topics), Err(Error::FromRow)));
    }

    #[test]
    fn a_repaired_event_keeps_the_rules_of_the_configuration_too() {
        let now = crate::event::now();
        let json = |value: &str| {
            let id = uuid::Uuid::now_v7();
            format!(
                "{{\"tenant\": \"default\", \"source\": \"s\", \"id\": \"{id}\", \"time\": \"2026-11-21T03:00:00Z\", \
                 \"feedback\": {{\"feedback_id\": \"{id}\", \"generation_id\": \"{id}\", \"metric_name\": \"accept\", \
                 \"value\": {value}}}}}"
            )
        };
        let read = |value| repaired(&Options::default(), json(value).as_bytes(), now);
        assert!(read("true").is_ok());
        let error = read("3").unwrap_err().to_string();
        assert!(error.contains("takes a boolean"), "{error}");
        assert!(read("").is_err());
    }
}
