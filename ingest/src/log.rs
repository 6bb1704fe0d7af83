//! Into the log and out of it again as a listener: the producer of events, dead letters and announcements, the stream of
//! announcements, and the dead letters as people read and replay them. The sink, which reads events, has a consumer of
//! its own.

mod announcements;
mod dead_letter;
mod letter;
mod letters;
mod producer;
pub mod replay;

pub use announcements::Announcements;
pub use dead_letter::{DeadLetter, Position, Reason};
pub use letter::{Entry, Identity, Letter, Place, Replayed};
pub use letters::{Letters, Scan};
pub use producer::{PRODUCER_SETTINGS, Producer};

pub use crate::proto::Announcement;

use crate::event::Invalid;
use crate::spool;

/// Why something did not enter the log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The event breaks a rule; it will never be accepted.
    #[error("the event is not valid")]
    Invalid(#[from] Invalid),
    /// Larger than the broker takes.
    #[error("the record is too large: {size_bytes} bytes")]
    TooLarge { size_bytes: usize },
    /// As much as allowed is waiting for acknowledgement already.
    #[error("too many records wait for the log")]
    Full,
    /// Not acknowledged in time, or refused by the broker. It may still arrive: the same event again is a duplicate.
    #[error("the log did not acknowledge")]
    Unavailable(#[source] rdkafka::error::KafkaError),
    /// A collector's spool did not take it.
    #[error(transparent)]
    Spool(#[from] spool::Error),
}
