//! The statistics that decide a release.
//!
//! A release is looked at all the time and stopped as soon as the evidence suffices. An interval or
//! a test that is made for one look raises far more false alarms than it promises when it is read
//! that way. Everything here except [`offpolicy`] stays valid however often it is read.
//!
//! | module | question |
//! |---|---|
//! | [`sequence`] | by how much does the candidate's reward differ from the baseline's? |
//! | [`verdict`] | is that superior, non-inferior, harmful, equivalent, or not worth more traffic? |
//! | [`rates`] | does the candidate fail more often? Answers after a few requests |
//! | [`ratio`] | did users reach the arms in the declared shares? |
//! | [`change`] | did a figure of an arm's answers change? Goes on for ever |
//! | [`figure`] | which figures of answers are watched? |
//! | [`offpolicy`] | what would the candidate have earned on logged traffic? |
//!
//! The crate is pure: numbers go in, numbers and sentences come out. It deliberately has no
//! database, no network, no clock and no async code, and it does not know what a release does next.

pub mod change;
pub mod figure;
pub mod offpolicy;
pub mod rates;
pub mod ratio;
pub mod sequence;
pub mod verdict;

pub use report::{Clusters, Estimate};
