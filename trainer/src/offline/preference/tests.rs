use super::*;

fn scored(policy: f64, reference: f64, reward: f64) -> Scored {
    Scored {
        log_probs: LogProbs { policy, reference },
        reward,
    }
}

fn dpo() -> Dpo {
    serde_json::from_value(json!({"dataset": "a@1", "steps": 1, "beta": 0.5})).unwrap()
}

fn kto() -> Kto {
    serde_json::from_value(json!({"dataset": "a@1", "threshold": 0.5, "beta": 0.5, "undesirable_weight": 2.0})).unwrap()
}

#[test]
fn advantages_of_dpo_divided_by_the_trajectories_are_the_gradient_of_the_mean_over_pairs() {
    let trajectories = [
        scored(-1.0, -1.5, 1.0),
        scored(-2.0, -1.0, 0.0),
        scored(-3.0, -3.0, 1.0),
        scored(-4.0, -4.0, 0.0),
    ];
    let judged = dpo().judge(&trajectories, &[]);
    // by finite differences of the mean loss, of each log π
    for (at, advantage) in judged.advantages.iter().enumerate() {
        let loss = |change: f64| {
            let mut changed = trajectories;
            changed[at].log_probs.policy += change;
            dpo().judge(&changed, &[]).loss
        };
        let slope = (loss(1e-5) - loss(-1e-5)) / 2e-5;
        assert!((advantage / 4.0 + slope).abs() < 1e-9, "{at}: {advantage} {slope}");
    }
    assert_eq!(judged.metrics["pairs"], 2);
    assert_eq!(judged.metrics["accuracy"], 0.5, "the second pair is even");
    assert_eq!(
        (&judged.metrics["chosen"], &judged.metrics["rejected"]),
        (&json!(0.125), &json!(-0.25))
    );
}

#[test]
fn advantages_of_kto_are_the_gradient_of_the_mean_at_a_fixed_reference_point() {
    let trajectories = [
        scored(-1.0, -1.5, 1.0),
        scored(-2.0, -1.0, 0.0),
        scored(-3.0, -3.0, 0.5),
    ];
    let mismatched = [LogProbs {
        policy: -1.0,
        reference: -1.5,
    }];
    let judged = kto().judge(&trajectories, &mismatched);
    for (at, advantage) in judged.advantages.iter().enumerate() {
        let loss = |change: f64| {
            let mut changed = trajectories;
            changed[at].log_probs.policy += change;
            kto().judge(&changed, &mismatched).loss
        };
        let slope = (loss(1e-5) - loss(-1e-5)) / 2e-5;
        assert!((advantage / 3.0 + slope).abs() < 1e-9, "{at}: {advantage} {slope}");
    }
    assert_eq!(
        (&judged.metrics["desirable"], &judged.metrics["undesirable"]),
        (&json!(2), &json!(1))
    );
    assert_eq!(judged.metrics["reference_point"], 0.5);
}

fn sample(prompt: &[u32], tokens: &[u32]) -> Sample {
    Sample {
        prompt: prompt.to_vec(),
        tokens: tokens.to_vec(),
        logprobs: vec![-1.0; tokens.len()],
        mask: vec![true; tokens.len()],
        ..Sample::example()
    }
}

#[test]
fn the_reference_point_is_measured_on_the_answers_of_the_next_trajectory() {
    let session = vec![sample(&[5, 6], &[7]), sample(&[5, 6, 7, 8], &[9])];
    let trajectories = [session, vec![sample(&[1], &[2, 3])]];
    let moved = |context| -> Vec<(usize, Vec<u32>, Vec<u32>)> {
        let all = Kto::mismatched(&trajectories, context).into_iter();
        all.map(|(of, sample)| (of, sample.prompt, sample.tokens)).collect()
    };
    let expected = [
        (0, vec![5, 6], vec![2, 3]),
        (1, vec![1], vec![7]),
        (1, vec![1, 7, 8], vec![9]),
    ];
    assert_eq!(moved(100), expected);
    assert_eq!(moved(2), [], "longer than the context");
    assert!(Kto::mismatched(&trajectories[..1], 100).is_empty(), "one has no other");
}

#[test]
fn trajectories_are_comparable_by_their_first_prompt_or_by_their_group() {
    let mut one = sample(&[1, 2], &[3]);
    let other = sample(&[1, 3], &[3]);
    assert_eq!(key(PairBy::Prompt, &one), key(PairBy::Prompt, &sample(&[1, 2], &[9])));
    assert_ne!(key(PairBy::Prompt, &one), key(PairBy::Prompt, &other));
    assert_eq!(key(PairBy::Group, &one), None);
    one.group = Some("g".into());
    assert_eq!(key(PairBy::Group, &one), Some(b"g".to_vec()));
}
