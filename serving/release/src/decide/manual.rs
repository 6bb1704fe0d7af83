//! The moves that people request: promote, rollback and pin. Pure; `release::http` carries them
//! out.
//!
//! | request | `learner` | `champion` | other aliases |
//! |---|---|---|---|
//! | promote V | serves V; the line continues from V | serves V and follows `learner`. If it would move to `learner` at once, `learner` gets V too | serve V |
//! | rollback V | the same | holds V. `learner` gets V too, and the line continues from V | serve V |
//! | pin V | holds V; the run pauses | holds V; learning goes on | serve V |
//!
//! A pinned `learner` that gets V by a rollback of `champion` stays pinned. If the run learns from
//! `champion`, all three treat `champion` as the table says of `learner`.

use super::super::{CHAMPION, ChampionBy, LEARNER, REALTIME};
use super::{Change, Line, ReleaseState};
use event_log::event::SHADOW;
use serde::{Deserialize, Serialize};

/// The body of `POST /v1/releases`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseRequest {
    pub kind: Kind,
    pub alias: String,
    /// Serial of the version to serve. Without it, a rollback of `champion` goes to the last version known
    /// to be good, any other rollback and one without such a version to the version served before, a pin
    /// keeps the current one, and `champion` is promoted to that of `learner`.
    pub version: Option<i64>,
    /// For the audit.
    #[serde(default)]
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Serve this version. `learner` and `champion` follow again from there; other aliases stay.
    Promote,
    /// Serve an older version, from which the realtime line continues. `champion` stays there.
    Rollback,
    /// Serve this version until the next request.
    Pin,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Promote => "promote",
            Kind::Rollback => "rollback",
            Kind::Pin => "pin",
        }
    }
}

/// Why a request is refused. Each message says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error("alias `{0}` is not a name: use 1 to 32 of a-z, 0-9 and `-`, beginning with a letter")]
    Name(String),
    #[error("alias `{0}` belongs to a run; it follows that run's line by itself")]
    Run(String),
    #[error("no alias can be named `shadow`: unseen answers of canaries have it as their arm")]
    Shadow,
    #[error("promote needs `version`, the serial of the version to serve; GET /v1/versions lists them")]
    NoVersion,
    #[error("alias `{0}` does not exist; GET /v1/aliases lists those that do")]
    NoAlias(String),
    #[error(
        "alias `{0}` has served nothing but version {1} and versions judged bad, so a rollback needs a `version`; `pin` holds {1}"
    )]
    NothingBefore(String, i64),
    #[error("alias `{alias}` serves version {version} already")]
    Already { alias: String, version: i64 },
}

/// The changes that a request asks for, that of its alias first. `before`: where a rollback goes that
/// names no version.
pub fn decide(
    state: &ReleaseState,
    before: Option<i64>,
    request: &ReleaseRequest,
) -> Result<Vec<Change>, RequestError> {
    let name = request.alias.as_str();
    check_name(name)?;
    let current = state.alias(name);
    let existing = || current.ok_or_else(|| RequestError::NoAlias(name.into()));
    let to = match (request.kind, request.version) {
        (Kind::Rollback, version) => {
            let current = existing()?.version;
            let before = version.or(before);
            before.ok_or_else(|| RequestError::NothingBefore(name.into(), current))?
        }
        (_, Some(version)) => version,
        (Kind::Promote, None) => match state.learner().filter(|_| name == CHAMPION) {
            Some(learner) => learner.version,
            None => return Err(RequestError::NoVersion),
        },
        (Kind::Pin, None) => existing()?.version,
    };
    let mut change = state.pin(name, to, &request.reason);
    let mut with_it = None;
    if let (Kind::Promote | Kind::Rollback, Some(line)) = (request.kind, state.line(REALTIME)) {
        if name == state.rules.learning.name() {
            change = continue_line(state, line, change);
        } else if name == CHAMPION {
            with_it = learner_with_champion(state, line, &change, request.kind);
            let learner = with_it.as_ref().map(|moved| moved.branch);
            let learner = learner.or(state.learner().map(|learner| learner.branch));
            change.branch = learner.unwrap_or(change.branch);
            let follows = request.kind == Kind::Promote && state.rules.champion == ChampionBy::Follow;
            change.follows = follows.then(|| REALTIME.into());
        }
    }
    let unchanged = current.is_some_and(|alias| alias.version == to && alias.follows == change.follows);
    if unchanged && with_it.is_none() {
        return Err(RequestError::Already {
            alias: name.into(),
            version: to,
        });
    }
    Ok([Some(change), with_it].into_iter().flatten().collect())
}

/// The realtime line continues from the version of `change`.
pub fn continue_line(state: &ReleaseState, line: &Line, change: Change) -> Change {
    let branch = state.alias(&change.alias).map_or(line.branch, |alias| alias.branch);
    Change {
        follows: Some(REALTIME.into()),
        // away from the head, only a later branch, which is re-based on this version, is followed
        branch: match change.to == line.head && branch <= line.branch {
            true => line.branch,
            false => line.branch.max(branch) + 1,
        },
        ..change
    }
}

/// The move of `learner` that comes with a promotion or rollback of `champion`. `None`: it stays.
fn learner_with_champion(state: &ReleaseState, line: &Line, champion: &Change, kind: Kind) -> Option<Change> {
    let learner = state.learner()?;
    let follows = state.rules.champion == ChampionBy::Follow;
    if kind == Kind::Promote && !(follows && state.is_behind(champion.to, learner.version)) {
        return None;
    }
    let moved = state.pin(LEARNER, champion.to, &champion.reason);
    let moved = match (&learner.follows, kind) {
        (None, Kind::Rollback) => moved,
        _ => continue_line(state, line, moved),
    };
    let differs = (learner.version, &learner.follows, learner.branch) != (moved.to, &moved.follows, moved.branch);
    differs.then_some(moved)
}

pub(super) fn check_name(name: &str) -> Result<(), RequestError> {
    let well_formed = name.len() <= 32
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if !well_formed {
        return Err(RequestError::Name(name.into()));
    }
    if name == SHADOW {
        return Err(RequestError::Shadow);
    }
    if name.starts_with("run-") {
        return Err(RequestError::Run(name.into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::super::LearningAlias;
    use super::super::Alias;
    use super::*;
    use time::macros::datetime;

    /// The line 1 ← 2 ← … ← 9 on branch 2, with everybody at its head.
    fn state() -> ReleaseState {
        let alias = |name: &str, version, follows: Option<&str>| Alias {
            alias: name.into(),
            version,
            follows: follows.map(Into::into),
            branch: 2,
            withdrawn: false,
            created_at: datetime!(2026-11-21 10:00 UTC),
        };
        ReleaseState {
            aliases: vec![
                alias("learner", 9, Some("realtime")),
                alias("champion", 9, Some("realtime")),
                alias("canary", 4, None),
            ],
            lines: vec![Line {
                line: "realtime".into(),
                head: 9,
                branch: 2,
                first: 1,
            }],
            parents: (2..=9).map(|version| (version, version - 1)).collect(),
            ..ReleaseState::default()
        }
    }

    /// Configured to learn from `champion`.
    fn without_learner() -> ReleaseState {
        let mut state = state();
        state.aliases.remove(0);
        state.rules.learning = LearningAlias::Champion;
        state
    }

    fn request(kind: Kind, alias: &str, version: Option<i64>) -> ReleaseRequest {
        ReleaseRequest {
            kind,
            alias: alias.into(),
            version,
            reason: "because".into(),
        }
    }

    /// (alias, from, to, follows, branch) of each change.
    type Moved = (String, Option<i64>, i64, Option<String>, i32);

    fn decided(state: &ReleaseState, kind: Kind, alias: &str, version: Option<i64>) -> Vec<Moved> {
        let changes = decide(state, Some(8), &request(kind, alias, version)).unwrap();
        assert!(
            changes
                .iter()
                .all(|change| change.reason == "because" && !change.withdrawn)
        );
        let moved = changes
            .into_iter()
            .map(|c| (c.alias, c.from, c.to, c.follows, c.branch));
        moved.collect()
    }

    fn moved(alias: &str, from: i64, to: i64, follows: Option<&str>, branch: i32) -> Moved {
        (alias.into(), Some(from), to, follows.map(Into::into), branch)
    }

    const LINE: Option<&str> = Some("realtime");

    #[test]
    fn a_rollback_of_champion_holds_and_the_line_continues_from_there() {
        let expected = [moved("champion", 9, 8, None, 3), moved("learner", 9, 8, LINE, 3)];
        assert_eq!(decided(&state(), Kind::Rollback, "champion", None), expected);
        assert_eq!(decided(&state(), Kind::Rollback, "champion", Some(8)), expected);
    }

    #[test]
    fn a_rollback_leaves_a_pinned_learner_pinned() {
        let mut state = state();
        state.aliases[0].follows = None;
        let expected = [moved("champion", 9, 5, None, 2), moved("learner", 9, 5, None, 2)];
        assert_eq!(decided(&state, Kind::Rollback, "champion", Some(5)), expected);
    }

    #[test]
    fn a_rollback_to_where_champion_holds_already_still_moves_learner() {
        let mut state = state();
        (state.aliases[1].version, state.aliases[1].follows) = (6, None);
        let expected = [moved("champion", 6, 6, None, 3), moved("learner", 9, 6, LINE, 3)];
        assert_eq!(decided(&state, Kind::Rollback, "champion", Some(6)), expected);
        (state.aliases[0].version, state.aliases[0].branch) = (6, 3);
        state.lines[0] = Line {
            head: 6,
            branch: 3,
            ..state.lines[0].clone()
        };
        let again = decide(&state, None, &request(Kind::Rollback, "champion", Some(6)));
        assert!(
            matches!(again, Err(RequestError::Already { version: 6, .. })),
            "{again:?}"
        );
    }

    #[test]
    fn a_second_rollback_before_the_line_was_re_based_is_a_later_branch_again() {
        let mut state = state();
        (state.aliases[0].version, state.aliases[0].branch) = (7, 3);
        (state.aliases[1].version, state.aliases[1].follows) = (7, None);
        let expected = [moved("champion", 7, 5, None, 4), moved("learner", 7, 5, LINE, 4)];
        assert_eq!(decided(&state, Kind::Rollback, "champion", Some(5)), expected);
    }

    #[test]
    fn a_promotion_of_champion_follows_learner_again() {
        let mut state = state();
        (state.aliases[1].version, state.aliases[1].follows) = (6, None);
        let expected = [moved("champion", 6, 9, LINE, 2)];
        assert_eq!(
            decided(&state, Kind::Promote, "champion", None),
            expected,
            "the learner's"
        );
        assert_eq!(decided(&state, Kind::Promote, "champion", Some(9)), expected);
        state.rules.champion_every = 4;
        let near = [moved("champion", 6, 7, LINE, 2)];
        assert_eq!(
            decided(&state, Kind::Promote, "champion", Some(7)),
            near,
            "it would stay there"
        );
    }

    #[test]
    fn a_promotion_that_champion_would_leave_at_once_moves_learner_too() {
        let mut state = state();
        for version in [7, 40] {
            let expected = [
                moved("champion", 9, version, LINE, 3),
                moved("learner", 9, version, LINE, 3),
            ];
            assert_eq!(decided(&state, Kind::Promote, "champion", Some(version)), expected);
        }
        state.aliases[0].follows = None;
        let resumed = [moved("champion", 9, 7, LINE, 3), moved("learner", 9, 7, LINE, 3)];
        assert_eq!(decided(&state, Kind::Promote, "champion", Some(7)), resumed);
    }

    #[test]
    fn a_pinned_champion_leaves_learning_alone() {
        assert_eq!(
            decided(&state(), Kind::Pin, "champion", None),
            [moved("champion", 9, 9, None, 2)]
        );
        assert_eq!(
            decided(&state(), Kind::Pin, "champion", Some(5)),
            [moved("champion", 9, 5, None, 2)]
        );
    }

    #[test]
    fn learner_is_moved_alone() {
        let state = state();
        let alone = |kind, version| decided(&state, kind, "learner", version);
        assert_eq!(alone(Kind::Rollback, None), [moved("learner", 9, 8, LINE, 3)]);
        assert_eq!(alone(Kind::Promote, Some(7)), [moved("learner", 9, 7, LINE, 3)]);
        assert_eq!(alone(Kind::Pin, Some(7)), [moved("learner", 9, 7, None, 2)]);
        assert_eq!(alone(Kind::Pin, None), [moved("learner", 9, 9, None, 2)]);
        let mut pinned = state.clone();
        (pinned.aliases[0].version, pinned.aliases[0].follows) = (8, None);
        let head = decided(&pinned, Kind::Promote, "learner", Some(9));
        assert_eq!(head, [moved("learner", 8, 9, LINE, 2)], "the head keeps its branch");
    }

    #[test]
    fn without_a_learner_champion_is_what_the_run_learns_from() {
        let state = without_learner();
        let alone = |kind, version| decided(&state, kind, "champion", version);
        assert_eq!(alone(Kind::Rollback, None), [moved("champion", 9, 8, LINE, 3)]);
        assert_eq!(alone(Kind::Promote, Some(5)), [moved("champion", 9, 5, LINE, 3)]);
        assert_eq!(alone(Kind::Pin, None), [moved("champion", 9, 9, None, 2)]);
        let unnamed = decide(&state, None, &request(Kind::Promote, "champion", None));
        assert_eq!(unnamed, Err(RequestError::NoVersion));
    }

    #[test]
    fn another_alias_never_follows_the_realtime_line() {
        let changes = decide(&state(), None, &request(Kind::Promote, "fresh", Some(5))).unwrap();
        assert_eq!(changes.len(), 1);
        assert_eq!((changes[0].from, changes[0].to, &changes[0].follows), (None, 5, &None));
        let rolled = decided(&state(), Kind::Rollback, "canary", Some(3));
        assert_eq!(rolled, [moved("canary", 4, 3, None, 2)]);
    }

    #[test]
    fn an_invalid_request_is_refused_with_advice() {
        let refused = |kind, alias: &str, version| decide(&state(), None, &request(kind, alias, version)).unwrap_err();
        assert_eq!(refused(Kind::Promote, "learner", None), RequestError::NoVersion);
        assert_eq!(
            refused(Kind::Rollback, "champion", None),
            RequestError::NothingBefore("champion".into(), 9)
        );
        assert_eq!(
            refused(Kind::Rollback, "ghost", Some(3)),
            RequestError::NoAlias("ghost".into())
        );
        assert_eq!(refused(Kind::Pin, "ghost", None), RequestError::NoAlias("ghost".into()));
        assert_eq!(refused(Kind::Pin, "shadow", Some(3)), RequestError::Shadow);
        assert_eq!(
            refused(Kind::Pin, "run-0a1b2c3d", Some(3)),
            RequestError::Run("run-0a1b2c3d".into())
        );
        assert_eq!(refused(Kind::Pin, "7", Some(3)), RequestError::Name("7".into()));
        for alias in ["champion", "learner"] {
            assert_eq!(
                refused(Kind::Promote, alias, Some(9)),
                RequestError::Already {
                    alias: alias.into(),
                    version: 9
                }
            );
        }
    }
}
