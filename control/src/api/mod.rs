//! What is answered as JSON by no other crate: two queries that span crates (the ledger, and the origin of a
//! generation), rewards of an arm over time, texts, dead letters, erasures, and the demo's report.

pub mod dead_letters;
pub mod erasures;
pub mod ledger;
pub mod origin;
pub mod report;
pub mod rewards;
pub mod texts;
