//! How fast a judge may be asked. After a fault that is not a text's, such as a restart of the
//! endpoint, the whole queue waits, and then one request at a time tries.

use std::time::Duration;

use rand::Rng;
use tokio::time::Instant;

/// The pause after the first fault in a row. It doubles with each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Short, so that trajectories still wait when the endpoint is back.
const PAUSE_MAX: Duration = Duration::from_secs(10);

pub(super) struct Pace {
    concurrency: usize,
    /// Faults since the last answer. Those of requests that ran together count once.
    failures: i32,
    works: bool,
    resumes_at: Instant,
}

impl Pace {
    pub(super) fn new(concurrency: usize) -> Self {
        Self {
            concurrency,
            failures: 0,
            works: false,
            resumes_at: Instant::now(),
        }
    }

    pub(super) fn resumes_at(&self) -> Instant {
        self.resumes_at
    }

    /// How many more texts may be worked on beside `working`, once [`resumes_at`](Self::resumes_at)
    /// is over.
    pub(super) fn room(&self, working: usize) -> usize {
        let most = if self.failures > 0 { 1 } else { self.concurrency };
        most.saturating_sub(working)
    }

    /// Whether the endpoint answered last. Then a text may itself be why it does not answer now.
    pub(super) fn works(&self) -> bool {
        self.works
    }

    pub(super) fn answered(&mut self) {
        self.failures = 0;
        self.works = true;
    }

    /// The endpoint did not answer, and wants a pause of `retry_after`.
    pub(super) fn failed(&mut self, retry_after: Option<Duration>, now: Instant) {
        self.works = false;
        if now >= self.resumes_at {
            self.resumes_at = now + doubled(PAUSE, self.failures, PAUSE_MAX);
            self.failures = self.failures.saturating_add(1);
        }
        self.resumes_at = self.resumes_at.max(now + retry_after.unwrap_or_default());
    }
}

/// `first`, doubled `times`, at most `longest`. With jitter, so that what failed together is not tried
/// together.
pub(super) fn doubled(first: Duration, times: i32, longest: Duration) -> Duration {
    let doubled = first * 2u32.saturating_pow(times.clamp(0, 16).unsigned_abs());
    doubled.min(longest).mul_f64(rand::rng().random_range(0.75..1.25))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit() {
        let (first, longest) = (Duration::from_millis(500), Duration::from_secs(60));
        for (times, seconds) in [(0, 0.5), (1, 1.0), (3, 4.0), (7, 60.0), (i32::MAX, 60.0)] {
            let pause = doubled(first, times, longest).as_secs_f64();
            assert!((seconds * 0.75..=seconds * 1.25).contains(&pause), "{times}: {pause}");
        }
    }

    #[test]
    fn an_hour_without_answers_is_one_request_at_a_time_and_an_answer_ends_it() {
        let mut pace = Pace::new(4);
        assert_eq!((pace.room(0), pace.room(3), pace.room(5)), (4, 1, 0));
        let mut now = pace.resumes_at();
        // Requests that ran together fail together.
        (0..4).for_each(|_| pace.failed(None, now));
        assert!(pace.resumes_at() <= now + PAUSE * 2, "they count once");
        let (over, mut probes) = (now + Duration::from_secs(3_600), 0);
        while now < over {
            now = pace.resumes_at();
            assert_eq!((pace.room(0), pace.room(1)), (1, 0));
            pace.failed(None, now);
            probes += 1;
        }
        assert!((280..600).contains(&probes), "{probes}");
        pace.answered();
        assert_eq!(pace.room(0), 4);
    }

    #[test]
    fn only_the_first_fault_after_an_answer_may_be_of_its_text() {
        let mut pace = Pace::new(4);
        let now = pace.resumes_at();
        assert!(!pace.works(), "nothing was answered yet");
        pace.answered();
        assert!(pace.works());
        pace.failed(None, now);
        assert!(!pace.works(), "an outage");
        pace.answered();
        assert!(pace.works());
    }

    #[test]
    fn the_endpoint_may_ask_for_a_longer_pause() {
        let mut pace = Pace::new(4);
        let now = pace.resumes_at();
        pace.failed(Some(Duration::from_secs(30)), now);
        assert_eq!(pace.resumes_at(), now + Duration::from_secs(30));
        // A request that began before the pause.
        pace.answered();
        assert_eq!(pace.resumes_at(), now + Duration::from_secs(30));
    }
}
