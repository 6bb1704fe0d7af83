//! The configuration: reward expressions, and all of `[ingest]`.

use std::collections::BTreeSet;

use event_log::event::Value;

use crate::options::Options;
use crate::reward::{Closing, Definition, EpisodeFacts, Expression, Metric, MetricType, Outcome, Rule, Signal, score};

fn metrics() -> Vec<Metric> {
    vec![
        Metric::new("accept", MetricType::Boolean),
        Metric::new("kept", MetricType::Float),
        Metric::new("retry", MetricType::Float),
        Metric::new("comment", MetricType::Comment),
    ]
}

/// An accepted expression scores any signals, with the same result every time.
pub(super) fn expression(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let of_episodes = expression_of_episodes(text);
    of_generations(text) || of_episodes
}

/// The same of an episode.
fn expression_of_episodes(text: &str) -> bool {
    let Ok(expression) = Expression::of_episode(text, &metrics()) else {
        return false;
    };
    let all = signals();
    let about_episode: Vec<&Signal> = all.iter().collect();
    let mut facts = EpisodeFacts::default();
    for signal in &all {
        let values = facts.of_turns.entry(signal.metric.clone()).or_default();
        values.push(signal.value.clone());
    }
    for facts in [&facts, &EpisodeFacts::default()] {
        for signals in [&about_episode[..], &[]] {
            let reward = expression.episode_reward(facts, signals).ok();
            assert_eq!(reward, expression.episode_reward(facts, signals).ok());
            assert!(reward.flatten().is_none_or(f64::is_finite));
        }
    }
    true
}

fn of_generations(text: &str) -> bool {
    let definition = Definition {
        reward: Some(text.to_owned()),
        ..Definition::completion()
    };
    let Ok(rule) = Rule::new(definition, &metrics()) else {
        return false;
    };
    for signals in [&signals()[..], &signals()[..2], &[]] {
        let outcome = score(Some(&rule), &Closing::example(), signals);
        assert_eq!(outcome, score(Some(&rule), &Closing::example(), signals));
        if let Outcome::Rewarded { reward, .. } = outcome {
            assert!(reward.is_finite());
        }
    }
    true
}

fn signals() -> Vec<Signal> {
    let given = [
        ("accept", Value::Bool(false)),
        ("kept", Value::Float(f64::MAX)),
        ("kept", Value::Float(-0.0)),
        ("retry", Value::Float(1.0)),
        ("comment", Value::Text("naïve \u{1f600}".to_owned())),
        ("unknown", Value::Float(1.0)),
    ];
    let signal = |(index, (metric, value)): (usize, (&str, Value))| Signal {
        id: uuid::Uuid::from_u128(index as u128),
        metric: metric.to_owned(),
        value,
        given_at: time::OffsetDateTime::UNIX_EPOCH,
        retracted_at: None,
    };
    given.into_iter().enumerate().map(signal).collect()
}

/// `[ingest]`, as JSON.
pub(super) fn ingest_options(input: &[u8]) -> bool {
    let Ok(options) = serde_json::from_slice::<Options>(input) else {
        return false;
    };
    if options.check().is_err() {
        return false;
    }
    let written = serde_json::to_vec(&options).unwrap();
    assert_eq!(serde_json::from_slice::<Options>(&written).unwrap(), options);
    let names: BTreeSet<_> = options.surfaces().into_iter().map(|surface| surface.name).collect();
    assert!(names.contains("rollout"));
    assert_eq!(options.rules().unwrap().len(), names.len());
    true
}
