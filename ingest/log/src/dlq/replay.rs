//! Replays records of the dead-letter queue: sends the original record, or a repaired event, to its
//! topic and then a note to the queue.
//!
//! After a crash between the two, the record is not marked as replayed. Replaying it again is
//! harmless, because (tenant, source, id) and the kind identify an event.

use super::Reason;
use super::record::{DlqRecord, EDITED, REPLAYED};
use crate::event::Event;
use crate::headers::Headers;
use crate::producer::Producer;
use crate::{Error as LogError, Position, Topics};

/// Header of a replayed record: its `topic/partition/offset` on the dead-letter queue.
pub const REPLAYED_FROM: &str = "springtide-replayed-from";

/// Why a record was not replayed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was made from a row, so its bytes were never on a topic.
    #[error(
        "the record was made from feedback in the tables: send the generation that it waits for, \
         or replay a repaired event"
    )]
    FromRow,
    /// The sink does not read the topic it came from.
    #[error("the record came from the topic {topic:?}, which this sink does not read: is kafka.topic_prefix right?")]
    ForeignTopic { topic: String },
    /// The queue did not take it whole, or nobody could read it.
    #[error(
        "the queue does not hold the whole record: it is at {from} until retention removes it there; \
         replay a repaired event instead"
    )]
    Shortened { from: String },
    #[error("the record was not sent; try again, repetition is harmless")]
    NotSent(#[source] LogError),
    #[error("the record was sent, but not marked as replayed; replay it again to mark it, repetition is harmless")]
    NotNoted(#[source] LogError),
}

impl DlqRecord {
    /// The topic to which a replay sends the record.
    pub fn destination<'a>(&self, topics: &'a Topics) -> Result<&'a str, Error> {
        let from = self.from.as_ref().ok_or(Error::FromRow)?;
        if self.shortened.is_some() || self.reason == Reason::Unreadable.as_str() {
            let from = format!("{}/{}/{}", from.topic, from.partition, from.offset);
            return Err(Error::Shortened { from });
        }
        let own = [&topics.generation, &topics.feedback];
        let topic = own.into_iter().find(|topic| **topic == from.topic);
        topic.map(String::as_str).ok_or_else(|| Error::ForeignTopic {
            topic: from.topic.clone(),
        })
    }
}

impl Producer {
    /// Sends the original record with its key, content type and trace, and marks it as replayed.
    /// Returns its new position.
    pub async fn replay(&self, record: &DlqRecord) -> Result<Position, Error> {
        let topic = record.destination(&self.topics)?;
        let headers = match record.event() {
            Ok(event) => Headers::of(&event),
            Err(_) => Headers::new(),
        };
        let headers = headers.with("content-type", &record.content_type);
        self.send_replay(record, topic, &record.key, &record.value, headers, false)
            .await
    }

    /// Sends `event` instead of the original record, and marks that as replayed. Returns the new
    /// position.
    pub async fn replay_repaired(&self, record: &DlqRecord, event: &Event) -> Result<Position, Error> {
        let headers = Headers::of(event).with("content-type", "application/protobuf");
        let topic = self.topics.of(event);
        self.send_replay(record, topic, &event.key(), &event.encode(), headers, true)
            .await
    }

    async fn send_replay(
        &self,
        record: &DlqRecord,
        topic: &str,
        key: &[u8],
        value: &[u8],
        headers: Headers,
        edited: bool,
    ) -> Result<Position, Error> {
        let headers = headers
            .with_all(&record.trace)
            .with(REPLAYED_FROM, &format!("{}/{}", self.topics.dlq, record.position));
        let sent = self.send(topic, key, value, headers.inner).await;
        let to = sent.map_err(Error::NotSent)?;
        let mut note = Headers::new()
            .with("reason", "replayed")
            .with(REPLAYED, &record.position.to_string())
            .with_position(&to);
        if edited {
            note = note.with(EDITED, "true");
        }
        self.send(&self.topics.dlq, &record.key, &[], note.inner)
            .await
            .map_err(Error::NotNoted)?;
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ClientOptions, DlqPosition};

    fn record(from: Option<&str>) -> DlqRecord {
        DlqRecord {
            position: DlqPosition {
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
            shortened: None,
        }
    }

    #[test]
    fn a_record_is_only_replayed_to_a_topic_of_this_sink() {
        let topics = ClientOptions::default().topics();
        let destination = record(Some(&topics.feedback)).destination(&topics).map(str::to_owned);
        assert_eq!(destination.unwrap(), topics.feedback);
        for foreign in ["blue.feedback.v1", &*topics.dlq, &*topics.version] {
            let error = record(Some(foreign)).destination(&topics).unwrap_err();
            assert!(matches!(error, Error::ForeignTopic { .. }), "{error}");
        }
    }

    #[test]
    fn a_record_made_from_a_row_is_not_replayed() {
        let topics = ClientOptions::default().topics();
        assert!(matches!(record(None).destination(&topics), Err(Error::FromRow)));
    }

    #[test]
    fn a_shortened_record_is_not_replayed() {
        let topics = ClientOptions::default().topics();
        let shortened = DlqRecord {
            shortened: Some(crate::Original {
                value_bytes: 2_000_000,
                value_digest: String::new(),
            }),
            ..record(Some(&topics.feedback))
        };
        let error = shortened.destination(&topics).unwrap_err().to_string();
        assert!(error.contains("springtide.feedback.v1/0/2"), "{error}");
    }
}
