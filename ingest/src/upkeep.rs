//! Periodic work: partitions, retention, unreferenced payloads, orphaned feedback, and lag metrics.

pub(crate) mod lag;
pub(crate) mod orphan;
pub(crate) mod partition;
pub(crate) mod retention;
pub(crate) mod unreferenced;
