//! How many slots production needed at each time of the week, and so what to expect. Pure.
//!
//! A slot of time is five minutes of a weekday in UTC. Each holds an exponentially weighted mean of
//! the weeks' peaks: newest · w + before · (1 − w). A time of which no week is known is expected to
//! be like the same time of other days.

use time::OffsetDateTime;

const MINUTES_PER_BUCKET: usize = 5;
const BUCKETS_PER_DAY: usize = 24 * 60 / MINUTES_PER_BUCKET;
const DAYS: usize = 7;

/// What is known of one engine's production.
#[derive(Debug, Clone)]
pub struct History {
    /// By weekday, then by time of the day.
    of_week: Vec<Option<f64>>,
    of_day: Vec<Option<f64>>,
    newest_week_weight: f64,
    /// The peak of the time that is now: its bucket, counted from the epoch.
    open: Option<(i64, f64)>,
}

impl History {
    pub fn new(newest_week_weight: f64) -> Self {
        History {
            of_week: vec![None; DAYS * BUCKETS_PER_DAY],
            of_day: vec![None; BUCKETS_PER_DAY],
            newest_week_weight,
            open: None,
        }
    }

    /// Production needed so many slots at a time. Times must not fall.
    pub fn note(&mut self, at: OffsetDateTime, slots: f64) {
        let bucket = bucket(at);
        match &mut self.open {
            Some((open, peak)) if *open == bucket => *peak = peak.max(slots),
            _ => {
                self.close();
                self.open = Some((bucket, slots));
            }
        }
    }

    /// The slots that production is expected to need at most in these and the next five minutes.
    /// `None`: no day is known.
    pub fn expected(&self, at: OffsetDateTime) -> Option<f64> {
        let now = bucket(at);
        let known = [now, now + 1].into_iter().filter_map(|bucket| self.at(bucket));
        known.reduce(f64::max)
    }

    fn at(&self, bucket: i64) -> Option<f64> {
        let (week, day) = places(bucket);
        self.of_week[week].or(self.of_day[day])
    }

    fn close(&mut self) {
        let Some((bucket, peak)) = self.open.take() else { return };
        let (week, day) = places(bucket);
        let weight = self.newest_week_weight;
        for place in [&mut self.of_week[week], &mut self.of_day[day]] {
            *place = Some(place.map_or(peak, |before| peak * weight + before * (1.0 - weight)));
        }
    }
}

fn bucket(at: OffsetDateTime) -> i64 {
    at.unix_timestamp().div_euclid(60 * MINUTES_PER_BUCKET as i64)
}

/// Of the week and of the day.
fn places(bucket: i64) -> (usize, usize) {
    let day = bucket.rem_euclid(BUCKETS_PER_DAY as i64) as usize;
    let weekday = bucket.div_euclid(BUCKETS_PER_DAY as i64).rem_euclid(DAYS as i64) as usize;
    (weekday * BUCKETS_PER_DAY + day, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::Duration;
    use time::macros::datetime;

    const MONDAY: OffsetDateTime = datetime!(2026-11-02 09:00 UTC);

    #[test]
    fn the_same_time_of_the_week_is_expected_again_and_newer_weeks_count_more() {
        let mut history = History::new(0.75);
        assert_eq!(history.expected(MONDAY), None);
        for (week, slots) in [(0, 4.0), (1, 8.0)] {
            let at = MONDAY + Duration::weeks(week);
            history.note(at, 1.0);
            history.note(at + Duration::minutes(4), slots);
            history.note(at + Duration::minutes(10), 0.0);
        }
        let third = MONDAY + Duration::weeks(2);
        assert_eq!(history.expected(third), Some(7.0), "8 · 0.75 + 4 · 0.25");
        assert_eq!(
            history.expected(third - Duration::minutes(5)),
            Some(7.0),
            "it looks ahead"
        );
    }

    #[test]
    fn an_unknown_weekday_is_like_the_same_time_of_other_days() {
        let mut history = History::new(0.5);
        history.note(MONDAY, 6.0);
        history.note(MONDAY + Duration::minutes(5), 0.0);
        assert_eq!(history.expected(MONDAY + Duration::days(1)), Some(6.0));
        assert_eq!(history.expected(MONDAY + Duration::hours(5)), None);
    }

    #[test]
    fn what_happens_now_is_not_yet_history() {
        let mut history = History::new(0.5);
        history.note(MONDAY, 6.0);
        assert_eq!(history.expected(MONDAY), None);
    }
}
