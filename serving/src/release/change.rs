//! What a person may ask for, and what it means. Pure, like `plan`; the router speaks for people, this file decides.

use super::plan::{Books, Change};
use super::{CHAMPION, REALTIME};
use serde::{Deserialize, Serialize};

/// The body of `POST /v1/releases`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ask {
    pub kind: Kind,
    pub alias: String,
    /// Serial of the version to serve. A rollback without one goes back to what the alias served before; a pin without
    /// one keeps what it serves.
    pub version: Option<i64>,
    /// Why, for the audit.
    #[serde(default)]
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Serve this version; `champion` follows the realtime line from there, any other alias stays.
    Promote,
    /// Serve an older version; for `champion` the realtime line goes on from there.
    Rollback,
    /// Serve this version until told otherwise.
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

/// Why an ask was not carried out. Each says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("alias `{0}` is not a name: use 1 to 32 of a-z, 0-9 and `-`, beginning with a letter")]
    Name(String),
    #[error("alias `{0}` belongs to a run; it follows that run's line by itself")]
    Run(String),
    #[error("promote needs `version`, the serial of the version to serve; GET /v1/versions lists them")]
    NoVersion,
    #[error("alias `{0}` does not exist; GET /v1/aliases lists those that do")]
    NoAlias(String),
    #[error("alias `{0}` has served nothing but version {1}, so there is nothing to roll back to; name a `version`")]
    NothingBefore(String, i64),
    #[error("alias `{alias}` serves version {version} already")]
    Already { alias: String, version: i64 },
}

/// Turns an ask into the change of one alias. `before` is what the alias served before its current version.
pub fn decide(books: &Books, before: Option<i64>, ask: &Ask) -> Result<Change, Refusal> {
    let name = ask.alias.as_str();
    check_name(name)?;
    let current = books.alias(name);
    let to = match (ask.kind, ask.version) {
        (_, Some(version)) => version,
        (Kind::Promote, None) => return Err(Refusal::NoVersion),
        (Kind::Rollback, None) => {
            let current = current.ok_or_else(|| Refusal::NoAlias(name.into()))?;
            before.ok_or_else(|| Refusal::NothingBefore(name.into(), current.version))?
        }
        (Kind::Pin, None) => current.ok_or_else(|| Refusal::NoAlias(name.into()))?.version,
    };
    if ask.kind == Kind::Rollback && current.is_none() {
        return Err(Refusal::NoAlias(name.into()));
    }
    let (follows, branch) = match (ask.kind, books.line(REALTIME)) {
        (Kind::Promote | Kind::Rollback, Some(line)) if name == CHAMPION => {
            // away from the head: only a later branch, re-based on this version, is followed
            let branch = if to == line.head { line.branch } else { line.branch + 1 };
            (Some(REALTIME.to_string()), branch)
        }
        _ => (None, current.map_or(0, |alias| alias.branch)),
    };
    if let Some(alias) = current
        && alias.version == to
        && alias.follows == follows
    {
        return Err(Refusal::Already {
            alias: name.into(),
            version: to,
        });
    }
    Ok(Change {
        alias: name.into(),
        from: current.map(|alias| alias.version),
        to,
        follows,
        branch,
        withdrawn: false,
        reason: ask.reason.clone(),
    })
}

fn check_name(name: &str) -> Result<(), Refusal> {
    let well_formed = name.len() <= 32
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if !well_formed {
        return Err(Refusal::Name(name.into()));
    }
    if name.starts_with("run-") {
        return Err(Refusal::Run(name.into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Alias, Line};
    use super::*;
    use time::macros::datetime;

    fn books() -> Books {
        let alias = |name: &str, version, follows: Option<&str>| Alias {
            alias: name.into(),
            version,
            follows: follows.map(Into::into),
            branch: 2,
            withdrawn: false,
            created_at: datetime!(2026-11-21 10:00 UTC),
        };
        Books {
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

    fn ask(kind: Kind, alias: &str, version: Option<i64>) -> Ask {
        Ask {
            kind,
            alias: alias.into(),
            version,
            reason: "because".into(),
        }
    }

    #[test]
    fn a_rollback_goes_to_what_served_before_on_a_later_branch() {
        let change = decide(&books(), Some(8), &ask(Kind::Rollback, "champion", None)).unwrap();
        assert_eq!((change.from, change.to, change.branch), (Some(9), 8, 3));
        assert_eq!(change.follows.as_deref(), Some("realtime"));
    }

    #[test]
    fn promoting_the_head_keeps_its_branch() {
        let mut books = books();
        books.aliases[0].version = 8;
        let change = decide(&books, None, &ask(Kind::Promote, "champion", Some(9))).unwrap();
        assert_eq!((change.to, change.branch), (9, 2));
    }

    #[test]
    fn a_pin_follows_nothing_and_keeps_the_version_when_none_is_named() {
        let change = decide(&books(), None, &ask(Kind::Pin, "champion", None)).unwrap();
        assert_eq!((change.to, change.follows), (9, None));
        let change = decide(&books(), None, &ask(Kind::Pin, "champion", Some(5))).unwrap();
        assert_eq!((change.to, change.follows), (5, None));
    }

    #[test]
    fn an_alias_other_than_the_champion_never_follows_the_realtime_line() {
        let change = decide(&books(), None, &ask(Kind::Promote, "fresh", Some(5))).unwrap();
        assert_eq!((change.from, change.to, change.follows), (None, 5, None));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_do() {
        let refused = |kind, alias: &str, version| decide(&books(), None, &ask(kind, alias, version)).unwrap_err();
        assert_eq!(refused(Kind::Promote, "champion", None), Refusal::NoVersion);
        assert_eq!(
            refused(Kind::Rollback, "champion", None),
            Refusal::NothingBefore("champion".into(), 9)
        );
        assert_eq!(
            refused(Kind::Rollback, "ghost", Some(3)),
            Refusal::NoAlias("ghost".into())
        );
        assert_eq!(refused(Kind::Pin, "ghost", None), Refusal::NoAlias("ghost".into()));
        assert_eq!(
            refused(Kind::Pin, "run-0a1b2c3d", Some(3)),
            Refusal::Run("run-0a1b2c3d".into())
        );
        assert_eq!(refused(Kind::Pin, "7", Some(3)), Refusal::Name("7".into()));
        assert_eq!(
            refused(Kind::Promote, "champion", Some(9)),
            Refusal::Already {
                alias: "champion".into(),
                version: 9
            }
        );
    }
}
