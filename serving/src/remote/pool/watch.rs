//! Looks, every second, at requests that waited too long and at whether engines answer.

use super::{CHECK_INTERVAL, Pool, State, Waiting, Work};
use crate::engine::{SampleEvent, TrafficClass};
use std::time::Instant;
use tokio_util::sync::CancellationToken;

impl Pool {
    /// Removes requests that waited too long, and watches the engines, until `shutdown`.
    pub async fn watch(self, shutdown: CancellationToken) {
        let queue = async {
            loop {
                self.remove_expired();
                self.remove_gone();
                // the slots of an engine grow with time
                self.start_waiting();
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
        };
        // one that does not answer delays no other
        let engines = (0..self.shared.clients.len()).map(async |engine| {
            loop {
                self.check(engine).await;
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
        });
        tokio::select! {
            () = shutdown.cancelled() => {}
            ((), _) = futures::future::join(queue, futures::future::join_all(engines)) => {}
        }
    }

    /// Removes requests whose version is in force no more and that no engine holds.
    pub(super) fn remove_gone(&self) {
        let mut work = self.lock();
        let Work {
            queue,
            placement,
            in_force: Some(in_force),
            ..
        } = &mut *work
        else {
            return;
        };
        let removed = queue.remove_if(|Waiting { request, .. }| {
            let serial = request.version.serial;
            !in_force.contains(&serial) && !placement.holds(serial)
        });
        drop(work);
        for Waiting { request, .. } in removed {
            metrics::counter!("springtide_choices_rerouted_total").increment(1);
            let _ = request.events.try_send(SampleEvent::VersionGone);
        }
    }

    fn remove_expired(&self) {
        let wait_max = self.shared.config.queue_wait_max;
        let removed = self.lock().queue.remove_if(|Waiting { request, .. }| {
            let expired = request.class == TrafficClass::Production && request.submitted.elapsed() > wait_max;
            expired || request.events.is_closed()
        });
        for Waiting { request, .. } in removed {
            let reason = match request.events.try_send(SampleEvent::Expired) {
                Ok(()) => "springtide_choices_expired_total",
                Err(_) => "springtide_choices_cancelled_total",
            };
            metrics::counter!(reason).increment(1);
        }
    }

    /// Whether an engine answers and still holds what was probed. A restarted one does not.
    async fn check(&self, engine: usize) {
        let before = self.state(engine);
        let answer = self.client(engine).weights_name().await;
        let mut work = self.lock();
        // the updater has it
        if work.placement.engines[engine].state != before {
            return;
        }
        let expected = work.weights[engine].as_str();
        let vouched = work.placement.engines[engine].vouched.first().copied();
        let after = match (before, &answer) {
            (State::Changing | State::Draining(_), _) => before,
            (State::Down | State::Unproven, Ok(_)) => vouched.map_or(State::Unproven, State::Serving),
            (State::Serving(_), Ok(weights)) if weights.as_deref().is_none_or(|weights| weights == expected) => before,
            (State::Serving(_), Ok(_)) => State::Unproven,
            (_, Err(_)) => State::Down,
        };
        if after == before {
            return;
        }
        work.placement.set_state(engine, after, Instant::now());
        drop(work);
        let url = self.client(engine).url();
        match answer {
            Ok(holds) => tracing::info!(engine = url, holds, ?before, ?after, "engine's state changed"),
            Err(error) => tracing::warn!(engine = url, error = format!("{error:#}"), ?before, "engine is down"),
        }
        self.state_changed();
    }
}
