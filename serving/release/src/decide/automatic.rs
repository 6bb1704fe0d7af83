//! The moves that the release loop makes by itself. Pure.

use super::super::{BASE, CANDIDATE, CHAMPION, ChampionBy, LEARNER, LearningAlias, REALTIME};
use super::{Change, ReleaseState, Run};

/// All automatic changes, to be written as one epoch. Empty: nothing to do.
pub fn plan(state: &ReleaseState) -> Vec<Change> {
    let mut changes = Vec::new();
    assign_first_version(state, &mut changes);
    follow_lines(state, &mut changes);
    follow_learner(state, &mut changes);
    give_aliases_to_runs(state, &mut changes);
    propose_candidate(state, &mut changes);
    changes
}

/// `learner`, `champion` and `base` exist as soon as the realtime line has a version.
fn assign_first_version(state: &ReleaseState, changes: &mut Vec<Change>) {
    let Some(line) = state.line(REALTIME) else { return };
    let champion = state.alias(CHAMPION);
    let at_head = |alias| {
        let reason = format!("line {REALTIME} has its head at version {}", line.head);
        Change {
            follows: Some(REALTIME.into()),
            branch: line.branch,
            ..state.pin(alias, line.head, reason)
        }
    };
    if state.rules.learning == LearningAlias::Learner && state.alias(LEARNER).is_none() {
        // It takes over what people did to `champion`.
        changes.push(champion.map_or_else(
            || at_head(LEARNER),
            |champion| Change {
                follows: champion.follows.clone(),
                branch: champion.branch,
                ..state.pin(
                    LEARNER,
                    champion.version,
                    "the run learns from it instead of champion now",
                )
            },
        ));
    }
    if champion.is_none() {
        let mut first = at_head(CHAMPION);
        if state.rules.champion == ChampionBy::Canary {
            first.follows = None;
        }
        changes.push(first);
    }
    if state.alias(BASE).is_none() {
        let reason = format!("version {} is the first of line {REALTIME}", line.first);
        changes.push(state.pin(BASE, line.first, reason));
    }
}

/// Aliases that follow a line move to its head. Heads of abandoned branches are not followed.
fn follow_lines(state: &ReleaseState, changes: &mut Vec<Change>) {
    let by_way_of_learner = |alias: &str| alias == CHAMPION && state.rules.learning == LearningAlias::Learner;
    for alias in state.aliases.iter().filter(|alias| !alias.withdrawn) {
        if by_way_of_learner(&alias.alias) {
            continue;
        }
        let Some(line) = alias.follows.as_deref().and_then(|name| state.line(name)) else {
            continue;
        };
        if line.head == alias.version || line.branch < alias.branch {
            continue;
        }
        let reason = format!("head of line {} moved to version {}", line.line, line.head);
        changes.push(Change {
            follows: alias.follows.clone(),
            branch: line.branch,
            ..state.pin(&alias.alias, line.head, reason)
        });
    }
}

/// `champion` moves to the version of `learner` when it is `champion_every` versions behind, or when
/// `learner` left it. A pinned `champion` stays, as one that canaries move; and nothing bad is followed.
fn follow_learner(state: &ReleaseState, changes: &mut Vec<Change>) {
    if state.rules.champion == ChampionBy::Canary {
        return;
    }
    let Some(learner) = state.learner() else { return };
    let Some(champion) = state.alias(CHAMPION).filter(|champion| champion.follows.is_some()) else {
        return;
    };
    let moved = changes.iter().find(|change| change.alias == LEARNER);
    let (newest, branch) = moved.map_or((learner.version, learner.branch), |moved| (moved.to, moved.branch));
    if newest == champion.version || !state.is_behind(champion.version, newest) || state.bad.contains(&newest) {
        return;
    }
    let every = match state.rules.champion_every {
        1 => String::new(),
        n => format!(", which is {n} or more versions further"),
    };
    changes.push(Change {
        follows: champion.follows.clone(),
        branch,
        ..state.pin(CHAMPION, newest, format!("{LEARNER} moved to version {newest}{every}"))
    });
}

/// While a run samples, it has an alias with its line's name, so that the fleet loads its head.
fn give_aliases_to_runs(state: &ReleaseState, changes: &mut Vec<Change>) {
    for run in &state.runs {
        let samples = run.kind == "grpo";
        let active = matches!(run.status.as_str(), "running" | "pausing" | "paused");
        let line = state.line(&run.line);
        match state.alias(&run.line) {
            None if samples && active => {
                let Some(version) = line.map(|line| line.head).or(run.base_version) else {
                    continue;
                };
                let reason = format!("run {} samples from version {version}", run.id);
                changes.push(Change {
                    follows: Some(run.line.clone()),
                    branch: line.map_or(0, |line| line.branch),
                    ..state.pin(&run.line, version, reason)
                });
            }
            Some(alias) if is_over(run) => {
                // a withdrawal replaces a move to the line's head
                changes.retain(|change| change.alias != alias.alias);
                let reason = format!("run {} is {}", run.id, run.status);
                changes.push(Change {
                    withdrawn: true,
                    ..state.pin(&alias.alias, alias.version, reason)
                });
            }
            _ => {}
        }
    }
}

/// `candidate` is the head of the latest run that succeeded, unless a person named a candidate
/// since.
fn propose_candidate(state: &ReleaseState, changes: &mut Vec<Change>) {
    let succeeded = state.runs.iter().filter(|run| run.status == "succeeded");
    let latest = succeeded
        .filter_map(|run| {
            let line = state.line(&run.line)?;
            // a run without a new version proposes nothing
            (Some(line.head) != run.base_version).then_some((run.finished_at?, run, line))
        })
        .max_by_key(|(finished_at, ..)| *finished_at);
    let Some((finished_at, run, line)) = latest else { return };
    let current = state.alias(CANDIDATE);
    if current.is_some_and(|alias| alias.created_at >= finished_at || alias.version == line.head) {
        return;
    }
    let reason = format!("run {} succeeded with version {}", run.id, line.head);
    changes.push(Change {
        branch: line.branch,
        ..state.pin(CANDIDATE, line.head, reason)
    });
}

fn is_over(run: &Run) -> bool {
    matches!(run.status.as_str(), "succeeded" | "failed" | "cancelled")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{Alias, Line};
    use time::macros::datetime;
    use uuid::Uuid;

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

    /// `learner` and `champion` at the head.
    fn running(version: i64, branch: i32) -> ReleaseState {
        ReleaseState {
            aliases: vec![
                alias(LEARNER, version, Some(REALTIME), branch),
                alias(CHAMPION, version, Some(REALTIME), branch),
                alias(BASE, 1, None, 0),
            ],
            lines: vec![realtime(version, branch)],
            ..ReleaseState::default()
        }
    }

    /// Configured to learn from `champion`.
    fn without_learner(version: i64, branch: i32) -> ReleaseState {
        let mut state = running(version, branch);
        state.aliases.remove(0);
        state.rules.learning = LearningAlias::Champion;
        state
    }

    /// The line 1 ← 2 ← … ← `head`, whose learner is at the head and whose champion is at `champion`.
    fn every(champion_every: u32, champion: i64, head: i64) -> ReleaseState {
        let mut state = running(head, 0);
        state.rules.champion_every = champion_every;
        state.aliases[1].version = champion;
        state.parents = (2..=head).map(|version| (version, version - 1)).collect();
        state
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
        assert_eq!(plan(&ReleaseState::default()), []);
    }

    #[test]
    fn the_first_version_becomes_learner_champion_and_base_at_once() {
        let mut state = ReleaseState {
            lines: vec![realtime(2, 0)],
            ..ReleaseState::default()
        };
        let changes = plan(&state);
        assert_eq!(
            moves(&changes),
            [(LEARNER, None, 2), (CHAMPION, None, 2), (BASE, None, 1)]
        );
        let follows: Vec<_> = changes.iter().map(|change| change.follows.as_deref()).collect();
        assert_eq!(follows, [Some(REALTIME), Some(REALTIME), None]);
        state.rules.learning = LearningAlias::Champion;
        assert_eq!(moves(&plan(&state)), [(CHAMPION, None, 2), (BASE, None, 1)]);
    }

    #[test]
    fn champion_does_not_follow_what_is_bad_nor_where_canaries_move_it() {
        let mut state = every(1, 8, 9);
        assert_eq!(moves(&plan(&state)), [(CHAMPION, Some(8), 9)]);
        state.bad = [9].into();
        assert_eq!(plan(&state), []);
        state.bad.clear();
        state.rules.champion = ChampionBy::Canary;
        assert_eq!(plan(&state), []);
        let first = ReleaseState {
            lines: vec![realtime(2, 0)],
            rules: state.rules,
            ..ReleaseState::default()
        };
        let changes = plan(&first);
        let champion = changes.iter().find(|change| change.alias == CHAMPION).unwrap();
        assert_eq!((champion.to, &champion.follows), (2, &None));
    }

    #[test]
    fn a_learner_that_comes_later_begins_as_champion_is() {
        for (follows, branch) in [(Some(REALTIME), 0), (Some(REALTIME), 1), (None, 0)] {
            let mut state = running(9, 0);
            state.aliases = vec![alias(CHAMPION, 7, follows, branch), alias(BASE, 1, None, 0)];
            let changes = plan(&state);
            assert_eq!(moves(&changes), [(LEARNER, None, 7)]);
            assert_eq!((changes[0].follows.as_deref(), changes[0].branch), (follows, branch));
        }
    }

    #[test]
    fn learner_and_champion_follow_every_head_in_one_epoch_and_base_stays() {
        let mut state = running(4, 0);
        assert_eq!(plan(&state), []);
        state.lines[0].head = 5;
        assert_eq!(moves(&plan(&state)), [(LEARNER, Some(4), 5), (CHAMPION, Some(4), 5)]);
    }

    #[test]
    fn champion_follows_each_nth_head() {
        assert_eq!(plan(&every(3, 4, 4)), []);
        assert_eq!(plan(&every(3, 4, 5)), []);
        assert_eq!(plan(&every(3, 4, 6)), []);
        assert_eq!(moves(&plan(&every(3, 4, 7))), [(CHAMPION, Some(4), 7)]);
        assert_eq!(
            moves(&plan(&every(3, 4, 12))),
            [(CHAMPION, Some(4), 12)],
            "the loop was away meanwhile"
        );
        let mut next = every(3, 4, 6);
        next.lines[0].head = 7;
        next.parents.insert(7, 6);
        assert_eq!(
            moves(&plan(&next)),
            [(LEARNER, Some(6), 7), (CHAMPION, Some(4), 7)],
            "both in one epoch"
        );
    }

    #[test]
    fn champion_counts_versions_of_the_line_and_not_their_numbers() {
        let mut state = every(2, 4, 4);
        // 5 and 6 are of other runs
        state.parents.insert(7, 4);
        (state.aliases[0].version, state.lines[0].head) = (7, 7);
        assert_eq!(plan(&state), []);
    }

    #[test]
    fn champion_leaves_a_version_that_learner_left() {
        // a person took learner from 9 back to 5; its next version is 10
        let mut state = every(4, 8, 9);
        state.aliases[0] = alias(LEARNER, 5, Some(REALTIME), 1);
        assert_eq!(moves(&plan(&state)), [(CHAMPION, Some(8), 5)]);
        state.aliases[1].version = 4;
        assert_eq!(plan(&state), [], "an ancestor of where learner went on");
        state.lines[0] = realtime(10, 1);
        state.parents.insert(10, 5);
        assert_eq!(moves(&plan(&state)), [(LEARNER, Some(5), 10)]);
    }

    #[test]
    fn after_a_rollback_champion_holds_and_learner_follows_only_the_new_branch() {
        let mut state = running(9, 0);
        state.aliases[0] = alias(LEARNER, 7, Some(REALTIME), 1);
        state.aliases[1] = alias(CHAMPION, 7, None, 1);
        assert_eq!(plan(&state), [], "line is still on branch 0");
        state.lines[0] = realtime(7, 1);
        assert_eq!(plan(&state), [], "the new head is the served version");
        state.lines[0] = realtime(10, 1);
        assert_eq!(moves(&plan(&state)), [(LEARNER, Some(7), 10)]);
    }

    #[test]
    fn a_pinned_alias_stays() {
        let mut state = running(4, 0);
        state.lines[0].head = 8;
        state.aliases[1].follows = None;
        assert_eq!(moves(&plan(&state)), [(LEARNER, Some(4), 8)]);
        state.aliases[0].follows = None;
        assert_eq!(plan(&state), []);
        state.aliases[1].follows = Some(REALTIME.into());
        assert_eq!(plan(&state), [], "champion follows learner, which is pinned");
    }

    #[test]
    fn without_a_learner_champion_follows_every_head_of_its_branch() {
        let mut state = without_learner(4, 0);
        state.rules.champion_every = 5;
        assert_eq!(plan(&state), []);
        state.lines[0].head = 5;
        assert_eq!(moves(&plan(&state)), [(CHAMPION, Some(4), 5)]);
        let mut state = without_learner(9, 0);
        state.aliases[0] = alias(CHAMPION, 7, Some(REALTIME), 1);
        assert_eq!(plan(&state), [], "line is still on branch 0");
        state.lines[0] = realtime(10, 1);
        assert_eq!(moves(&plan(&state)), [(CHAMPION, Some(7), 10)]);
        state.aliases[0].follows = None;
        assert_eq!(plan(&state), []);
    }

    #[test]
    fn a_run_has_an_alias_while_it_runs_and_its_result_becomes_the_candidate() {
        let mut state = running(4, 0);
        state.runs = vec![grpo("queued")];
        assert_eq!(plan(&state), []);
        state.runs = vec![grpo("running")];
        assert_eq!(
            moves(&plan(&state)),
            [("run-00000000", None, 3)],
            "the base version, before the first step"
        );
        state.aliases.push(alias("run-00000000", 3, Some("run-00000000"), 0));
        assert_eq!(plan(&state), []);
        state.lines.push(Line {
            line: "run-00000000".into(),
            head: 11,
            branch: 0,
            first: 11,
        });
        assert_eq!(moves(&plan(&state)), [("run-00000000", Some(3), 11)]);
        state.runs = vec![grpo("succeeded")];
        let changes = plan(&state);
        assert_eq!(moves(&changes), [("run-00000000", Some(3), 3), (CANDIDATE, None, 11)]);
        assert!(changes[0].withdrawn && !changes[1].withdrawn);
    }

    #[test]
    fn a_failed_run_produces_no_candidate() {
        let mut state = running(4, 0);
        state.runs = vec![grpo("failed")];
        state.lines.push(Line {
            line: "run-00000000".into(),
            head: 11,
            branch: 0,
            first: 11,
        });
        state.aliases.push(alias("run-00000000", 11, Some("run-00000000"), 0));
        let changes = plan(&state);
        assert_eq!(moves(&changes), [("run-00000000", Some(11), 11)]);
        assert!(changes[0].withdrawn);
        state.aliases[3].withdrawn = true;
        assert_eq!(plan(&state), []);
    }

    #[test]
    fn a_candidate_that_a_person_named_later_is_kept() {
        let mut state = running(4, 0);
        state.runs = vec![grpo("succeeded")];
        state.lines.push(Line {
            line: "run-00000000".into(),
            head: 11,
            branch: 0,
            first: 11,
        });
        state.aliases.push(alias(CANDIDATE, 6, None, 0));
        assert_eq!(
            moves(&plan(&state)),
            [(CANDIDATE, Some(6), 11)],
            "named before the run ended"
        );
        state.aliases[3].created_at = datetime!(2026-11-21 11:30 UTC);
        assert_eq!(plan(&state), []);
    }

    #[test]
    fn applying_a_plan_leaves_nothing_to_do() {
        let mut state = running(4, 0);
        state.lines[0].head = 6;
        state.runs = vec![grpo("running")];
        for change in plan(&state) {
            state.aliases.retain(|a| a.alias != change.alias);
            state.aliases.push(Alias {
                alias: change.alias,
                version: change.to,
                follows: change.follows,
                branch: change.branch,
                withdrawn: change.withdrawn,
                created_at: datetime!(2026-11-21 12:00 UTC),
            });
        }
        assert_eq!(plan(&state), []);
    }
}
