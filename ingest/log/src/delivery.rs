//! Acknowledgements of records that are sent together.
//!
//! The client reports every record by itself, on its own thread. The sender is woken once, when all
//! records of its batch are reported.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rdkafka::client::ClientContext;
use rdkafka::error::KafkaError;
use rdkafka::message::{DeliveryResult, Message as _};
use rdkafka::producer::ProducerContext;
use tokio::sync::oneshot;

/// The partition and offset of an acknowledged record.
pub(super) type Outcome = Result<(i32, i64), KafkaError>;

/// What the client calls.
pub(super) struct Reports;

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<Delivery>;

    fn delivery(&self, result: &DeliveryResult<'_>, delivery: Box<Delivery>) {
        delivery.report(match result {
            Ok(message) => Ok((message.partition(), message.offset())),
            Err((error, _)) => Err(error.clone()),
        });
    }
}

/// Records that are sent together. Dropped once it is dropped by their sender and every record is
/// reported.
pub(super) struct Batch {
    started: Instant,
    outcomes: Mutex<Vec<Outcome>>,
    done: Option<oneshot::Sender<Vec<Outcome>>>,
}

/// A record that waits for its acknowledgement.
pub(super) struct Delivery {
    batch: Arc<Batch>,
    index: usize,
}

impl Batch {
    /// For `records` records. The receiver gets their outcomes.
    pub(super) fn new(records: usize) -> (Arc<Self>, oneshot::Receiver<Vec<Outcome>>) {
        let (done, outcomes) = oneshot::channel();
        let batch = Self {
            started: Instant::now(),
            // Stays for a record that nobody reports.
            outcomes: Mutex::new(vec![Err(KafkaError::Canceled); records]),
            done: Some(done),
        };
        (Arc::new(batch), outcomes)
    }

    pub(super) fn delivery(self: &Arc<Self>, index: usize) -> Delivery {
        let batch = self.clone();
        Delivery { batch, index }
    }
}

impl Delivery {
    pub(super) fn report(self, outcome: Outcome) {
        let mut outcomes = self.batch.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = outcomes.get_mut(self.index) {
            *slot = outcome;
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let outcomes = self.outcomes.get_mut().unwrap_or_else(PoisonError::into_inner);
        metrics::histogram!("springtide_log_acknowledge_seconds")
            .record_many(self.started.elapsed().as_secs_f64(), outcomes.len());
        if let Some(done) = self.done.take() {
            // Fails if the request has ended.
            let _ = done.send(std::mem::take(outcomes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_done_once_its_last_record_is_reported_in_any_order() {
        let (batch, mut outcomes) = Batch::new(3);
        let [first, second, third] = [0, 1, 2].map(|index| batch.delivery(index));
        drop(batch);
        third.report(Ok((1, 7)));
        first.report(Ok((0, 5)));
        assert!(outcomes.try_recv().is_err());
        // The client forgot it.
        drop(second);
        let outcomes = outcomes.try_recv().unwrap();
        assert_eq!(outcomes, [Ok((0, 5)), Err(KafkaError::Canceled), Ok((1, 7))]);
    }

    #[test]
    fn a_batch_whose_sender_is_gone_can_still_be_reported() {
        let (batch, outcomes) = Batch::new(1);
        let only = batch.delivery(0);
        let reported = Arc::downgrade(&batch);
        drop((batch, outcomes));
        assert!(reported.upgrade().is_some(), "the client may report it later");
        only.report(Ok((0, 0)));
        assert!(reported.upgrade().is_none(), "nothing is left of it");
    }
}
