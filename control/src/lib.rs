//! The role `control`: one front for runs, versions, releases, the fleet, the tide and dead letters, as JSON
//! and as pages. What a request does is up to the crates behind it; the binary starts the role.

pub mod api;
pub mod dead_letters;
pub mod page;
pub mod times;
