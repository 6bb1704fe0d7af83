use super::*;
use runs::dataset::Member;
use runs::sample::Behavior;

fn score(log_ratio: f64, reward: f64) -> Score {
    Score {
        generations: 1,
        tokens: 2,
        logprob: -3.0,
        log_ratio,
        reward,
        opening: None,
    }
}

fn close(got: f64, want: f64) {
    assert!((got - want).abs() < 1e-12, "{got} against {want}");
}

#[test]
fn estimates_are_those_computed_by_hand() {
    let mut scores = Scores::new(4.0);
    // weights 2, 0.5, and 8 clipped to 4
    for (ratio, reward) in [(2.0f64, 1.0), (0.5, -1.0), (8.0, 0.25)] {
        scores.add(&score(ratio.ln(), reward));
    }
    let measured = scores.measured(9);
    close(measured.logprob_mean, -1.5);
    close(measured.reward_mean, 0.25 / 3.0);
    close(measured.reward_weighted, (2.0 - 0.5 + 1.0) / 3.0);
    close(measured.reward_normalized, 2.5 / 6.5);
    close(measured.effective_sample_size, 6.5 * 6.5 / (4.0 + 0.25 + 16.0));
    close(measured.weight_mean, 6.5 / 3.0);
    close(measured.weights_clipped, 1.0 / 3.0);
    assert_eq!((measured.version, measured.trajectories), (9, 3));
    assert_eq!((measured.generations, measured.tokens), (3, 6));
}

fn members(sizes: &[usize]) -> Vec<Member> {
    let mut next = 0;
    let mut member = |size: &usize| {
        let ids = (next..next + size).map(|id| Uuid::from_u128(id as u128));
        next += size;
        Member {
            episode: None,
            generations: ids.collect(),
        }
    };
    sizes.iter().map(&mut member).collect()
}

#[test]
fn a_session_counts_once_with_the_product_of_its_turns_ratios() {
    let members = members(&[50, 1]);
    let mut trajectories = Trajectories::new(&members);
    for (at, id) in members[0].generations.iter().enumerate() {
        // 2 and ½ in turn, and one more of 2: the product is 2
        let ratio: f64 = if at == 49 { 4.0 } else { [2.0, 0.5][at % 2] };
        trajectories.add(*id, ("t", "u"), &score(ratio.ln(), -1.0));
    }
    trajectories.add(members[1].generations[0], ("t", "v"), &score(0.0, 1.0));
    let mut scores = Scores::new(10.0);
    for (.., score) in trajectories.whole() {
        scores.add(score);
    }
    let measured = scores.measured(1);
    assert_eq!(
        (measured.trajectories, measured.generations, measured.tokens),
        (2, 51, 102)
    );
    close(measured.reward_mean, 0.0);
    // 25 factors of 2 (the last is 4 instead of ½), 24 of ½
    let weight: f64 = 2f64.powi(25) * 0.5f64.powi(24) * 4.0;
    close(weight, 8.0);
    close(measured.reward_weighted, (1.0 - weight) / 2.0);
    close(measured.reward_normalized, (1.0 - weight) / (1.0 + weight));
    close(
        measured.effective_sample_size,
        (1.0 + weight).powi(2) / (1.0 + weight * weight),
    );
    close(measured.logprob_mean, -1.5);
}

#[test]
fn an_answer_has_an_opening_only_if_it_could_decline_and_is_a_whole_trajectory() {
    let sample = |tokens: Vec<u32>| Sample {
        mask: vec![true; tokens.len()],
        tokens,
        ..Sample::example()
    };
    let of = |sample: &Sample| opening(sample, Some(0.25), Some(9));
    let declined = of(&sample(vec![9])).unwrap();
    assert_eq!((declined.declined, declined.decline_probability), (true, 0.25));
    assert!(!of(&sample(vec![3, 9])).unwrap().declined);
    let forced = Sample {
        suppressed: true,
        ..sample(vec![3])
    };
    let masked = Sample {
        mask: vec![false, true],
        ..sample(vec![3, 4])
    };
    let filtered = Behavior::from_logged(1.0, 0.9, None).map(Arc::new);
    let filtered = Sample {
        behavior: filtered,
        ..sample(vec![3])
    };
    assert!(filtered.behavior.is_some());
    for sample in [forced, masked, filtered] {
        assert_eq!(of(&sample), None);
    }
    assert_eq!(
        opening(&sample(vec![3]), None, None),
        None,
        "the version has no such token"
    );

    let turn = Score {
        opening: Some(declined),
        ..score(0.0, 1.0)
    };
    let mut whole = Score::default();
    whole.add(&turn);
    assert_eq!(whole.opening, Some(declined));
    whole.add(&turn);
    assert_eq!(whole.opening, None, "a session of two turns");
}

#[test]
fn a_session_with_a_turn_that_cannot_be_used_is_left_out_as_a_whole() {
    let members = members(&[3, 2, 1]);
    let mut trajectories = Trajectories::new(&members);
    for (at, member) in members.iter().enumerate() {
        for id in &member.generations[usize::from(at < 2)..] {
            trajectories.add(*id, ("t", "u"), &score(0.0, 1.0));
        }
    }
    let first = members[0].generations[0];
    trajectories.refuse(BTreeMap::from([("greedy".to_owned(), vec![first])]));
    let whole: Vec<&Member> = trajectories.whole().map(|(member, ..)| member).collect();
    assert_eq!(whole, [&members[2]]);
    assert_eq!(trajectories.left_out(), (BTreeMap::from([("greedy".to_owned(), 1)]), 1));
}

#[test]
fn a_version_that_would_never_say_it_has_no_effective_sample() {
    let mut scores = Scores::new(4.0);
    scores.add(&score(f64::NEG_INFINITY, 1.0));
    let measured = scores.measured(1);
    assert_eq!((measured.effective_sample_size, measured.reward_normalized), (0.0, 0.0));
    assert_eq!(Scores::new(4.0).measured(1).logprob_mean, 0.0);
}
