//! The sections of the page, one module each.

pub mod dead_letters;
pub mod feedback;
pub mod fleet;
pub mod keys;
pub mod learning;
pub mod ledger;
pub mod now;
pub mod releases;
pub mod runs;
pub mod tide;
pub mod trajectories;
pub mod versions;
