//! What should change, given what is: the state machine of releases. Pure: no database, no clock, no store.

use super::{BASE, CANDIDATE, CHAMPION, REALTIME};
use time::OffsetDateTime;
use uuid::Uuid;

/// The books as of one moment.
#[derive(Debug, Clone, Default)]
pub struct Books {
    pub aliases: Vec<Alias>,
    pub lines: Vec<Line>,
    pub runs: Vec<Run>,
}

/// An alias as last assigned.
#[derive(Debug, Clone, PartialEq)]
pub struct Alias {
    pub alias: String,
    pub version: i64,
    /// Line whose head it follows; None: pinned.
    pub follows: Option<String>,
    /// Heads of earlier branches of that line are not followed.
    pub branch: i32,
    pub withdrawn: bool,
    pub created_at: OffsetDateTime,
}

/// A line and where it stands.
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

/// One alias moving.
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

impl Books {
    /// The alias in force, if it is there and not withdrawn.
    pub fn alias(&self, name: &str) -> Option<&Alias> {
        self.aliases.iter().find(|a| a.alias == name && !a.withdrawn)
    }

    pub fn line(&self, name: &str) -> Option<&Line> {
        self.lines.iter().find(|l| l.line == name)
    }
}

/// Everything that the loop changes by itself, all of it in one epoch. Empty: nothing to do.
pub fn plan(books: &Books) -> Vec<Change> {
    let mut changes = Vec::new();
    begin(books, &mut changes);
    follow_lines(books, &mut changes);
    lend_aliases_to_runs(books, &mut changes);
    propose_candidate(books, &mut changes);
    changes
}

/// `champion` and `base`, as soon as the realtime line has a version.
fn begin(books: &Books, changes: &mut Vec<Change>) {
    let Some(line) = books.line(REALTIME) else { return };
    if books.alias(CHAMPION).is_none() {
        changes.push(Change {
            alias: CHAMPION.into(),
            from: None,
            to: line.head,
            follows: Some(REALTIME.into()),
            branch: line.branch,
            withdrawn: false,
            reason: format!("line {REALTIME} has its head at version {}", line.head),
        });
    }
    if books.alias(BASE).is_none() {
        changes.push(Change {
            alias: BASE.into(),
            from: None,
            to: line.first,
            follows: None,
            branch: 0,
            withdrawn: false,
            reason: format!("version {} is the first of line {REALTIME}", line.first),
        });
    }
}

/// Aliases that follow a line go where its head goes; a head of a branch that was left behind is not followed.
fn follow_lines(books: &Books, changes: &mut Vec<Change>) {
    for alias in books.aliases.iter().filter(|a| !a.withdrawn) {
        let Some(line) = alias.follows.as_deref().and_then(|name| books.line(name)) else {
            continue;
        };
        if line.head == alias.version || line.branch < alias.branch {
            continue;
        }
        changes.push(Change {
            alias: alias.alias.clone(),
            from: Some(alias.version),
            to: line.head,
            follows: alias.follows.clone(),
            branch: line.branch,
            withdrawn: false,
            reason: format!("head of line {} moved to version {}", line.line, line.head),
        });
    }
}

/// A run that samples gets an alias of its line's name while it runs, so that the fleet holds its head.
fn lend_aliases_to_runs(books: &Books, changes: &mut Vec<Change>) {
    for run in &books.runs {
        let samples = matches!(run.kind.as_str(), "grpo" | "evaluate");
        let active = matches!(run.status.as_str(), "running" | "pausing" | "paused");
        let line = books.line(&run.line);
        match books.alias(&run.line) {
            None if samples && active => {
                let Some(version) = line.map(|l| l.head).or(run.base_version) else {
                    continue;
                };
                changes.push(Change {
                    alias: run.line.clone(),
                    from: None,
                    to: version,
                    follows: Some(run.line.clone()),
                    branch: line.map_or(0, |l| l.branch),
                    withdrawn: false,
                    reason: format!("run {} samples from version {version}", run.id),
                });
            }
            Some(alias) if is_over(run) => {
                // it may have been about to follow; it leaves instead
                changes.retain(|change| change.alias != alias.alias);
                changes.push(Change {
                    alias: alias.alias.clone(),
                    from: Some(alias.version),
                    to: alias.version,
                    follows: None,
                    branch: alias.branch,
                    withdrawn: true,
                    reason: format!("run {} is {}", run.id, run.status),
                });
            }
            _ => {}
        }
    }
}

/// The head of the latest run that succeeded, unless a person named a candidate since.
fn propose_candidate(books: &Books, changes: &mut Vec<Change>) {
    let latest = books
        .runs
        .iter()
        .filter(|run| run.status == "succeeded")
        .filter_map(|run| {
            let line = books.line(&run.line)?;
            // a line still at its starting point has made nothing
            (Some(line.head) != run.base_version).then_some((run.finished_at?, run, line))
        })
        .max_by_key(|(finished_at, ..)| *finished_at);
    let Some((finished_at, run, line)) = latest else { return };
    let current = books.alias(CANDIDATE);
    if current.is_some_and(|alias| alias.created_at >= finished_at || alias.version == line.head) {
        return;
    }
    changes.push(Change {
        alias: CANDIDATE.into(),
        from: current.map(|alias| alias.version),
        to: line.head,
        follows: None,
        branch: line.branch,
        withdrawn: false,
        reason: format!("run {} succeeded with version {}", run.id, line.head),
    });
}

fn is_over(run: &Run) -> bool {
    matches!(run.status.as_str(), "succeeded" | "failed" | "cancelled")
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn realtime(head: i64, branch: i32) -> Line {
        Line {
            line: REALTIME.into(),
            head,
            branch,
            first: 1,
        }
    }

    fn alias(name: &str, version: i64, follows: Option<&str>, branch: i32) -> Alias {
        Alias {
            alias: name.into(),
            version,
            follows: follows.map(Into::into),
            branch,
            withdrawn: false,
            created_at: datetime!(2026-11-21 10:00 UTC),
        }
    }

    fn running(version: i64, branch: i32) -> Books {
        Books {
            aliases: vec![
                alias(CHAMPION, version, Some(REALTIME), branch),
                alias(BASE, 1, None, 0),
            ],
            lines: vec![realtime(version, branch)],
            runs: Vec::new(),
        }
    }

    fn grpo(status: &str) -> Run {
        Run {
            id: Uuid::nil(),
            kind: "grpo".into(),
            line: "run-00000000".into(),
            status: status.into(),
            base_version: Some(3),
            finished_at: Some(datetime!(2026-11-21 11:00 UTC)),
        }
    }

    fn moves(changes: &[Change]) -> Vec<(&str, Option<i64>, i64)> {
        changes.iter().map(|c| (c.alias.as_str(), c.from, c.to)).collect()
    }

    #[test]
    fn nothing_is_assigned_before_the_first_version() {
        assert_eq!(plan(&Books::default()), []);
    }

    #[test]
    fn the_first_version_becomes_champion_and_base_at_once() {
        let books = Books {
            lines: vec![realtime(2, 0)],
            ..Books::default()
        };
        let changes = plan(&books);
        assert_eq!(moves(&changes), [(CHAMPION, None, 2), (BASE, None, 1)]);
        assert_eq!(changes[0].follows.as_deref(), Some(REALTIME));
        assert_eq!(changes[1].follows, None);
    }

    #[test]
    fn the_champion_follows_the_head_and_base_stays() {
        let mut books = running(4, 0);
        assert_eq!(plan(&books), []);
        books.lines[0].head = 5;
        assert_eq!(moves(&plan(&books)), [(CHAMPION, Some(4), 5)]);
    }

    #[test]
    fn after_a_rollback_the_old_branch_is_not_followed_and_the_new_one_is() {
        let mut books = running(9, 0);
        books.aliases[0] = alias(CHAMPION, 7, Some(REALTIME), 1);
        assert_eq!(plan(&books), [], "line is still on branch 0");
        books.lines[0] = realtime(7, 1);
        assert_eq!(plan(&books), [], "re-based on what serves");
        books.lines[0] = realtime(10, 1);
        assert_eq!(moves(&plan(&books)), [(CHAMPION, Some(7), 10)]);
    }

    #[test]
    fn a_pinned_champion_stays() {
        let mut books = running(4, 0);
        books.aliases[0].follows = None;
        books.lines[0].head = 8;
        assert_eq!(plan(&books), []);
    }

    #[test]
    fn a_run_has_an_alias_while_it_runs_and_leaves_a_candidate() {
        let mut books = running(4, 0);
        books.runs = vec![grpo("queued")];
        assert_eq!(plan(&books), []);
        books.runs = vec![grpo("running")];
        assert_eq!(
            moves(&plan(&books)),
            [("run-00000000", None, 3)],
            "its base, before its first step"
        );
        books.aliases.push(alias("run-00000000", 3, Some("run-00000000"), 0));
        assert_eq!(plan(&books), []);
        books.lines.push(Line {
            line: "run-00000000".into(),
            head: 11,
            branch: 0,
            first: 11,
        });
        assert_eq!(moves(&plan(&books)), [("run-00000000", Some(3), 11)]);
        books.runs = vec![grpo("succeeded")];
        let changes = plan(&books);
        assert_eq!(moves(&changes), [("run-00000000", Some(3), 3), (CANDIDATE, None, 11)]);
        assert!(changes[0].withdrawn && !changes[1].withdrawn);
    }

    #[test]
    fn a_failed_run_leaves_nothing() {
        let mut books = running(4, 0);
        books.runs = vec![grpo("failed")];
        books.lines.push(Line {
            line: "run-00000000".into(),
            head: 11,
            branch: 0,
            first: 11,
        });
        books.aliases.push(alias("run-00000000", 11, Some("run-00000000"), 0));
        let changes = plan(&books);
        assert_eq!(moves(&changes), [("run-00000000", Some(11), 11)]);
        assert!(changes[0].withdrawn);
        books.aliases[2].withdrawn = true;
        assert_eq!(plan(&books), []);
    }

    #[test]
    fn a_candidate_named_later_by_hand_is_kept() {
        let mut books = running(4, 0);
        books.runs = vec![grpo("succeeded")];
        books.lines.push(Line {
            line: "run-00000000".into(),
            head: 11,
            branch: 0,
            first: 11,
        });
        books.aliases.push(alias(CANDIDATE, 6, None, 0));
        assert_eq!(
            moves(&plan(&books)),
            [(CANDIDATE, Some(6), 11)],
            "named before the run ended"
        );
        books.aliases[2].created_at = datetime!(2026-11-21 11:30 UTC);
        assert_eq!(plan(&books), []);
    }

    #[test]
    fn carrying_out_a_plan_leaves_nothing_to_plan() {
        let mut books = running(4, 0);
        books.lines[0].head = 6;
        books.runs = vec![grpo("running")];
        for change in plan(&books) {
            books.aliases.retain(|a| a.alias != change.alias);
            books.aliases.push(Alias {
                alias: change.alias,
                version: change.to,
                follows: change.follows,
                branch: change.branch,
                withdrawn: change.withdrawn,
                created_at: datetime!(2026-11-21 12:00 UTC),
            });
        }
        assert_eq!(plan(&books), []);
    }
}
