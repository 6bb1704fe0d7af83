//! From the log into the rows of Postgres.

pub(crate) mod feedback;
pub(crate) mod insert;
pub(crate) mod join;
pub(crate) mod judgement;
pub mod offset;
pub(crate) mod record;
pub mod sink;
pub(crate) mod transaction;
