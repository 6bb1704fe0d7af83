//! The moves that people request: promote, rollback and pin. Pure; `release::http` carries them
//! out.

use super::super::{CHAMPION, REALTIME};
use super::{Change, ReleaseState};
use serde::{Deserialize, Serialize};

/// The body of `POST /v1/releases`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseRequest {
    pub kind: Kind,
    pub alias: String,
    /// Serial of the version to serve. Without it, a rollback returns to the previously served
    /// version, and a pin keeps the current one.
    pub version: Option<i64>,
    /// For the audit.
    #[serde(default)]
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Serve this version. `champion` then follows the realtime line again; other aliases stay.
    Promote,
    /// Serve an older version. For `champion`, the realtime line continues from there.
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
    #[error("promote needs `version`, the serial of the version to serve; GET /v1/versions lists them")]
    NoVersion,
    #[error("alias `{0}` does not exist; GET /v1/aliases lists those that do")]
    NoAlias(String),
    #[error("alias `{0}` has only ever served version {1}, so a rollback needs a `version`")]
    NothingBefore(String, i64),
    #[error("alias `{alias}` serves version {version} already")]
    Already { alias: String, version: i64 },
}

/// The change that a request asks for. `before` is the version that the alias served before its
/// current one.
pub fn decide(state: &ReleaseState, before: Option<i64>, request: &ReleaseRequest) -> Result<Change, RequestError> {
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
        (Kind::Promote, None) => return Err(RequestError::NoVersion),
        (Kind::Pin, None) => existing()?.version,
    };
    let mut change = state.pin(name, to, &request.reason);
    if let (Kind::Promote | Kind::Rollback, Some(line)) = (request.kind, state.line(REALTIME))
        && name == CHAMPION
    {
        change.follows = Some(REALTIME.into());
        // away from the head, only a later branch, which is re-based on this version, is followed
        change.branch = if to == line.head { line.branch } else { line.branch + 1 };
    }
    if current.is_some_and(|alias| alias.version == to && alias.follows == change.follows) {
        return Err(RequestError::Already {
            alias: name.into(),
            version: to,
        });
    }
    Ok(change)
}

fn check_name(name: &str) -> Result<(), RequestError> {
    let well_formed = name.len() <= 32
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if !well_formed {
        return Err(RequestError::Name(name.into()));
    }
    if name.starts_with("run-") {
        return Err(RequestError::Run(name.into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Alias, Line};
    use super::*;
    use time::macros::datetime;

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
            aliases: vec![alias("champion", 9, Some("realtime")), alias("canary", 4, None)],
            lines: vec![Line {
                line: "realtime".into(),
                head: 9,
                branch: 2,
                first: 1,
            }],
            runs: Vec::new(),
        }
    }

    fn request(kind: Kind, alias: &str, version: Option<i64>) -> ReleaseRequest {
        ReleaseRequest {
            kind,
            alias: alias.into(),
            version,
            reason: "because".into(),
        }
    }

    #[test]
    fn a_rollback_returns_to_the_previous_version_on_a_later_branch() {
        let change = decide(&state(), Some(8), &request(Kind::Rollback, "champion", None)).unwrap();
        assert_eq!((change.from, change.to, change.branch), (Some(9), 8, 3));
        assert_eq!(change.follows.as_deref(), Some("realtime"));
    }

    #[test]
    fn promoting_the_head_keeps_its_branch() {
        let mut state = state();
        state.aliases[0].version = 8;
        let change = decide(&state, None, &request(Kind::Promote, "champion", Some(9))).unwrap();
        assert_eq!((change.to, change.branch), (9, 2));
    }

    #[test]
    fn a_pin_stops_following_and_keeps_the_current_version_by_default() {
        let change = decide(&state(), None, &request(Kind::Pin, "champion", None)).unwrap();
        assert_eq!((change.to, change.follows), (9, None));
        let change = decide(&state(), None, &request(Kind::Pin, "champion", Some(5))).unwrap();
        assert_eq!((change.to, change.follows), (5, None));
    }

    #[test]
    fn an_alias_other_than_the_champion_never_follows_the_realtime_line() {
        let change = decide(&state(), None, &request(Kind::Promote, "fresh", Some(5))).unwrap();
        assert_eq!((change.from, change.to, change.follows), (None, 5, None));
    }

    #[test]
    fn an_invalid_request_is_refused_with_advice() {
        let refused = |kind, alias: &str, version| decide(&state(), None, &request(kind, alias, version)).unwrap_err();
        assert_eq!(refused(Kind::Promote, "champion", None), RequestError::NoVersion);
        assert_eq!(
            refused(Kind::Rollback, "champion", None),
            RequestError::NothingBefore("champion".into(), 9)
        );
        assert_eq!(
            refused(Kind::Rollback, "ghost", Some(3)),
            RequestError::NoAlias("ghost".into())
        );
        assert_eq!(refused(Kind::Pin, "ghost", None), RequestError::NoAlias("ghost".into()));
        assert_eq!(
            refused(Kind::Pin, "run-0a1b2c3d", Some(3)),
            RequestError::Run("run-0a1b2c3d".into())
        );
        assert_eq!(refused(Kind::Pin, "7", Some(3)), RequestError::Name("7".into()));
        assert_eq!(
            refused(Kind::Promote, "champion", Some(9)),
            RequestError::Already {
                alias: "champion".into(),
                version: 9
            }
        );
    }
}
