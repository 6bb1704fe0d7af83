use super::*;

const START: OffsetDateTime = time::macros::datetime!(2026-11-21 12:00 UTC);

fn closing() -> Closing {
    Closing {
        starts_at: START + Duration::seconds(1),
        ..Closing::example()
    }
}

fn rule(definition: Definition) -> Rule {
    let metrics = [
        Metric::new("accept", MetricType::Boolean),
        Metric::new("kept", MetricType::Float),
    ];
    Rule::new(definition, &metrics).unwrap()
}

fn accept(id: u128, value: bool, after_ms: i64) -> Signal {
    Signal {
        id: Uuid::from_u128(id),
        metric: "accept".to_owned(),
        value: Value::Bool(value),
        given_at: START + Duration::milliseconds(after_ms),
        retracted_at: None,
    }
}

/// With a horizon that a person can read in the times below.
fn completion() -> Definition {
    Definition {
        horizon_seconds: 3.0,
        ..Definition::completion()
    }
}

fn reward(outcome: &Outcome) -> f64 {
    match outcome {
        Outcome::Rewarded { reward, .. } => *reward,
        Outcome::Censored { code } => panic!("censored: {code}"),
    }
}

#[test]
fn the_first_feedback_by_event_time_decides_whatever_the_order_of_arrival() {
    let surface = rule(completion());
    let signals = [accept(1, false, 900), accept(2, true, 300)];
    let outcome = score(Some(&surface), &closing(), &signals);
    assert_eq!(
        outcome,
        Outcome::Rewarded {
            reward: 0.75,
            signal: "accept",
            feedback_at: Some(START + Duration::milliseconds(300)),
        }
    );
}

#[test]
fn the_smaller_id_decides_between_two_at_the_same_time() {
    let surface = rule(completion());
    let signals = [accept(2, true, 300), accept(1, false, 300)];
    assert_eq!(reward(&score(Some(&surface), &closing(), &signals)), -0.25);
}

#[test]
fn feedback_after_the_horizon_does_not_count() {
    let surface = rule(completion());
    let on_the_edge = score(Some(&surface), &closing(), &[accept(1, true, 4_000)]);
    assert_eq!(reward(&on_the_edge), 0.75);
    let after = score(Some(&surface), &closing(), &[accept(1, true, 4_001)]);
    assert_eq!(after, Outcome::Censored { code: "no_feedback" });
}

fn retracted(after_ms: i64, signal: Signal) -> Signal {
    Signal {
        retracted_at: Some(START + Duration::milliseconds(after_ms)),
        ..signal
    }
}

#[test]
fn feedback_that_is_retracted_within_the_horizon_does_not_count() {
    let surface = rule(completion());
    let withdrawn = retracted(2_000, accept(1, true, 300));
    let alone = score(Some(&surface), &closing(), std::slice::from_ref(&withdrawn));
    assert_eq!(alone, Outcome::Censored { code: "retracted" });
    let next = score(Some(&surface), &closing(), &[withdrawn, accept(2, false, 900)]);
    assert_eq!(reward(&next), -0.25, "the next one decides");
    let too_late = retracted(4_001, accept(1, true, 300));
    assert_eq!(reward(&score(Some(&surface), &closing(), &[too_late])), 0.75);
}

#[test]
fn feedback_after_the_end_of_an_episode_does_not_count_if_the_surface_closes_then() {
    let ended = Closing {
        ended_at: Some(START + Duration::seconds(1)),
        ..closing()
    };
    let signals = [accept(1, true, 1_500)];
    let surface = rule(completion());
    assert_eq!(reward(&score(Some(&surface), &ended, &signals)), 0.75);
    let closing_at_the_end = rule(Definition {
        close_on_episode_end: true,
        ..completion()
    });
    let outcome = score(Some(&closing_at_the_end), &ended, &signals);
    assert_eq!(outcome, Outcome::Censored { code: "no_feedback" });
}

#[test]
fn a_decline_is_rewarded_independent_of_feedback() {
    let surface = rule(completion());
    let declined = Closing {
        declined: true,
        ..closing()
    };
    let outcome = score(Some(&surface), &declined, &[accept(1, false, 10)]);
    assert_eq!(reward(&outcome), 0.0);
}

#[test]
fn a_grader_decides_the_reward_of_a_declined_rollout() {
    let declined = Closing {
        declined: true,
        ..closing()
    };
    let signal = Signal {
        metric: "reward".to_owned(),
        value: Value::Float(0.5),
        ..accept(1, true, 10)
    };
    assert_eq!(
        reward(&score(Some(&rule(Definition::rollout())), &declined, &[signal])),
        0.5
    );
}

#[test]
fn an_expression_decides_alone_and_ignores_retracted_feedback() {
    let surface = rule(Definition {
        reward: Some("declined ? 0.1 : kept == null ? null : kept".to_owned()),
        ..completion()
    });
    let kept = |value: f64, after_ms: i64| Signal {
        metric: "kept".to_owned(),
        value: Value::Float(value),
        ..accept(after_ms as u128, true, after_ms)
    };
    let signals = [kept(0.9, 900), kept(0.3, 300), accept(7, false, 1), kept(0.5, 5_000)];
    let outcome = score(Some(&surface), &closing(), &signals);
    let last_read = Some(START + Duration::milliseconds(900));
    assert_eq!(
        outcome,
        Outcome::Rewarded {
            reward: 0.3,
            signal: "expression",
            feedback_at: last_read
        }
    );
    let withdrawn = [retracted(1_000, kept(0.3, 300)), accept(7, true, 1)];
    let outcome = score(Some(&surface), &closing(), &withdrawn);
    assert_eq!(outcome, Outcome::Censored { code: "retracted" });
    assert_eq!(
        score(Some(&surface), &closing(), &[accept(7, true, 1)]),
        Outcome::Censored { code: "no_feedback" }
    );
    let declined = Closing {
        declined: true,
        ..closing()
    };
    assert_eq!(reward(&score(Some(&surface), &declined, &[])), 0.1);
}

#[test]
fn an_expression_that_fails_censors_with_its_own_code() {
    let surface = rule(Definition {
        reward: Some("kept == null ? null : (kept < 2.0 ? 1.0 : 1.0 / (kept - kept))".to_owned()),
        ..completion()
    });
    let signal = Signal {
        metric: "kept".to_owned(),
        value: Value::Float(3.0),
        ..accept(1, true, 1)
    };
    let outcome = score(Some(&surface), &closing(), &[signal]);
    assert_eq!(outcome, Outcome::Censored { code: "reward_error" });
}

#[test]
fn missing_consent_overrides_everything() {
    let refused = Closing {
        consent: false,
        declined: true,
        purpose: Purpose::Evaluation,
        ..closing()
    };
    let outcome = score(Some(&rule(completion())), &refused, &[]);
    assert_eq!(outcome, Outcome::Censored { code: "no_consent" });
}

#[test]
fn other_metrics_and_types_do_not_decide() {
    let comment = Signal {
        metric: "comment".to_owned(),
        value: Value::Text("nice".to_owned()),
        ..accept(1, true, 1)
    };
    let number = Signal {
        value: Value::Float(1.0),
        ..accept(2, true, 2)
    };
    let outcome = score(Some(&rule(completion())), &closing(), &[comment, number]);
    assert_eq!(outcome, Outcome::Censored { code: "no_feedback" });
}

#[test]
fn an_undefined_surface_is_censored() {
    let outcome = score(None, &closing(), &[accept(1, true, 1)]);
    assert_eq!(
        outcome,
        Outcome::Censored {
            code: "unknown_surface"
        }
    );
}

#[test]
fn a_horizon_starts_at_the_last_token_and_the_rule_may_end_it_early() {
    let closes_after = |definition: Definition, closing: &Closing, signals: &[Signal]| {
        let closes_at = closing.closes_at(Some(&rule(definition)), signals);
        (closes_at - START).whole_milliseconds()
    };
    let ended = Closing {
        ended_at: Some(START + Duration::seconds(2)),
        ..closing()
    };
    let signals = [accept(1, true, 1_500), accept(2, false, 1_200)];
    let waiting = completion();
    let ending = Definition {
        close_on_episode_end: true,
        ..completion()
    };
    let graded = Definition {
        close_on_feedback: true,
        ..completion()
    };
    assert_eq!(closes_after(waiting, &ended, &signals), 4_000);
    assert_eq!(
        closes_after(ending.clone(), &closing(), &signals),
        4_000,
        "the rule does not close early"
    );
    assert_eq!(closes_after(ending, &ended, &signals), 2_000);
    assert_eq!(closes_after(graded.clone(), &ended, &[]), 4_000);
    assert_eq!(closes_after(graded.clone(), &ended, &signals), 1_200);
    let dated_back = [accept(1, false, -9_000_000), accept(2, true, 1_500)];
    assert_eq!(
        closes_after(graded, &closing(), &dated_back),
        1_000,
        "not before it starts"
    );
    assert_eq!(ended.closes_at(None, &signals), START + Duration::seconds(1));
    let (before, after) = (START - Duration::seconds(1), START + Duration::seconds(1));
    assert_eq!((starts_at(START, before), starts_at(START, after)), (START, after));
}

#[test]
fn bounds_are_checked_and_absent_ones_are_not_stored() {
    let check = |min: Option<f64>, max: Option<f64>| {
        let definition = Definition {
            reward_min: min,
            reward_max: max,
            ..completion()
        };
        definition.check().map_err(|error| error.to_string())
    };
    assert_eq!(check(Some(-0.25), Some(0.75)), Ok(()));
    assert!(check(Some(0.0), None).unwrap_err().contains("-0.25 lies outside"));
    assert!(check(Some(1.0), Some(-1.0)).unwrap_err().contains("below reward_max"));
    assert!(check(None, Some(f64::NAN)).unwrap_err().contains("not finite"));
    let for_users = Definition {
        purpose: Some(Purpose::Production),
        ..completion()
    };
    assert!(for_users.check().unwrap_err().to_string().contains("purpose"));
    // fields that are not set are left out
    let stored = serde_json::to_value(Definition::rollout()).unwrap();
    for field in ["reward_min", "reward_max", "purpose", "trajectory", "turn_reward"] {
        assert!(stored.get(field).is_none(), "{field}");
    }
}

#[test]
fn what_belongs_to_episodes_is_refused_elsewhere() {
    let refusal = |definition: Definition| definition.check().unwrap_err().to_string();
    let turns = Definition {
        turn_reward: Some("1.0".to_owned()),
        ..completion()
    };
    assert!(refusal(turns.clone()).contains("turn_reward needs trajectory"));
    let session = Definition {
        trajectory: Unit::Episode,
        ..turns
    };
    session.check().unwrap();
    let rollout = Definition {
        trajectory: Unit::Episode,
        ..Definition::rollout()
    };
    assert!(refusal(rollout).contains("the surface \"environment\""));
    let alone = Definition {
        close_on_episode_end: false,
        ..Definition::environment()
    };
    Definition::environment().check().unwrap();
    assert!(refusal(alone).contains("close_on_episode_end"));
    let stored = serde_json::to_value(&session).unwrap();
    assert_eq!(stored["trajectory"], "episode");
    // `turn_reward` is about one turn, so it has a generation's variables.
    let by_episode = Definition {
        turn_reward: Some("turn.count.accept".to_owned()),
        ..session.clone()
    };
    assert!(Rule::new(by_episode, &[]).is_err());
    // One that was stored as a generation's is not scored as an episode of one turn.
    let outcome = score(Some(&rule(session)), &closing(), &[accept(1, true, 10)]);
    assert_eq!(outcome, Outcome::Censored { code: "redefined" });
}
