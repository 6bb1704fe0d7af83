//! Decides which version each alias serves and how users are divided. Pure: no database, no clock,
//! no store.
//!
//! `automatic` holds the moves that the release loop makes by itself, such as following the head of
//! a line. `manual` holds the moves that people request: promote, rollback and pin. `arms` holds
//! the shares of users.

pub mod arms;
pub mod automatic;
pub mod manual;

use std::collections::{BTreeMap, BTreeSet};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{AfterHarm, ArmOptions, ChampionBy, LEARNER, LearningAlias};
use arms::{Draft, Experiment};

/// Everything that decisions depend on, as of one moment.
#[derive(Debug, Clone, Default)]
pub struct ReleaseState {
    pub rules: Rules,
    pub aliases: Vec<Alias>,
    pub lines: Vec<Line>,
    pub runs: Vec<Run>,
    /// Parents of the newest versions of the realtime line: enough for [`Self::is_behind`].
    pub parents: BTreeMap<i64, i64>,
    /// Of the versions of the line's head and of `learner`: those that are bad, or were trained on top of a
    /// bad one. Only the loop that follows them looks for them.
    pub bad: BTreeSet<i64>,
    /// `None`: no arms were written yet.
    pub experiment: Option<Experiment>,
    /// Whether a canary has users. The arms stay as they are meanwhile.
    pub canary_serves: bool,
}

/// What the configuration says about following.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The alias that the realtime run learns from. It follows every head.
    pub learning: LearningAlias,
    /// `champion` moves to the version of `learner` when it is this many versions behind.
    pub champion_every: u32,
    pub champion: ChampionBy,
    pub after_harm: AfterHarm,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            learning: LearningAlias::Learner,
            champion_every: 1,
            champion: ChampionBy::Follow,
            after_harm: AfterHarm::Rebase,
        }
    }
}

/// The latest assignment of an alias.
#[derive(Debug, Clone, PartialEq)]
pub struct Alias {
    pub alias: String,
    pub version: i64,
    /// The line whose head it follows; `None`: pinned. `champion` follows by way of `learner`, if
    /// the run learns from that.
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
    /// Of a canary: the share of `champion`'s users that it takes.
    pub share: Option<f64>,
    /// The clusters in which it does. `None`: all.
    pub clusters: Option<Vec<String>>,
    /// Of a canary: the share of `champion`'s requests that it answers too, unseen.
    pub shadow: Option<f64>,
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

    /// `learner`, if the run learns from it.
    pub fn learner(&self) -> Option<&Alias> {
        self.alias(LEARNER)
            .filter(|_| self.rules.learning == LearningAlias::Learner)
    }

    /// Whether `champion` at `version` would move to `learner` at `newest`: it is `champion_every`
    /// or more versions behind, or `newest` does not descend from it.
    pub fn is_behind(&self, version: i64, newest: i64) -> bool {
        let path = std::iter::successors(Some(newest), |version| self.parents.get(version).copied());
        !path
            .take(self.rules.champion_every as usize)
            .any(|near| near == version)
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
            share: None,
            clusters: None,
            shadow: None,
            reason: reason.into(),
        }
    }

    /// What a changed configuration makes of the arms. `None`: nothing, or not now.
    pub fn configured(&self, arms: &[ArmOptions]) -> Option<Draft> {
        let draft = arms::by_configuration(self.experiment.as_ref(), arms)?;
        (!self.canary_serves).then_some(draft)
    }

    /// One alias as it is, for a new epoch that has other arms or takes another's place. `None`:
    /// nothing is assigned yet.
    pub fn restate(&self, reason: impl Into<String>) -> Option<Change> {
        let alias = self
            .alias(super::CHAMPION)
            .or(self.aliases.iter().find(|alias| !alias.withdrawn))?;
        Some(Change {
            follows: alias.follows.clone(),
            ..self.pin(&alias.alias, alias.version, reason)
        })
    }
}
