//! The spool's files; what is checked lies beside them, where their parts can be seen.

pub(super) use crate::spool::fuzz::{folder, segment};
