use super::*;
use proptest::prelude::*;

/// The ids that [`draw`] can draw, ascending.
fn candidates(logits: &[f32], params: &Params, previous: &PreviousTokens) -> Vec<u32> {
    match Probabilities::new(logits, params, previous, None) {
        Probabilities::Greedy { best, .. } => vec![best as u32],
        Probabilities::Weights { weights, .. } => {
            let drawable = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
            drawable.map(|(id, _)| id as u32).collect()
        }
    }
}

#[test]
fn a_seed_gives_the_same_numbers_in_every_release() {
    // ChaCha12 and its seeding, computed by a program of its own
    for (seed, expected) in [
        (0, [0.7311134158637046, 0.7734601843532382, 0.025844634233355035]),
        (7, [0.030317360865101395, 0.3070862833742408, 0.14264215670077263]),
    ] {
        let mut source = Source::new(seed);
        assert_eq!([(); 3].map(|()| source.uniform()), expected, "{seed}");
    }
}

#[test]
fn frequencies_follow_the_softmax() {
    let logits = [1.0f32, 0.0, -1.0, 2.0];
    let params = Params {
        temperature: 0.7,
        top_p: 1.0,
        ..Params::default()
    };
    let mut source = Source::new(7);
    let n = 40_000;
    let mut counts = [0usize; 4];
    let mut logprobs = [0f32; 4];
    for _ in 0..n {
        let (id, lp) = sample(&logits, &params, &mut source);
        counts[id as usize] += 1;
        logprobs[id as usize] = lp;
    }
    for id in 0..4 {
        let p = f64::from(logprobs[id]).exp();
        let seen = counts[id] as f64 / f64::from(n);
        assert!((p - seen).abs() < 0.01, "token {id}: {p} against {seen}");
    }
    let sum: f64 = logprobs.iter().map(|&l| f64::from(l).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-6);
}

#[test]
fn top_p_keeps_the_nucleus_and_renormalizes() {
    // probabilities 0.5, 0.3, 0.2: 0.6 needs the first two
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let params = Params {
        temperature: 1.0,
        top_p: 0.6,
        ..Params::default()
    };
    let mut source = Source::new(1);
    for _ in 0..200 {
        let (id, lp) = sample(&logits, &params, &mut source);
        let expected = [0.5f64 / 0.8, 0.3 / 0.8][id as usize].ln();
        assert!((f64::from(lp) - expected).abs() < 1e-6);
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin()).collect();
    let draw = |seed| {
        let mut s = Source::new(seed);
        (0..20)
            .map(|_| sample(&logits, &Params::default(), &mut s).0)
            .collect::<Vec<_>>()
    };
    assert_eq!(draw(5), draw(5));
    assert_ne!(draw(5), draw(6));
}

#[test]
fn the_other_tokens_share_the_probability_of_a_suppressed_one() {
    // probabilities 0.5, 0.3, 0.2; without the first 0.6, 0.4
    let mut logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    suppress(&mut logits, 0);
    let mut source = Source::new(3);
    let mut seconds = 0;
    for _ in 0..20_000 {
        let (id, lp) = sample(&logits, &Params::default(), &mut source);
        let expected = [f64::NAN, 0.6, 0.4][id as usize].ln();
        assert!((f64::from(lp) - expected).abs() < 1e-6);
        seconds += usize::from(id == 1);
    }
    // 0.6 ± 5 standard deviations
    assert!((11_654..12_346).contains(&seconds), "{seconds}");
}

#[test]
fn a_fixed_share_of_seeds_explores() {
    let explored = (0..50_000).filter(|&seed| explores(seed, 0.02)).count();
    // 1000 ± 5 standard deviations
    assert!((843..1157).contains(&explored), "{explored}");
    assert!((0..1000).all(|seed| !explores(seed, 0.0)));
    // A seed that explores at a small share also does at every larger one.
    assert!((0..1000).all(|seed| !explores(seed, 0.1) || explores(seed, 0.3)));
}

#[test]
fn greedy_takes_the_best_and_reports_the_plain_softmax() {
    let (id, lp) = sample(
        &[0.0, 3.0, 1.0],
        &Params {
            temperature: 0.0,
            top_p: 1.0,
            ..Params::default()
        },
        &mut Source::new(0),
    );
    assert_eq!(id, 1);
    let expected = 3.0 - (1.0 + 3f64.exp() + 1f64.exp()).ln();
    assert!((f64::from(lp) - expected).abs() < 1e-6);
    assert_eq!(top_logprobs(&[0.0, 3.0, 1.0], 2)[0], (id, lp));
}

/// Results of transformers' logits processors for random logits (`tools/golden/sampling.py`).
#[derive(serde::Deserialize)]
struct Case {
    logits: Vec<f32>,
    before: Vec<u32>,
    params: BTreeMap<String, f32>,
    log_probs: Vec<Option<f64>>,
}

#[test]
fn the_distribution_is_that_of_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/sampling.json");
    let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(cases.len() > 40);
    for case in cases {
        let get = |name: &str, default: f32| case.params.get(name).copied().unwrap_or(default);
        let params = Params {
            temperature: get("temperature", 1.0),
            top_p: get("top_p", 1.0),
            top_k: get("top_k", 0.0) as u32,
            min_p: get("min_p", 0.0),
            repetition_penalty: get("repetition_penalty", 1.0),
            ..Params::default()
        };
        let previous = PreviousTokens::new(&case.before);
        let theirs = (0u32..).zip(&case.log_probs).filter(|(_, log_prob)| log_prob.is_some());
        let remaining: Vec<u32> = theirs.map(|(id, _)| id).collect();
        assert_eq!(
            candidates(&case.logits, &params, &previous),
            remaining,
            "{:?}",
            case.params
        );
        for (id, log_prob) in (0u32..).zip(case.log_probs) {
            let ours = f64::from(log_prob_of(&case.logits, &params, &previous, id));
            match log_prob {
                // transformers filters in f32.
                Some(theirs) => assert!((ours - theirs).abs() < 4e-6, "{:?}: {ours} {theirs}", case.params),
                None => assert_eq!(ours, f64::NEG_INFINITY),
            }
        }
    }
}

#[test]
fn bias_and_penalties_are_computed_in_the_documented_order() {
    let logits = [1.0f32, -2.0, 3.0, 0.5, 4.0];
    let params = Params {
        logit_bias: [(1, 1.5), (3, -1.0), (99, 5.0)].into(),
        repetition_penalty: 2.0,
        frequency_penalty: 0.25,
        presence_penalty: 0.5,
        temperature: 0.5,
        ..Params::default()
    };
    // 2 and 3 are in the prompt, 2 was sampled three times, 1 once
    let mut previous = PreviousTokens::new(&[2, 3, 3]);
    for id in [2, 1, 2, 2] {
        previous.push(id);
    }
    let z: [f64; 5] = [
        1.0,
        (-2.0 + 1.5) * 2.0 - 0.25 - 0.5,
        3.0 / 2.0 - 3.0 * 0.25 - 0.5,
        (0.5 - 1.0) * 2.0,
        4.0,
    ];
    let total: f64 = z.iter().map(|z| (z / 0.5).exp()).sum();
    for (id, z) in (0u32..).zip(z) {
        let expected = z / 0.5 - total.ln();
        let ours = f64::from(log_prob_of(&logits, &params, &previous, id));
        assert!((ours - expected).abs() < 1e-6, "{id}: {ours} {expected}");
    }
    // Greedy sampling also applies bias and penalties.
    let greedy = Params {
        temperature: 0.0,
        logit_bias: [(4, -100.0)].into(),
        ..params
    };
    let drawn = draw(&logits, &greedy, &previous, &mut Source::new(0));
    assert_eq!((drawn.id, drawn.candidates), (0, 1));
    assert_eq!(candidates(&logits, &greedy, &previous), [0]);
}

#[test]
fn lower_ids_win_ties() {
    let logits = [0.0f32, 2.0, -0.0, 2.0, 2.0, 0.0];
    let remaining = |top_k, top_p| {
        let params = Params {
            top_k,
            top_p,
            ..Params::default()
        };
        candidates(&logits, &params, &PreviousTokens::default())
    };
    assert_eq!(remaining(2, 1.0), [1, 3]);
    assert_eq!(remaining(4, 1.0), [0, 1, 3, 4]);
    assert_eq!(remaining(5, 1.0), [0, 1, 2, 3, 4]);
    assert_eq!(remaining(0, 0.3), [1, 3]);
    assert_eq!(remaining(0, 0.9), [0, 1, 3, 4]);
}

#[test]
fn filters_apply_one_after_the_other() {
    // probabilities 0.4, 0.3, 0.2, 0.06, 0.04
    let logits = [0.4f32, 0.3, 0.2, 0.06, 0.04].map(f32::ln);
    let remaining = |min_p, top_k, top_p| {
        let params = Params {
            min_p,
            top_k,
            top_p,
            ..Params::default()
        };
        candidates(&logits, &params, &PreviousTokens::default())
    };
    assert_eq!(remaining(0.0, 0, 0.75), [0, 1, 2]);
    // Of the best two, 0.4 / 0.7 is below 0.75, so both stay. Of the best three, 0.7 / 0.9 is
    // enough.
    assert_eq!(remaining(0.0, 2, 0.75), [0, 1]);
    assert_eq!(remaining(0.0, 3, 0.75), [0, 1]);
    assert_eq!(remaining(0.45, 0, 0.75), [0, 1]);
    assert_eq!(remaining(0.45, 1, 0.75), [0]);
    assert_eq!(remaining(1.0, 0, 1.0), [0]);
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let invalid = [
        (
            "temperature",
            Params {
                temperature: -1.0,
                ..Params::default()
            },
        ),
        (
            "temperature",
            Params {
                temperature: f32::NAN,
                ..Params::default()
            },
        ),
        (
            "top_p",
            Params {
                top_p: 0.0,
                ..Params::default()
            },
        ),
        (
            "min_p",
            Params {
                min_p: 1.5,
                ..Params::default()
            },
        ),
        (
            "repetition_penalty",
            Params {
                repetition_penalty: 0.0,
                ..Params::default()
            },
        ),
        (
            "presence_penalty",
            Params {
                presence_penalty: f32::INFINITY,
                ..Params::default()
            },
        ),
        (
            "logit_bias",
            Params {
                logit_bias: [(3, f32::NAN)].into(),
                ..Params::default()
            },
        ),
    ];
    for (field, params) in invalid {
        assert_eq!(params.check().unwrap_err().field, field);
    }
    assert_eq!(Params::default().check(), Ok(()));
}

#[test]
fn in_json_absent_and_null_fields_are_neutral_and_ids_are_text() {
    let read = |json: &str| serde_json::from_str::<Params>(json);
    let null = r#"{"temperature": null, "top_k": null, "presence_penalty": null, "logit_bias": null}"#;
    assert_eq!(read("{}").unwrap(), Params::default());
    assert_eq!(read(null).unwrap(), Params::default());
    assert_eq!(read(r#"{"top_k": -1}"#).unwrap().top_k, 0);
    assert!(
        read(r#"{"top_k": -2}"#)
            .unwrap_err()
            .to_string()
            .contains("top_k is -2")
    );
    assert_eq!(
        read(r#"{"logit_bias": {"7": 1.5}}"#).unwrap().logit_bias,
        [(7, 1.5)].into()
    );
    assert!(read(r#"{"logit_bias": {"seven": 1}}"#).is_err());
}

/// Logits that are spread out, on few levels (so that many tie), or suppressed.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    let level = prop_oneof![
        6 => (-8.0f32..8.0).boxed(),
        3 => (-3i8..3).prop_map(f32::from).boxed(),
        1 => Just(f32::NEG_INFINITY).boxed(),
    ];
    prop::collection::vec(level, 1..300).prop_filter("something can be drawn", |l| l.iter().any(|l| l.is_finite()))
}

fn params() -> impl Strategy<Value = Params> {
    let maybe = |some: std::ops::Range<f32>, none: f32| prop_oneof![Just(none), some];
    let filters = (
        maybe(0.05..1.0, 1.0),
        prop_oneof![Just(0), 1u32..40],
        maybe(0.0..0.5, 0.0),
    );
    let penalties = (maybe(0.5..2.0, 1.0), maybe(-1.0..1.0, 0.0), maybe(-1.0..1.0, 0.0));
    let bias = prop::collection::btree_map(0u32..300, -5.0f32..5.0, 0..4);
    (0.2f32..2.0, filters, penalties, bias).prop_map(|(temperature, (top_p, top_k, min_p), (r, p, f), logit_bias)| {
        Params {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: r,
            presence_penalty: p,
            frequency_penalty: f,
            logit_bias,
        }
    })
}

fn previous() -> impl Strategy<Value = PreviousTokens> {
    let ids = || prop::collection::vec(0u32..300, 0..30);
    (ids(), ids()).prop_map(|(prompt, sampled)| {
        let mut previous = PreviousTokens::new(&prompt);
        sampled.iter().for_each(|&id| previous.push(id));
        previous
    })
}

proptest! {
    #[test]
    fn logged_log_probabilities_can_be_recomputed(logits in logits(), params in params(), previous in previous(), seed in any::<u64>()) {
        let drawn = draw(&logits, &params, &previous, &mut Source::new(seed));
        let remaining = candidates(&logits, &params, &previous);
        prop_assert!(remaining.contains(&drawn.id));
        prop_assert_eq!(drawn.candidates as usize, remaining.len());
        let again = log_prob_of(&logits, &params, &previous, drawn.id);
        prop_assert_eq!(drawn.log_prob.to_bits(), again.to_bits());
        let sum: f64 = remaining.iter().map(|&id| f64::from(log_prob_of(&logits, &params, &previous, id)).exp()).sum();
        prop_assert!((sum - 1.0).abs() < 1e-5, "{}", sum);
        // No other id can be drawn.
        let other = (0..logits.len() as u32).find(|id| !remaining.contains(id));
        prop_assert!(other.is_none_or(|id| log_prob_of(&logits, &params, &previous, id) == f32::NEG_INFINITY));
    }

    #[test]
    fn the_number_of_candidates_is_enough_to_rebuild_a_distribution(
        logits in logits(), params in params(), previous in previous(), seed in any::<u64>()
    ) {
        let drawn = draw(&logits, &params, &previous, &mut Source::new(seed));
        let rebuilt = Distribution::new(&logits, &params, &previous, Some(drawn.candidates));
        prop_assert_eq!(rebuilt.log_prob(drawn.id).to_bits(), drawn.log_prob.to_bits());
    }

    #[test]
    fn factors_and_summands_have_the_same_softmax(logits in logits(), params in params(), previous in previous()) {
        let rebuilt = Distribution::new(&logits, &params, &previous, None);
        let (factors, summands) = rebuilt.affine();
        let t = f64::from(params.temperature);
        let z: Vec<f64> = logits.iter().zip(factors).zip(summands).map(|((l, f), s)| f64::from(l * f + s) / t).collect();
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        for (id, z) in z.iter().enumerate() {
            let exact = f64::from(rebuilt.log_prob(id as u32));
            prop_assert!(exact == z - total || (exact - (z - total)).abs() < 1e-4, "{} {} {}", id, exact, z - total);
        }
    }

    #[test]
    fn the_candidates_follow_from_their_number(logits in logits(), params in params()) {
        // Without bias and penalties, the candidates are a prefix of the logits' own order.
        let params = Params { logit_bias: BTreeMap::new(), ..params };
        let remaining = candidates(&logits, &params, &PreviousTokens::default());
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
        order.truncate(remaining.len());
        order.sort_unstable();
        prop_assert!(!remaining.is_empty() && (params.top_k == 0 || remaining.len() <= params.top_k as usize));
        prop_assert_eq!(remaining, order);
    }
}

/// Drawn tokens have the frequencies of their log-probabilities, with every filter on. Seeds are
/// fixed.
#[test]
fn frequencies_follow_the_log_probabilities_under_every_filter() {
    let logits: Vec<f32> = (0..40).map(|i| 3.0 * (i as f32 * 1.7).sin()).collect();
    let mut previous = PreviousTokens::new(&[1, 2, 3, 4, 5]);
    previous.push(2);
    previous.push(30);
    let base = Params {
        temperature: 0.9,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        logit_bias: [(7, 1.0)].into(),
        ..Params::default()
    };
    let all = [
        base.clone(),
        Params {
            top_k: 5,
            ..base.clone()
        },
        Params {
            top_p: 0.7,
            ..base.clone()
        },
        Params {
            min_p: 0.2,
            ..base.clone()
        },
        Params {
            top_k: 20,
            top_p: 0.9,
            min_p: 0.05,
            ..base
        },
    ];
    let n = 40_000;
    for (seed, params) in (100u64..).zip(all) {
        let mut source = Source::new(seed);
        let mut counts = vec![0u32; logits.len()];
        for _ in 0..n {
            counts[draw(&logits, &params, &previous, &mut source).id as usize] += 1;
        }
        for (id, count) in (0u32..).zip(counts) {
            let p = f64::from(log_prob_of(&logits, &params, &previous, id)).exp();
            let (mean, deviation) = (f64::from(n) * p, (f64::from(n) * p * (1.0 - p)).sqrt());
            assert!(
                (f64::from(count) - mean).abs() <= 5.0 * deviation,
                "{params:?}: {id} {count} times, expected {mean:.0}"
            );
        }
    }
}

#[test]
fn what_a_caller_could_steer_is_not_trained_on() {
    let with = |change: fn(&mut Params)| {
        let mut params = Params::default();
        change(&mut params);
        params.untrainable()
    };
    assert_eq!(with(|_| ()), None);
    assert_eq!(with(|params| params.temperature = 0.5), None);
    assert_eq!(with(|params| params.temperature = 1.5), None);
    // filters make no token likely that is not
    assert_eq!(
        with(|params| (params.top_k, params.top_p, params.min_p) = (2, 0.1, 0.9)),
        None
    );
    let steered: [fn(&mut Params); 4] = [
        |params| params.logit_bias = BTreeMap::from([(7, 0.0)]),
        |params| params.repetition_penalty = 0.9,
        |params| params.presence_penalty = -0.1,
        |params| params.frequency_penalty = 0.1,
    ];
    for change in steered {
        assert_eq!(with(change), Some("steered_sampling"));
    }
    for temperature in [0.0, 0.01, 0.49, 1.51, f32::NAN] {
        let params = Params {
            temperature,
            ..Params::default()
        };
        assert_eq!(params.untrainable(), Some("temperature_out_of_range"));
    }
}

#[test]
fn a_greedy_token_has_the_bits_that_it_has_at_temperature_1() {
    let (greedy, plain) = (
        Params {
            temperature: 0.0,
            ..Params::default()
        },
        Params::default(),
    );
    let previous = PreviousTokens::default();
    for nth in 0..400u32 {
        // the surest one is 15 to 20 above all others: that is where roundings differ
        let gap = 15.0 + nth as f32 * 0.0125;
        let mut logits: Vec<f32> = (0..200).map(|id| ((id * 37 + nth * 11) % 101) as f32 * 0.01).collect();
        logits[7] = gap + 1.0;
        let drawn = draw(&logits, &greedy, &previous, &mut Source::new(1));
        assert_eq!(drawn.id, 7);
        let read = log_prob_of(&logits, &plain, &previous, 7);
        assert_eq!(drawn.log_prob.to_bits(), read.to_bits(), "{gap}");
    }
}

#[test]
fn greedy_takes_the_first_of_the_best_but_not_what_is_excluded() {
    let logits = [0.5, 2.0, 1.0, 2.0];
    assert_eq!(greedy(&logits, None), 1);
    assert_eq!(greedy(&logits, Some(1)), 3);
    assert_eq!(greedy(&logits[..3], Some(1)), 2);
    assert_eq!(greedy(&[f32::NEG_INFINITY, -1.0], Some(1)), 0);
}
