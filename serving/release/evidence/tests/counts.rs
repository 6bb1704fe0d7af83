//! The exact tests: of failure rates and of sample ratios.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use evidence::rates::{self, Arm, Rates};
use evidence::ratio::{Error, SampleRatio};
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

fn rates(alpha: f64) -> Rates {
    Rates::new(rates::Design {
        alpha,
        ..Default::default()
    })
    .unwrap()
}

/// Sums over all sequences of `blocks` pairs, with common failure rate `rate`: the mean e-value and
/// the probability that an alarm was ever raised.
fn enumerate(test: &Rates, blocks: u32, candidate: f64, baseline: f64) -> (f64, f64) {
    if blocks == 0 {
        return (test.log_e().exp(), f64::from(u8::from(test.is_alarm())));
    }
    let mut sums = (0.0, 0.0);
    for (y, z) in [(false, false), (false, true), (true, false), (true, true)] {
        let of = |failed, rate| if failed { rate } else { 1.0 - rate };
        let probability = of(y, candidate) * of(z, baseline);
        let mut next = test.clone();
        next.observe(Arm::Candidate, y);
        next.observe(Arm::Baseline, z);
        let (e, alarm) = enumerate(&next, blocks - 1, candidate, baseline);
        sums = (sums.0 + probability * e, sums.1 + probability * alarm);
    }
    sums
}

#[test]
fn over_all_outcomes_the_mean_e_value_is_at_most_1_and_alarms_are_at_most_alpha() {
    for (candidate, baseline) in [(0.02, 0.02), (0.3, 0.3), (0.5, 0.5), (0.9, 0.9), (0.1, 0.3)] {
        let (e, alarm) = enumerate(&rates(0.2), 7, candidate, baseline);
        assert!(e <= 1.0 + 1e-9, "{candidate}, {baseline}: {e}");
        assert!(alarm <= 0.2, "{candidate}, {baseline}: {alarm}");
    }
    // The enumeration can fail.
    let (e, alarm) = enumerate(&rates(0.2), 7, 0.7, 0.1);
    assert!(e > 3.0 && alarm > 0.5, "{e}, {alarm}");
}

#[test]
fn half_of_all_requests_failing_is_seen_within_20_requests_of_each_arm() {
    let requests = |baseline: f64| {
        let mut requests = (0..1000).map(|seed| {
            let (mut rng, mut test) = (StdRng::seed_from_u64(seed), rates(0.01));
            let mut requests = 0;
            while !test.is_alarm() {
                test.observe(Arm::Candidate, rng.random_bool(0.5));
                test.observe(Arm::Baseline, rng.random_bool(baseline));
                requests += 1;
            }
            requests
        });
        let mut requests = requests.by_ref().collect::<Vec<u32>>();
        requests.sort_unstable();
        [requests[499], requests[899]]
    };
    let (silent, noisy) = (requests(0.0), requests(0.02));
    assert!(silent[0] <= 15 && silent[1] <= 20, "{silent:?}");
    assert!(noisy[0] <= 15 && noisy[1] <= 32, "{noisy:?}");
}

proptest! {
    #[test]
    fn a_failure_more_of_the_candidate_in_the_last_block_is_more_evidence(
        outcomes in proptest::collection::vec(any::<(bool, bool)>(), 0..60),
    ) {
        let mut before = rates(0.01);
        for (candidate, baseline) in outcomes {
            before.observe(Arm::Candidate, candidate);
            before.observe(Arm::Baseline, baseline);
        }
        let after = |candidate, baseline| {
            let mut test = before.clone();
            test.observe(Arm::Candidate, candidate);
            test.observe(Arm::Baseline, baseline);
            test.log_e()
        };
        prop_assert!(after(true, false) >= after(false, false) && after(true, false) >= after(true, true));
        prop_assert!(after(true, true) >= after(false, true));
        prop_assert!(after(true, true) <= before.log_e() + 1e-12, "equal outcomes are no evidence");
        prop_assert!(before.p() <= 1.0);
    }

    #[test]
    fn the_order_of_arms_does_not_matter_for_shares(a in 0u64..5000, b in 0u64..5000, weight in 0.01..0.99f64) {
        let p = |weights: [f64; 2], users: [u64; 2]| SampleRatio::new(&weights, 100.0).unwrap().look(&users).unwrap().p;
        prop_assert!((p([weight, 1.0 - weight], [a, b]) - p([1.0 - weight, weight], [b, a])).abs() < 1e-9);
    }
}

#[test]
fn outcomes_wait_for_the_other_arm_and_the_oldest_are_dropped() {
    let mut test = rates(0.01);
    for _ in 0..1000 {
        test.observe(Arm::Candidate, true);
    }
    for _ in 0..1000 {
        test.observe(Arm::Candidate, false);
    }
    for _ in 0..1000 {
        test.observe(Arm::Baseline, false);
    }
    assert!(!test.is_alarm(), "the failures were dropped");
    for arm in [Arm::Candidate, Arm::Baseline] {
        for _ in 0..1000 {
            test.observe(arm, arm == Arm::Candidate);
        }
    }
    assert!(test.is_alarm());
}

#[test]
fn designs_out_of_range_are_refused() {
    let design = rates::Design::default();
    let refused = |design| Rates::new(design).unwrap_err();
    assert_eq!(
        refused(rates::Design { alpha: 1.0, ..design }),
        rates::Error::Alpha(1.0)
    );
    let block = [0, 1];
    assert_eq!(refused(rates::Design { block, ..design }), rates::Error::Block(0));
    let priors = [[0.0, 1.0], [1.0, 1.0]];
    assert_eq!(refused(rates::Design { priors, ..design }), rates::Error::Prior(0.0));
    assert_eq!(SampleRatio::new(&[1.0], 100.0).unwrap_err(), Error::Arms(1));
    assert_eq!(SampleRatio::new(&[1.0, 0.0], 100.0).unwrap_err(), Error::Share(0.0));
    assert_eq!(
        SampleRatio::new(&[1.0, 1.0], 0.0).unwrap_err(),
        Error::Concentration(0.0)
    );
    let mut test = SampleRatio::new(&[1.0, 1.0], 100.0).unwrap();
    test.look(&[5, 5]).unwrap();
    assert!(matches!(test.look(&[5]), Err(Error::Counts { expected: 2, got: 1 })));
    assert!(matches!(
        test.look(&[5, 4]),
        Err(Error::Fell {
            arm: 1,
            before: 5,
            now: 4
        })
    ));
}

#[test]
fn right_shares_alarm_in_at_most_alpha_of_the_releases_through_a_ramp_and_wrong_ones_do() {
    let alarms = |bias: f64| {
        let releases = 1000;
        let alarms = (0..releases).filter(|&seed| {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut test = SampleRatio::new(&[0.05, 0.95], 100.0).unwrap();
            let mut p = 1.0;
            for (phase, weight) in [0.05, 0.25, 0.5].into_iter().enumerate() {
                if phase > 0 {
                    test.next_phase(&[weight, 1.0 - weight]).unwrap();
                }
                let mut users = [0, 0];
                for _ in 0..600 {
                    users[usize::from(!rng.random_bool(weight * bias))] += 1;
                    p = test.look(&users).unwrap().p;
                }
            }
            p <= 0.05
        });
        alarms.count() as f64 / releases as f64
    };
    let (right, wrong) = (alarms(1.0), alarms(0.75));
    // Nominal is 0.05; three standard errors above it are 0.071.
    assert!(right <= 0.071, "{right}");
    assert!(wrong > 0.9, "{wrong}");
}
