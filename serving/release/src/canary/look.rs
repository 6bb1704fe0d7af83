//! What the release loop does with a canary when it looks at it. Pure: no database, no clock.

use super::gate::Gate;
use super::machine::{Event, State};
use super::strategy::{Step, Success};
use super::tables::Canary;
use serde::Serialize;
use std::time::Duration;
use time::OffsetDateTime;

/// What is known at one look.
#[derive(Debug, Clone)]
pub struct Seen {
    pub now: OffsetDateTime,
    /// The version of `champion` now.
    pub champion: i64,
    /// Another canary has users or is about to.
    pub another_is_under_way: bool,
    /// How many different people approved.
    pub approvals: usize,
    /// Why the version cannot have users. Looked at when it is `gated`.
    pub refusal: Option<String>,
    /// What its evaluations say. `None`: none are asked for.
    pub gate: Option<Gate>,
    /// Replicas that load it. `None`: none does yet.
    pub replicas: Option<Prepared>,
    /// The hours in which nothing begins or goes on by itself.
    pub frozen: Option<String>,
    /// Alarms of the policy's realtime run.
    pub alarms: Vec<String>,
    pub found: Found,
}

/// How far the replicas are that answer now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prepared {
    /// Since when they load it.
    pub since: Option<OffsetDateTime>,
    pub ready: usize,
    /// Those that do not hold it yet.
    pub waiting: Vec<String>,
}

/// What the evidence says about the canary beside `champion`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Found {
    /// It is worse: in words.
    pub harm: Option<String>,
    /// It is at most `judge.margin` worse.
    pub not_worse: bool,
    pub better: bool,
    /// Users did not come in the shares of the steps: in words.
    pub mismatch: Option<String>,
    /// Answers are much longer or shorter: in words.
    pub length: Option<String>,
    /// Of the canary.
    #[serde(skip)]
    pub answers: i64,
    /// In words, for the audit.
    pub summary: String,
}

/// What happens, and why. `None`: it goes on as it is.
pub fn look(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    match canary.state {
        State::Proposed => approval(canary, seen),
        State::Gated => gates(canary, seen),
        State::Shadow => moved(canary, seen).or_else(|| shadow(canary, seen)),
        State::Canary | State::Paused | State::Held => {
            moved(canary, seen)
                .or_else(|| harm(seen))
                .or_else(|| match canary.state {
                    State::Canary => monitor(seen).or_else(|| step(canary, seen)),
                    _ => None,
                })
        }
        State::Watched => replaced(canary, seen)
            .or_else(|| harm(seen))
            .or_else(|| watched(canary, seen)),
        State::Champion => replaced(canary, seen),
        State::Retired | State::Aborted | State::RolledBack => None,
    }
}

fn replaced(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    (seen.champion != canary.version).then(|| {
        let reason = format!("champion is version {} now", seen.champion);
        (Event::Supersede, reason)
    })
}

/// It is `champion` for a time, and nothing was found.
fn watched(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    let limit = canary
        .strategy
        .watch
        .as_ref()
        .map(|watch| watch.duration.0)
        .unwrap_or_default();
    let waited: Duration = (seen.now - canary.step_since).try_into().unwrap_or_default();
    (waited >= limit).then(|| {
        let reason = format!(
            "watched for {} s, and no harm was found: {}",
            limit.as_secs(),
            seen.found.summary
        );
        (Event::Pass, reason)
    })
}

fn approval(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    let wanted = canary.strategy.requires_approval as usize;
    if seen.another_is_under_way || seen.approvals < wanted || seen.frozen.is_some() {
        return None;
    }
    let reason = match wanted {
        0 => "it needs no approval, and no other canary is under way".to_owned(),
        _ => format!(
            "{} of {wanted} approved, and no other canary is under way",
            seen.approvals
        ),
    };
    Some((Event::Approve, reason))
}

/// Gates first, then replicas load it. Then it answers unseen, if that is asked for, or gets its first users.
fn gates(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    if let Some(refusal) = &seen.refusal {
        return Some((Event::Refuse, refusal.clone()));
    }
    let passed = match &seen.gate {
        None => "all gates passed".to_owned(),
        Some(Gate::Passed(says)) => format!("all gates passed: {says}"),
        Some(Gate::Refused(why)) => return Some((Event::Refuse, why.clone())),
        Some(Gate::Waits) => return None,
    };
    let Some(replicas) = &seen.replicas else {
        return Some((Event::Prepare, format!("{passed}; replicas load it")));
    };
    let (ready, all) = (replicas.ready, replicas.ready + replicas.waiting.len());
    let limit = canary.strategy.prepare.0;
    let waited: Duration = (seen.now - replicas.since.unwrap_or(seen.now))
        .try_into()
        .unwrap_or_default();
    let is_over = waited >= limit;
    let waiting = match replicas.waiting.is_empty() {
        true => "none answers".to_owned(),
        false => replicas.waiting.join(", "),
    };
    let loaded = match canary.strategy.shadow {
        Some(_) => Event::Shadow,
        None => Event::Pass,
    };
    let (event, reason) = match ready {
        0 if is_over => (
            Event::Refuse,
            format!("no replica has loaded it within {} s: {waiting}", limit.as_secs()),
        ),
        0 => return None,
        _ if ready == all => (loaded, format!("all {all} replicas hold it")),
        _ if is_over => (
            loaded,
            format!(
                "{ready} of {all} replicas hold it after {} s. The others answer with champion alone until they do: {waiting}",
                limit.as_secs()
            ),
        ),
        _ => return None,
    };
    (event == Event::Refuse || seen.frozen.is_none()).then_some((event, reason))
}

/// What the unseen answers say. What would be held for a person later is refused here: no user has it yet.
fn shadow(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    let found = &seen.found;
    let wrong = found.harm.as_ref().or(found.length.as_ref());
    if let Some(wrong) = seen.refusal.as_ref().or(wrong) {
        return Some((Event::Refuse, format!("no user has seen it: {wrong}")));
    }
    let waited: Duration = (seen.now - canary.step_since).try_into().unwrap_or_default();
    let done = canary.strategy.shadow.as_ref().is_none_or(|shadow| {
        let is_enough = found.answers >= i64::from(shadow.answers);
        is_enough || waited >= shadow.timeout.0
    });
    (done && seen.frozen.is_none()).then(|| {
        let (answers, seconds) = (found.answers, waited.as_secs());
        let reason = match answers {
            0 => format!(
                "no unseen answer in {seconds} s: production left no capacity, or no request could be repeated. Users decide"
            ),
            _ => format!("{answers} unseen answers in {seconds} s, and none of the guards found anything"),
        };
        (Event::Pass, reason)
    })
}

/// Whoever moves `champion` ends the comparison.
fn moved(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    let control = canary.control.unwrap_or(seen.champion);
    (seen.champion != control).then(|| {
        let reason = format!(
            "champion moved from version {control} to {}, so there is nothing to compare with",
            seen.champion
        );
        (Event::Supersede, reason)
    })
}

fn harm(seen: &Seen) -> Option<(Event, String)> {
    seen.found.harm.clone().map(|harm| (Event::Harm, harm))
}

fn monitor(seen: &Seen) -> Option<(Event, String)> {
    let found = &seen.found;
    let alarm = (seen.alarms.first())
        .or(found.mismatch.as_ref())
        .or(found.length.as_ref())?;
    Some((Event::Hold, format!("a monitor rings: {alarm}")))
}

/// The step that is under way: whether it is done, or its time is over.
fn step(canary: &Canary, seen: &Seen) -> Option<(Event, String)> {
    if seen.frozen.is_some() {
        return None;
    }
    let waited: Duration = (seen.now - canary.step_since).try_into().unwrap_or_default();
    let done = match canary.strategy.steps.get(canary.step) {
        None => "all steps are made".to_owned(),
        Some(Step::SetWeight(weight)) => format!("{weight}% of champion's users get it"),
        Some(Step::SetClusters(clusters)) => match clusters.is_empty() {
            true => "users of all clusters get it".to_owned(),
            false => format!("users of {} get it", clusters.join(", ")),
        },
        Some(Step::Pause(pause)) => match pause.duration {
            Some(duration) if waited >= duration.0 => format!("paused for {} s", duration.0.as_secs()),
            _ => return None,
        },
        Some(Step::Analysis(analysis)) => {
            let found = &seen.found;
            let succeeded = match analysis.success_condition {
                Success::NotWorse => found.not_worse,
                Success::Better => found.better,
            };
            if !succeeded {
                let timeout = analysis.timeout.0;
                let over = format!("still inconclusive after {} s: {}", timeout.as_secs(), found.summary);
                return (waited >= timeout).then_some((Event::Inconclusive, over));
            }
            found.summary.clone()
        }
    };
    Some(after_step(canary, done))
}

/// The last step makes it `champion`.
fn after_step(canary: &Canary, done: String) -> (Event, String) {
    match canary.step + 1 < canary.strategy.steps.len() {
        true => (Event::Step, done),
        false => (Event::Pass, done),
    }
}

/// The step at which it goes on when a person resumes it: after a pause, and otherwise at the same one,
/// whose time begins anew.
pub fn resumed(canary: &Canary) -> usize {
    let pauses = matches!(canary.strategy.steps.get(canary.step), Some(Step::Pause(_)));
    canary.step + usize::from(pauses)
}

#[cfg(test)]
mod tests {
    use super::super::strategy::Shadow;
    use super::*;
    use serde_json::json;
    use time::macros::datetime;
    use uuid::Uuid;

    const BEGAN: OffsetDateTime = datetime!(2026-12-02 10:00 UTC);

    fn canary(state: State, step: usize) -> Canary {
        let strategy = json!({"steps": [
            {"setWeight": 10}, {"pause": {"duration": "10m"}}, {"analysis": {"successCondition": "not_worse", "timeout": "1h"}},
            {"setWeight": 50}, {"analysis": {"successCondition": "better"}},
        ], "requiresApproval": 2});
        Canary {
            id: Uuid::from_u128(1),
            version: 41,
            control: state.serves().then_some(40),
            strategy: serde_json::from_value(strategy).unwrap(),
            state,
            step,
            step_since: BEGAN,
            actor: "ana".into(),
            reason: "try".into(),
            created_at: BEGAN,
        }
    }

    fn seen(minutes: i64) -> Seen {
        Seen {
            now: BEGAN + time::Duration::minutes(minutes),
            champion: 40,
            another_is_under_way: false,
            approvals: 0,
            refusal: None,
            gate: None,
            replicas: None,
            frozen: None,
            alarms: vec![],
            found: known(false, false),
        }
    }

    fn known(not_worse: bool, better: bool) -> Found {
        Found {
            harm: None,
            not_worse,
            better,
            mismatch: None,
            length: None,
            answers: 0,
            summary: "what is known".into(),
        }
    }

    fn event(canary: &Canary, seen: &Seen) -> Option<Event> {
        look(canary, seen).map(|(event, reason)| {
            assert!(!reason.is_empty());
            assert!(canary.state.after(event).is_ok(), "{:?} {event:?}", canary.state);
            event
        })
    }

    #[test]
    fn it_waits_for_two_people_and_for_the_canary_before_it() {
        let proposed = canary(State::Proposed, 0);
        let with = |approvals, another_is_under_way| Seen {
            approvals,
            another_is_under_way,
            ..seen(0)
        };
        assert_eq!(event(&proposed, &with(1, false)), None);
        assert_eq!(event(&proposed, &with(2, true)), None);
        assert_eq!(event(&proposed, &with(2, false)), Some(Event::Approve));
    }

    #[test]
    fn steps_follow_each_other_by_time_and_by_evidence() {
        let found = |not_worse, better| Seen {
            found: known(not_worse, better),
            ..seen(0)
        };
        assert_eq!(event(&canary(State::Canary, 0), &seen(0)), Some(Event::Step));
        assert_eq!(event(&canary(State::Canary, 1), &seen(9)), None);
        assert_eq!(event(&canary(State::Canary, 1), &seen(10)), Some(Event::Step));
        assert_eq!(event(&canary(State::Canary, 2), &seen(59)), None);
        assert_eq!(event(&canary(State::Canary, 2), &seen(60)), Some(Event::Inconclusive));
        assert_eq!(event(&canary(State::Canary, 2), &found(true, false)), Some(Event::Step));
        assert_eq!(event(&canary(State::Canary, 4), &found(true, false)), None);
        assert_eq!(event(&canary(State::Canary, 4), &found(true, true)), Some(Event::Pass));
    }

    #[test]
    fn harm_ends_it_in_every_state_with_users_even_if_a_step_is_done() {
        for state in [State::Canary, State::Paused, State::Held] {
            let mut harmed = seen(100);
            harmed.found.harm = Some("rewards are lower".into());
            harmed.alarms = vec!["kl".into()];
            assert_eq!(event(&canary(state, 1), &harmed), Some(Event::Harm), "{state:?}");
        }
    }

    #[test]
    fn a_better_version_is_held_while_a_monitor_rings_and_people_decide_then() {
        let mut rings = seen(100);
        rings.alarms = vec!["the show rate fell".into()];
        rings.found.better = true;
        let shorter = Seen {
            alarms: vec![],
            found: Found {
                length: Some("answers are shorter".into()),
                ..rings.found.clone()
            },
            ..rings.clone()
        };
        assert_eq!(event(&canary(State::Canary, 4), &shorter), Some(Event::Hold));
        assert_eq!(event(&canary(State::Canary, 4), &rings), Some(Event::Hold));
        assert_eq!(event(&canary(State::Held, 4), &rings), None);
        assert_eq!(event(&canary(State::Paused, 4), &seen(10_000)), None);
    }

    #[test]
    fn champion_moving_elsewhere_ends_it() {
        let moved = Seen {
            champion: 39,
            ..seen(0)
        };
        for state in [State::Canary, State::Paused, State::Held, State::Champion] {
            assert_eq!(event(&canary(state, 0), &moved), Some(Event::Supersede), "{state:?}");
        }
        let is_champion = Seen {
            champion: 41,
            ..seen(0)
        };
        assert_eq!(event(&canary(State::Champion, 4), &is_champion), None);
    }

    #[test]
    fn a_new_champion_is_watched_and_harm_takes_it_back() {
        let mut watched = canary(State::Watched, 4);
        watched.strategy.watch = serde_json::from_value(json!({"duration": "1h"})).unwrap();
        let seen = |minutes| Seen {
            champion: 41,
            ..seen(minutes)
        };
        assert_eq!(event(&watched, &seen(59)), None);
        assert_eq!(event(&watched, &seen(60)), Some(Event::Pass));
        let mut harmed = seen(60);
        harmed.found.harm = Some("rewards are lower".into());
        assert_eq!(event(&watched, &harmed), Some(Event::Harm));
        harmed.champion = 42;
        assert_eq!(event(&watched, &harmed), Some(Event::Supersede));
    }

    #[test]
    fn gates_decide_at_once() {
        let refused = Seen {
            refusal: Some("its objects are gone".into()),
            ..seen(0)
        };
        assert_eq!(event(&canary(State::Gated, 0), &refused), Some(Event::Refuse));
        assert_eq!(event(&canary(State::Gated, 0), &seen(0)), Some(Event::Prepare));
        let with = |gate| Seen {
            gate: Some(gate),
            ..seen(0)
        };
        let gated = canary(State::Gated, 0);
        assert_eq!(event(&gated, &with(Gate::Waits)), None);
        assert_eq!(event(&gated, &with(Gate::Refused("worse".into()))), Some(Event::Refuse));
        assert_eq!(
            event(&gated, &with(Gate::Passed("as good".into()))),
            Some(Event::Prepare)
        );
    }

    #[test]
    fn replicas_load_it_before_the_first_user_gets_it() {
        let gated = canary(State::Gated, 0);
        let with = |minutes, ready, waiting: &[&str]| Seen {
            replicas: Some(Prepared {
                since: Some(BEGAN),
                ready,
                waiting: waiting.iter().map(|id| (*id).to_owned()).collect(),
            }),
            ..seen(minutes)
        };
        assert_eq!(event(&gated, &with(0, 2, &[])), Some(Event::Pass));
        assert_eq!(event(&gated, &with(4, 1, &["r2"])), None);
        assert_eq!(event(&gated, &with(5, 1, &["r2"])), Some(Event::Pass));
        assert_eq!(event(&gated, &with(4, 0, &["r1", "r2"])), None);
        assert_eq!(event(&gated, &with(5, 0, &["r1", "r2"])), Some(Event::Refuse));
        assert_eq!(event(&gated, &with(4, 0, &[])), None, "no replica answers");
        assert_eq!(event(&gated, &with(5, 0, &[])), Some(Event::Refuse));
        let (_, reason) = look(&gated, &with(5, 1, &["r2"])).unwrap();
        assert!(reason.contains("1 of 2 replicas") && reason.contains("r2"), "{reason}");
    }

    #[test]
    fn unseen_answers_come_before_the_first_user_if_they_are_asked_for() {
        let with_shadow = |state| {
            let mut canary = canary(state, 0);
            canary.strategy.shadow = Some(Shadow::default());
            canary.control = Some(40);
            canary
        };
        let loaded = Seen {
            replicas: Some(Prepared {
                ready: 1,
                ..Prepared::default()
            }),
            ..seen(0)
        };
        assert_eq!(event(&with_shadow(State::Gated), &loaded), Some(Event::Shadow));
        let shadow = with_shadow(State::Shadow);
        let with = |minutes, answers| Seen {
            found: Found {
                answers,
                ..Found::default()
            },
            ..seen(minutes)
        };
        assert_eq!(event(&shadow, &with(9, 199)), None);
        assert_eq!(event(&shadow, &with(0, 200)), Some(Event::Pass));
        assert_eq!(event(&shadow, &with(10, 0)), Some(Event::Pass), "users decide");
        let mut harmed = with(0, 200);
        harmed.found.harm = Some("it fails".into());
        assert_eq!(event(&shadow, &harmed), Some(Event::Refuse));
        let mut longer = with(0, 200);
        longer.found.length = Some("answers are longer".into());
        assert_eq!(event(&shadow, &longer), Some(Event::Refuse));
        let frozen = Seen {
            frozen: Some("22:00-06:00".into()),
            ..with(10, 200)
        };
        assert_eq!(event(&shadow, &frozen), None);
    }

    #[test]
    fn while_frozen_nothing_begins_or_goes_on_but_harm_still_ends_it() {
        let frozen = |minutes| Seen {
            frozen: Some("22:00-06:00 Europe/Berlin".into()),
            approvals: 2,
            ..seen(minutes)
        };
        assert_eq!(event(&canary(State::Proposed, 0), &frozen(0)), None);
        for step in [0, 1, 2] {
            assert_eq!(event(&canary(State::Canary, step), &frozen(100)), None, "{step}");
        }
        let loaded = Seen {
            replicas: Some(Prepared {
                ready: 1,
                ..Prepared::default()
            }),
            ..frozen(0)
        };
        let mut with_shadow = canary(State::Gated, 0);
        assert_eq!(event(&with_shadow, &loaded), None);
        with_shadow.strategy.shadow = Some(Shadow::default());
        assert_eq!(event(&with_shadow, &loaded), None);
        let mut harmed = frozen(0);
        harmed.found.harm = Some("rewards are lower".into());
        assert_eq!(event(&canary(State::Canary, 0), &harmed), Some(Event::Harm));
    }

    #[test]
    fn a_person_ends_a_pause_and_lets_an_analysis_go_on() {
        assert_eq!(resumed(&canary(State::Canary, 1)), 2);
        // after the last step there is only `champion`
        assert_eq!(event(&canary(State::Canary, 5), &seen(0)), Some(Event::Pass));
        assert_eq!(resumed(&canary(State::Held, 1)), 2);
        assert_eq!(resumed(&canary(State::Paused, 2)), 2);
    }
}
