//! Decides which version each alias serves. Pure: no database, no clock, no store.
//!
//! `automatic` holds the moves that the release loop makes by itself, such as following the head of
//! a line. `manual` holds the moves that people request: promote, rollback and pin.

pub mod automatic;
pub mod manual;

use time::OffsetDateTime;
use uuid::Uuid;

/// Everything that decisions depend on, as of one moment.
#[derive(Debug, Clone, Default)]
pub struct ReleaseState {
    pub aliases: Vec<Alias>,
    pub lines: Vec<Line>,
    pub runs: Vec<Run>,
}

/// The latest assignment of an alias.
#[derive(Debug, Clone, PartialEq)]
pub struct Alias {
    pub alias: String,
    pub version: i64,
    /// The line whose head it follows; `None`: pinned.
    pub follows: Option<String>,
    /// Heads of earlier branches of that line are not followed.
    pub branch: i32,
    pub withdrawn: bool,
    pub created_at: OffsetDateTime,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub line: String,
    pub head: i64,
    pub branch: i32,
    /// Its oldest version.
    pub first: i64,
}

/// An offline run.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub id: Uuid,
    pub kind: String,
    pub line: String,
    pub status: String,
    pub base_version: Option<i64>,
    pub finished_at: Option<OffsetDateTime>,
}

/// A move of one alias.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    pub alias: String,
    pub from: Option<i64>,
    pub to: i64,
    pub follows: Option<String>,
    pub branch: i32,
    pub withdrawn: bool,
    pub reason: String,
}

impl ReleaseState {
    /// The alias, unless it is withdrawn.
    pub fn alias(&self, name: &str) -> Option<&Alias> {
        self.aliases
            .iter()
            .find(|alias| alias.alias == name && !alias.withdrawn)
    }

    pub fn line(&self, name: &str) -> Option<&Line> {
        self.lines.iter().find(|line| line.line == name)
    }

    /// A pin of the alias to a version, on its current branch.
    pub fn pin(&self, alias: &str, to: i64, reason: impl Into<String>) -> Change {
        let current = self.alias(alias);
        Change {
            alias: alias.into(),
            from: current.map(|alias| alias.version),
            to,
            follows: None,
            branch: current.map_or(0, |alias| alias.branch),
            withdrawn: false,
            reason: reason.into(),
        }
    }
}
