//! Background sequences on engines, and which of them give their slots back to production.

use super::super::sequence::Taking;
use super::Work;
use crate::engine::TrafficClass;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A background sequence on an engine.
pub(super) struct Lent {
    pub engine: usize,
    pub taking: Arc<Taking>,
    /// When it was told to give its slot back.
    pub told: Option<Instant>,
    pub may_be_taken: bool,
}

impl Work {
    /// Background sequences of an engine that were not told to give their slots back.
    pub(super) fn to_stay(&self, engine: usize) -> usize {
        let of_engine = self.lent.values().filter(|lent| lent.engine == engine);
        of_engine.filter(|lent| lent.told.is_none()).count()
    }

    /// Tells the background sequences of an engine that have sampled least to give their slots back.
    pub(super) fn take_back(&mut self, engine: usize, count: usize) {
        let may = |lent: &&mut Lent| lent.engine == engine && lent.may_be_taken && lent.told.is_none();
        let mut of_engine: Vec<&mut Lent> = self.lent.values_mut().filter(may).collect();
        of_engine.sort_by_key(|lent| lent.taking.sampled.load(Ordering::Relaxed));
        for lent in of_engine.into_iter().take(count) {
            lent.told = Some(Instant::now());
            lent.taking.wanted.cancel();
        }
    }

    /// Takes slots back for production that waits.
    pub(super) fn make_room(&mut self) {
        let production = self
            .queue
            .iter()
            .filter(|waiting| waiting.request.class == TrafficClass::Production);
        let mut wanted: BTreeMap<i64, usize> = BTreeMap::new();
        for waiting in production {
            *wanted.entry(waiting.request.version.serial).or_default() += 1;
        }
        for (serial, mut missing) in wanted {
            let engines: Vec<usize> = self.placement.serving(serial).collect();
            for engine in engines {
                let all = self.lent.values().filter(|lent| lent.engine == engine).count();
                let stay = self.to_stay(engine);
                // those that were told make room already
                missing = missing.saturating_sub(all - stay);
                let taken = missing.min(stay);
                self.take_back(engine, taken);
                missing -= taken;
            }
        }
    }
}
