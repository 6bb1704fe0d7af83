//! How events enter: the HTTP API, CloudEvents, and a collector's spool on disk.

pub(crate) mod api;
mod cloudevents;
pub(crate) mod destination;
pub mod spool;
