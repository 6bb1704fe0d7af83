//! Whether the log takes answers. While it does not, one answer in a while tries it, and the others
//! need not wait for its timeout.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time between two tries of a log that is away.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What the last answers met.
#[derive(Debug, Default)]
pub struct LogState {
    /// `None`: the log took the last answer.
    retry_at: Mutex<Option<Instant>>,
}

impl LogState {
    /// Whether this answer should try the log.
    pub fn try_append(&self, now: Instant) -> bool {
        match &mut *self.lock() {
            Some(retry_at) if now < *retry_at => false,
            Some(retry_at) => {
                *retry_at = now + RETRY_INTERVAL;
                true
            }
            None => true,
        }
    }

    /// Notes what came of a try.
    pub fn appended(&self, taken: bool, now: Instant) {
        *self.lock() = (!taken).then_some(now + RETRY_INTERVAL);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.retry_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_away_is_tried_once_in_an_interval() {
        let (state, start) = (LogState::default(), Instant::now());
        assert!(state.try_append(start) && state.try_append(start));
        state.appended(false, start);
        assert!(!state.try_append(start + RETRY_INTERVAL / 2));
        let later = start + RETRY_INTERVAL;
        assert!(state.try_append(later));
        assert!(!state.try_append(later), "that try is under way");
        state.appended(true, later);
        assert!(state.try_append(later) && state.try_append(later));
    }
}
