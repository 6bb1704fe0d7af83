//! Runs, without what learns: which there are, when they may work, what they select, how they grade,
//! and how a step becomes a version. Needs no libtorch.
//!
//! ```text
//! api/       runs, versions and lines over HTTP
//! options    `[trainer]` of the configuration file
//! settings   a step's loss, correction, optimizer and bounds, by name and constants
//! run        kinds and statuses; claim: who may write for a run; alarm: what people are told of it
//! schedule/  when a run may work
//! select/    rewarded trajectories of the database ─► samples; others get the reason why not
//! sample     one trajectory, as what learns gets it; `grammar` and `explore` say how it was sampled
//! context    the full prompt of a generation that was logged turn by turn
//! dataset/   named queries over closed trajectories, for runs that do not learn from the stream
//! advantage  rewards ─► advantages, and baselines
//! leases     who makes which rollout, and how it ended
//! door/      cohorts that a trainer outside leases and commits
//! grader/    grades rollouts; judge/ has models behind endpoints, and their stored answers
//! publish/   run state, delta, manifest, and one fenced transaction: a new version
//! uses       which runs used a trajectory, and what for
//! learning   which alias is learned from; show_rate/ and monitors/ watch what is served
//! memory     what training a model needs, said before it is taken
//! ```
//! The crate `trainer` learns: it runs the model over samples and drives the steps. This crate knows
//! serving only as a URL, and reads which version an alias serves from the view `alias`.

pub mod advantage;
pub mod alarm;
pub mod api;
pub mod claim;
pub mod context;
pub mod dataset;
pub mod door;
pub mod explore;
pub mod grader;
pub mod grammar;
pub mod judge;
pub mod learning;
pub mod leases;
pub mod memory;
pub mod monitors;
pub mod options;
pub mod publish;
pub mod random;
pub mod realtime;
pub mod run;
pub mod sample;
pub mod schedule;
pub mod select;
pub mod settings;
pub mod show_rate;
pub mod uses;

pub use options::{Options, REALTIME_LINE};
