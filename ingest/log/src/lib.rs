//! What everybody speaks who writes or reads events: the events and their wire forms, the client of
//! the log (Kafka: topics, producer, announcements, dead-letter queue), payloads, feedback tokens,
//! leases, and how a judge is asked.
//!
//! No database and no configuration of ingest: a change of how rows are made rebuilds nothing here.
//! The sink, which reads events, has a consumer of its own in `ingest`.
//!
//! Modules import only from those to their left:
//!
//! ```text
//!  event ◄ payload, feedback_token, lease, judge ◄ kafka ◄ producer, dlq, announcements
//! ```

pub mod announcements;
mod delivery;
mod dlq;
pub mod event;
pub mod feedback_token;
mod headers;
pub mod judge;
pub mod kafka;
pub mod lease;
pub mod payload;
mod producer;
pub mod unreadable;

pub use dlq::reader::{DlqReader, Scan};
pub use dlq::record::{DlqEntry, DlqPosition, DlqRecord, Identity, Original, ReplayNote};
pub use dlq::{DeadLetter, Reason, replay};
pub use kafka::{ClientOptions, Topics, ensure_topics};
pub use producer::{PRODUCER_SETTINGS, Producer};

pub use event::proto::Announcement;

use event::Invalid;

/// The position of a record in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
}

/// Why a record was not written to the log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The event breaks a rule and will never be accepted.
    #[error("the event is not valid")]
    Invalid(#[from] Invalid),
    /// The broker does not accept records of this size.
    #[error("the record is too large: {size_bytes} bytes")]
    TooLarge { size_bytes: usize },
    /// The broker refuses this record whenever it is sent, whatever its size.
    #[error("the log refuses the record")]
    Refused(#[source] rdkafka::error::KafkaError),
    /// Too many records are unacknowledged.
    #[error("too many records wait for the log")]
    Full,
    /// Not acknowledged in time, or refused by the broker. The record may still arrive, so send the
    /// same event again.
    #[error("the log did not acknowledge")]
    Unavailable(#[source] rdkafka::error::KafkaError),
}
