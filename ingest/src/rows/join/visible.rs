//! Up to when every transaction that runs now could see all rows.

use std::collections::VecDeque;

use sqlx::PgConnection;
use time::OffsetDateTime;

/// Observations that are kept: some minutes of a closer that is busy.
const KEPT_MAX: usize = 10_000;

/// What a closer has observed.
#[derive(Debug, Default)]
pub(crate) struct Visible {
    /// Oldest first: the first transaction id that was not given out yet, and a time for which the
    /// tables held everything by then.
    observed: VecDeque<(i64, OffsetDateTime)>,
}

impl Visible {
    /// `known`: the tables hold all events up to this time, since before this call. Returns a time:
    /// all rows that were stored before could be seen by every transaction of a sink that runs now,
    /// at each of its looks for them.
    ///
    /// A sink gets its transaction id when it locks its offsets, before it looks for anything. So a
    /// running sink with an id from `observed` on has looked after that observation.
    pub(crate) async fn until(
        &mut self,
        connection: &mut PgConnection,
        known: OffsetDateTime,
    ) -> sqlx::Result<OffsetDateTime> {
        let ids = sqlx::query!(
            "select pg_snapshot_xmin(s)::text::bigint as \"oldest_running!\", pg_snapshot_xmax(s)::text::bigint as \"next!\" \
             from pg_current_snapshot() as s"
        )
        .fetch_one(connection)
        .await?;
        Ok(self.observe(ids.oldest_running, ids.next, known))
    }

    fn observe(&mut self, oldest_running: i64, next: i64, known: OffsetDateTime) -> OffsetDateTime {
        if self.observed.len() < KEPT_MAX {
            self.observed.push_back((next, known));
        }
        while self.observed.get(1).is_some_and(|(next, _)| *next <= oldest_running) {
            self.observed.pop_front();
        }
        match self.observed.front() {
            Some((next, known)) if *next <= oldest_running => *known,
            _ => OffsetDateTime::UNIX_EPOCH,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_known_before_the_oldest_running_transaction_began_was_visible_to_it() {
        let at = |seconds: i64| OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(seconds);
        let mut visible = Visible::default();
        // 10 runs since before the first observation.
        assert_eq!(visible.observe(10, 11, at(1)), at(0));
        assert_eq!(visible.observe(10, 15, at(2)), at(0));
        // It has ended. 12 began after the first observation and before the second.
        assert_eq!(visible.observe(12, 20, at(3)), at(1));
        assert_eq!(visible.observe(15, 21, at(4)), at(2));
        // Nothing runs.
        assert_eq!(visible.observe(30, 30, at(5)), at(5));
        assert_eq!(visible.observed.len(), 1);
    }

    #[test]
    fn the_memory_is_bounded_while_a_transaction_runs_for_long() {
        let mut visible = Visible::default();
        for next in 2..20_000 {
            visible.observe(1, next, OffsetDateTime::UNIX_EPOCH);
        }
        assert_eq!(visible.observed.len(), KEPT_MAX);
    }
}
