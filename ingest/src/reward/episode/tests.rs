use super::*;
use crate::reward::{Definition, Metric, MetricType, Unit};

const START: OffsetDateTime = time::macros::datetime!(2026-11-21 12:00 UTC);

fn at(milliseconds: i64) -> OffsetDateTime {
    START + Duration::milliseconds(milliseconds)
}

fn turn(number: i32, finished_ms: i64) -> Turn {
    Turn {
        id: Uuid::from_u128(u128::try_from(number).unwrap() + 1),
        surface: "session".to_owned(),
        policy: "demo".to_owned(),
        run_id: None,
        segment: 0,
        number,
        sampled_at: at(finished_ms - 100),
        stored_at: at(finished_ms),
        closing: Closing {
            starts_at: at(finished_ms),
            tokens: 10,
            ..Closing::example()
        },
    }
}

/// A horizon of one second.
fn session() -> Definition {
    Definition {
        name: "session".to_owned(),
        trajectory: Unit::Episode,
        horizon_seconds: 1.0,
        decline: None,
        ..Definition::completion()
    }
}

fn rule(definition: Definition) -> Rule {
    let metrics = [
        Metric::new("accept", MetricType::Boolean),
        Metric::new("kept", MetricType::Float),
        Metric::new("comment", MetricType::Comment),
    ];
    Rule::new(definition, &metrics).unwrap()
}

fn accept(value: bool, given_ms: i64) -> Signal {
    Signal {
        id: Uuid::from_u128(u128::try_from(given_ms).unwrap()),
        metric: "accept".to_owned(),
        value: Value::Bool(value),
        given_at: at(given_ms),
        retracted_at: None,
    }
}

fn kept(value: f64, given_ms: i64) -> Signal {
    Signal {
        metric: "kept".to_owned(),
        value: Value::Float(value),
        ..accept(true, given_ms)
    }
}

fn retracted(given_ms: i64, signal: Signal) -> Signal {
    Signal {
        retracted_at: Some(at(given_ms)),
        ..signal
    }
}

/// The numbers of the turns, of those that are late, and when signals and turns cease to count.
fn divided(
    definition: Definition,
    turns: &[Turn],
    ended_ms: Option<i64>,
    signals: &[Signal],
) -> (Vec<i32>, Vec<i32>, i64, i64) {
    let divided = divide(turns.to_vec(), ended_ms.map(at), &rule(definition), signals);
    let numbers = |turns: &[Turn]| turns.iter().map(|turn| turn.number).collect();
    let after = |at: OffsetDateTime| i64::try_from((at - START).whole_milliseconds()).unwrap();
    (
        numbers(&divided.turns),
        numbers(&divided.late),
        after(divided.closes_at),
        after(divided.over_at),
    )
}

#[test]
fn the_horizon_counts_from_the_last_turn_and_a_turn_after_it_is_late() {
    let turns = [turn(0, 0), turn(1, 900), turn(2, 1_900), turn(3, 2_901)];
    for turns in [turns.to_vec(), turns.iter().rev().cloned().collect()] {
        let expected = (vec![0, 1, 2], vec![3], 2_900, 2_900);
        assert_eq!(divided(session(), &turns, Some(500), &[accept(true, 10)]), expected);
    }
    // A turn after a late one is late too.
    let turns = [turn(0, 0), turn(1, 1_500), turn(2, 1_600)];
    assert_eq!(
        divided(session(), &turns, None, &[]),
        (vec![0], vec![1, 2], 1_000, 1_000)
    );
}

#[test]
fn an_end_or_feedback_closes_early_but_turns_may_come_a_second_later() {
    let ending = || Definition {
        close_on_episode_end: true,
        horizon_seconds: 9.0,
        ..session()
    };
    let turns = [turn(0, 0), turn(1, 1_400), turn(2, 1_501)];
    assert_eq!(
        divided(ending(), &turns, Some(500), &[]),
        (vec![0, 1], vec![2], 500, 1_500)
    );
    assert_eq!(divided(ending(), &turns, None, &[]).0, [0, 1, 2]);
    // The first turn is never late.
    assert_eq!(
        divided(ending(), &turns[2..], Some(0), &[]),
        (vec![2], vec![], 1_501, 2_501)
    );
    let graded = || Definition {
        close_on_feedback: true,
        horizon_seconds: 9.0,
        ..session()
    };
    let signals = [accept(true, 700), kept(1.0, 100), retracted(600, accept(false, 500))];
    assert_eq!(
        divided(graded(), &turns, Some(50), &signals),
        (vec![0, 1], vec![2], 500, 1_500)
    );
}

#[test]
fn feedback_that_is_dated_back_does_not_shut_out_later_turns() {
    let turns = [turn(0, 0), turn(1, 500), turn(2, 5_000)];
    let graded = Definition {
        close_on_feedback: true,
        horizon_seconds: 9.0,
        ..session()
    };
    let dated_back = Signal {
        given_at: at(-9_000_000),
        ..accept(true, 0)
    };
    let (members, late, closes_ms, _) = divided(graded, &turns, None, &[dated_back]);
    assert_eq!((members, late, closes_ms), (vec![0, 1], vec![2], 0));
}

#[test]
fn an_episode_does_not_stay_open_for_ever() {
    let daily = Definition {
        horizon_seconds: 2.0 * 86_400.0,
        ..session()
    };
    let day = 86_400_000;
    let turns: Vec<Turn> = (0..40).map(|number| turn(number, i64::from(number) * day)).collect();
    let (members, late, closes_ms, _) = divided(daily, &turns, None, &[]);
    assert_eq!((members.len(), late.len()), (8, 32), "a week after the first turn");
    assert_eq!(closes_ms, 9 * day);
}

#[test]
fn turns_are_in_the_order_of_the_session() {
    let mut turns = [turn(1, 0), turn(0, 300), turn(2, 200)];
    turns[2].segment = 1;
    assert_eq!(divided(session(), &turns, None, &[]).0, [0, 1, 2]);
}

/// The outcome in short, and the turns' own rewards.
fn score(
    definition: Definition,
    turns: &[Turn],
    about_episode: &[Signal],
    about_turns: &[(usize, Signal)],
) -> (String, Vec<Option<f64>>) {
    let rule = rule(definition);
    let divided = divide(turns.to_vec(), Some(at(0)), &rule, about_episode);
    let mut scoring = Scoring::new(&rule, &divided, Some(at(0)), about_episode.to_vec());
    for nth in 0..divided.turns.len() {
        let signals = about_turns.iter().filter(|(turn, _)| *turn == nth);
        scoring.turn(nth, signals.map(|(_, signal)| signal.clone()).collect());
    }
    let (outcome, turn_rewards) = scoring.finish();
    let outcome = match outcome {
        Outcome::Rewarded {
            reward,
            signal,
            feedback_at,
        } => {
            let after = feedback_at.map(|at| (at - START).whole_milliseconds());
            format!(
                "{reward} {signal} {}",
                after.map_or(String::new(), |after| after.to_string())
            )
        }
        Outcome::Censored { code } => code.to_owned(),
    };
    (outcome, turn_rewards)
}

#[test]
fn feedback_about_the_episode_decides_and_that_about_a_turn_does_not() {
    let turns = [turn(0, 0), turn(1, 500)];
    let about_turn = [(0, accept(false, 20))];
    let outcome = |about_episode: &[Signal]| score(session(), &turns, about_episode, &about_turn).0;
    assert_eq!(outcome(&[accept(false, 300), accept(true, 200)]), "0.75 accept 200");
    assert_eq!(outcome(&[]), "no_feedback");
    assert_eq!(outcome(&[accept(true, 1_501)]), "no_feedback", "after the horizon");
    assert_eq!(outcome(&[retracted(1_500, accept(true, 200))]), "retracted");
    assert_eq!(outcome(&[retracted(1_501, accept(true, 200))]), "0.75 accept 200");
}

#[test]
fn an_episode_is_a_decline_if_every_turn_was() {
    let declining = || Definition {
        decline: Some(0.125),
        ..session()
    };
    let mut turns = [turn(0, 0), turn(1, 500)];
    turns[0].closing.declined = true;
    assert_eq!(score(declining(), &turns, &[], &[]).0, "no_feedback");
    turns[1].closing.declined = true;
    assert_eq!(score(declining(), &turns, &[], &[]).0, "0.125 decline ");
    assert_eq!(barred(&turns), None);
}

#[test]
fn a_turn_at_which_the_engine_failed_is_no_part_of_what_a_session_is_rewarded_for() {
    let mut turns = [turn(0, 0), turn(1, 500), turn(2, 600)];
    let failed = &mut turns[2].closing;
    (failed.tokens, failed.shown) = (0, Some(false));
    failed.finish_reason = "abort".to_owned();
    let definition = |reward: &str| Definition {
        reward: Some(reward.to_owned()),
        ..session()
    };
    let score_of = |reward| score(definition(reward), &turns, &[], &[]).0;
    assert_eq!(score_of("turns"), "2 expression ");
    assert_eq!(score_of("finish_reason == 'abort' ? 1.0 : 0.5"), "0.5 expression ");
    for declined in &mut turns[..2] {
        declined.closing.declined = true;
    }
    assert_eq!(barred(&turns), None, "the policy declined where it could");
    assert_eq!(barred(&turns[2..]), Some("not_shown"));
}

#[test]
fn an_expression_sees_the_first_value_of_each_turn_in_the_order_of_the_session() {
    let definition = |reward: &str| Definition {
        reward: Some(reward.to_owned()),
        ..session()
    };
    let turns = [turn(0, 0), turn(1, 500), turn(2, 600)];
    let about_turns = [
        (2, kept(0.5, 700)),
        (0, retracted(900, kept(0.9, 30))),
        (0, kept(0.25, 40)),
        (1, kept(1.0, 1_601)),
        (2, kept(0.75, 1_200)),
    ];
    let outcome = |reward: &str| score(definition(reward), &turns, &[accept(true, 100)], &about_turns).0;
    let joined = "turn.count.kept == 0 ? null : turn.first.kept + 10.0 * turn.last.kept + 100.0 * turn.mean.kept";
    assert_eq!(outcome(joined), "42.75 expression 1200");
    assert_eq!(outcome("turn.count.kept"), "2 expression 1200");
    assert_eq!(
        outcome("accept == null ? null : double(turns + segments + tokens)"),
        "34 expression 100"
    );
    assert_eq!(outcome("ended ? seconds : 0.0"), "0.7 expression ");
    assert_eq!(outcome("turn.count.accept == 0 ? null : 1.0"), "no_feedback");
    let nothing = definition("turn.count.kept == 0 ? null : 1.0");
    let only_retracted = &about_turns[1..2];
    assert_eq!(score(nothing, &turns, &[], only_retracted).0, "retracted");
    assert_eq!(
        outcome("turn.count.kept < 2 ? 0.0 : 1.0 / (turn.first.kept - turn.first.kept)"),
        "reward_error"
    );
}

#[test]
fn turns_have_rewards_of_their_own_where_the_episode_has_one() {
    let definition = |turn_reward: &str| Definition {
        turn_reward: Some(turn_reward.to_owned()),
        ..session()
    };
    let turns = [turn(0, 0), turn(1, 500)];
    let about_turns = [(0, kept(0.5, 100)), (1, retracted(600, kept(0.5, 510)))];
    let by_turn = "kept == null ? null : kept + 0.25";
    let (outcome, rewards) = score(definition(by_turn), &turns, &[accept(true, 100)], &about_turns);
    assert_eq!((outcome.as_str(), rewards), ("0.75 accept 100", vec![Some(0.75), None]));
    let (outcome, rewards) = score(definition(by_turn), &turns, &[], &about_turns);
    assert_eq!((outcome.as_str(), rewards), ("no_feedback", vec![None, None]));
    let failing = "kept == null || kept == 1.0 ? null : 1.0 / (kept - kept)";
    assert_eq!(
        score(definition(failing), &turns, &[accept(true, 100)], &about_turns).0,
        "reward_error"
    );
    let without_feedback = score(definition("0.5 * double(tokens)"), &turns, &[accept(true, 100)], &[]);
    assert_eq!(without_feedback.1, [Some(5.0), Some(5.0)]);
}

#[test]
fn turns_that_make_no_trajectory_together_have_a_code() {
    let code = |change: fn(&mut [Turn; 2])| {
        let mut turns = [turn(0, 0), turn(1, 500)];
        change(&mut turns);
        barred(&turns).unwrap_or("scored")
    };
    assert_eq!(code(|_| {}), "scored");
    assert_eq!(code(|turns| turns[1].closing.consent = false), "no_consent");
    assert_eq!(
        code(|turns| turns[0].closing.purpose = Purpose::Evaluation),
        "evaluation"
    );
    assert_eq!(
        code(|turns| turns[0].closing.purpose = Purpose::Rollout),
        "mixed_purposes"
    );
    let of_runs = |first: u128, second: u128| {
        let mut turns = [turn(0, 0), turn(1, 500)];
        for (turn, run) in turns.iter_mut().zip([first, second]) {
            turn.closing.purpose = Purpose::Rollout;
            turn.closing.shown = Some(false);
            turn.run_id = Some(Uuid::from_u128(run));
        }
        barred(&turns)
    };
    assert_eq!(of_runs(1, 2), Some("mixed_purposes"));
    assert_eq!(of_runs(1, 1), None, "nobody is shown a rollout");
    assert_eq!(code(|turns| turns[1].surface = "other".to_owned()), "mixed_surfaces");
    assert_eq!(code(|turns| turns[1].policy = "other".to_owned()), "mixed_policies");
    assert_eq!(code(|turns| turns[1].closing.shown = Some(false)), "scored");
    let unseen = |turns: &mut [Turn; 2]| {
        turns[0].closing.shown = Some(false);
        turns[1].closing.declined = true;
    };
    assert_eq!(code(unseen), "not_shown");
    // Consent comes first.
    let all = |turns: &mut [Turn; 2]| {
        turns[0].closing.consent = false;
        turns[1].closing.purpose = Purpose::Evaluation;
        turns[1].policy = "other".to_owned();
    };
    assert_eq!(code(all), "no_consent");
}
