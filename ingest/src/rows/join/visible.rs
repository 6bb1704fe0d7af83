//! Up to when every sink that is writing now could see all rows.

use time::OffsetDateTime;

use crate::rows::offset::CaughtUp;

/// What a closer has observed.
///
/// A sink locks the offsets of its partitions before it looks for anything, and nobody moves them
/// until it ends. Once all partitions have moved since an observation, every sink that is writing has
/// begun after it, and could see what the tables held by then. Other transactions do not matter,
/// however long they run.
#[derive(Debug)]
pub(crate) struct Visible {
    until: OffsetDateTime,
    /// Is to become `until`.
    next: Option<CaughtUp>,
}

impl Default for Visible {
    fn default() -> Self {
        Self {
            until: OffsetDateTime::UNIX_EPOCH,
            next: None,
        }
    }
}

impl Visible {
    /// Returns a time: all rows that were stored before could be seen by every sink that is writing, at
    /// each of its looks for them.
    pub(crate) fn observe(&mut self, now: CaughtUp) -> OffsetDateTime {
        match self.next {
            Some(next) if now.moved_since <= next.read_at => return self.until,
            Some(next) => self.until = next.to,
            None => {}
        }
        self.next = Some(now);
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_known_before_all_partitions_moved_was_visible() {
        let at = |seconds: i64| OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(seconds);
        let mut visible = Visible::default();
        let mut observe = |to, moved_since, read_at| {
            visible.observe(CaughtUp {
                to: at(to),
                moved_since: at(moved_since),
                read_at: at(read_at),
            })
        };
        // Whoever is writing may have begun before the first observation.
        assert_eq!(observe(10, 11, 12), at(0));
        assert_eq!(observe(10, 12, 13), at(0));
        // It has ended, and whoever is writing has begun after the first one.
        assert_eq!(observe(20, 13, 24), at(10));
        assert_eq!(observe(30, 24, 34), at(10));
        assert_eq!(observe(40, 43, 44), at(20));
    }
}
