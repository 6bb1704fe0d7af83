//! Parts of a report page: means with their intervals, charts, and the page around them.
//!
//! Everything here is pure: numbers go in, text comes out. The crate deliberately has no database,
//! no network and no knowledge of what is measured.
//!
//! A chart compares up to three things. Their style classes are `primary`, `second` and `baseline`.

pub mod chart;
pub mod interval;
pub mod number;
pub mod page;

pub use interval::{Clusters, Estimate, Interval};
