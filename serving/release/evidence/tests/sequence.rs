//! Properties of confidence sequences, and their false alarms at continuous looks.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use evidence::sequence::{Bounds, Design, Error, NotYet, Running, Sides};
use evidence::{Clusters, Estimate};
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

fn group(mean: f64, variance: f64, users: u64) -> Estimate {
    Estimate {
        mean,
        variance,
        freedom: users as f64 - 1.0,
    }
}

fn design(sides: Sides) -> Design {
    Design::new(0.05, sides, 0.1, 30).unwrap()
}

proptest! {
    #[test]
    fn swapping_the_groups_mirrors_the_bounds(a in -1.0..1.0, b in -1.0..1.0, v in 1e-8..10.0, w in 1e-8..10.0) {
        let (a, b) = (group(a, v, 50), group(b, w, 60));
        let (there, back) = (design(Sides::Both).of(a, b).unwrap(), design(Sides::Both).of(b, a).unwrap());
        prop_assert!((there.low + back.high).abs() < 1e-9 && (there.high + back.low).abs() < 1e-9);
        prop_assert!((there.p - back.p).abs() < 1e-9);
        let (better, worse) = (design(Sides::Lower).of(a, b).unwrap(), design(Sides::Upper).of(b, a).unwrap());
        prop_assert!((better.low + worse.high).abs() < 1e-9);
    }

    #[test]
    fn bounds_narrow_with_information_and_with_alpha(i in 1e-2..1e8, more in 1.01..100.0, alpha in 1e-6..0.2) {
        for sides in [Sides::Both, Sides::Lower, Sides::Upper] {
            // The scale depends on alpha, so only the first comparison holds one design fixed.
            let design = Design::new(alpha, sides, 0.1, 30).unwrap();
            prop_assert!(design.half_width(i * more) < design.half_width(i));
            // Never narrower than the interval for one look, whose quantile is at least 1.64 at 0.05.
            let once = Design::new(0.05, sides, 0.1, 30).unwrap();
            prop_assert!(once.half_width(i) > 1.644 / i.sqrt());
        }
        prop_assert!(design(Sides::Lower).half_width(i) <= Design::new(0.05, Sides::Both, 0.1, 30).unwrap().half_width(i) * 1.2);
    }

    #[test]
    fn the_p_value_is_below_alpha_exactly_if_the_bounds_exclude_zero(d in -1.0..1.0, v in 1e-6..1.0) {
        for sides in [Sides::Both, Sides::Lower, Sides::Upper] {
            let bounds = design(sides).of(group(d, v, 50), group(0.0, v, 50)).unwrap();
            let excluded = bounds.low > 0.0 || bounds.high < 0.0;
            // Not where rounding decides.
            prop_assume!((bounds.p - 0.05).abs() > 1e-9);
            prop_assert_eq!(excluded, bounds.p < 0.05);
        }
    }
}

#[test]
fn a_group_that_never_varies_has_the_variance_of_the_other_ones_users() {
    let design = design(Sides::Both);
    // 100 users with a variance of 0.1 in their mean: 0.1 · 100 / 50 for the mean of 50 such users
    let (constant, other) = (group(0.0, 0.0, 50), group(0.5, 0.1, 100));
    let known = design.of(group(0.0, 0.2, 50), other).unwrap();
    for (there, expected) in [
        (design.of(constant, other).unwrap(), known.difference),
        (design.of(other, constant).unwrap(), -known.difference),
    ] {
        assert!((there.information - known.information).abs() < 1e-9, "{there:?}");
        assert!((there.difference - expected).abs() < 1e-9, "{there:?}");
    }
}

/// Users with ten observations each, whose mean is that of the group, 0.3 more or less.
fn users(names: std::ops::Range<u64>, mean: f64) -> Clusters<u64> {
    let mut clusters = Clusters::default();
    for user in names {
        clusters.add_many(user, 10.0 * (mean + if user % 2 == 0 { 0.3 } else { -0.3 }), 10.0);
    }
    clusters
}

#[test]
fn periods_are_compared_apart_and_users_who_come_again_are_no_new_evidence() {
    let design = design(Sides::Both);
    let across = |periods: &[[Clusters<u64>; 2]]| design.across(periods, Clusters::estimate);
    // the candidate is 0.1 better by day and by night, and has more users when rewards are low
    let day = [users(0..40, 0.9), users(1000..1400, 0.8)];
    let night = [users(2000..2400, 0.3), users(5000..5040, 0.2)];
    let apart = across(&[day.clone(), night.clone()]).unwrap();
    assert!((apart.difference - 0.1).abs() < 1e-9, "{apart:?}");
    let one = across(std::slice::from_ref(&day)).unwrap();
    assert!(
        (apart.information / one.information - 2.0).abs() < 0.06,
        "other users: {apart:?} {one:?}"
    );
    // the same users say the same again
    let again = across(&[day.clone(), day.clone(), day.clone()]).unwrap();
    assert!(
        (again.information / one.information - 1.0).abs() < 0.03,
        "{again:?} {one:?}"
    );
    let too_few = [users(0..3, 0.0), users(1000..1400, 9.0)];
    assert_eq!(across(&[day.clone(), too_few.clone()]), Ok(one));
    assert!(matches!(across(&[too_few]), Err(NotYet::Users { candidate: 3, .. })));
    assert!(matches!(across(&[]), Err(NotYet::Users { candidate: 0, .. })));
}

/// A tenth has no exact sum, so the variance of constant values is not exactly zero.
#[test]
fn constant_values_that_are_not_exact_in_binary_have_no_variation() {
    let constant = |count: u64| {
        let mut clusters = Clusters::default();
        for user in 0..count {
            (0..=user % 7).for_each(|_| clusters.add(user, 0.1));
        }
        clusters
    };
    let found = design(Sides::Both).between(&constant(50), &constant(60));
    assert_eq!(found, Err(NotYet::NoVariation));
}

#[test]
fn no_other_scale_sees_the_declared_effect_sooner() {
    for (alpha, soonest) in [(0.05, 0.1), (0.001, 0.02)] {
        let planned = Design::new(alpha, Sides::Both, soonest, 2).unwrap();
        let information = planned.information_planned();
        assert!((planned.half_width(information) / soonest - 1.0).abs() < 1e-9);
        for other in [0.5, 0.9, 1.1, 2.0] {
            let other = Design::new(alpha, Sides::Both, soonest * other, 2).unwrap();
            assert!(other.half_width(information) > soonest * 1.0001);
        }
    }
}

#[test]
fn designs_that_promise_nothing_are_refused() {
    assert_eq!(Design::new(0.0, Sides::Both, 0.1, 30), Err(Error::Alpha(0.0)));
    assert!(matches!(
        Design::new(f64::NAN, Sides::Both, 0.1, 30),
        Err(Error::Alpha(_))
    ));
    assert_eq!(Design::new(0.05, Sides::Both, -0.1, 30), Err(Error::Soonest(-0.1)));
    assert_eq!(Design::new(0.05, Sides::Both, 0.1, 1), Err(Error::UsersMin(1)));
}

#[test]
fn there_are_no_bounds_from_few_users_or_without_variation() {
    let design = design(Sides::Both);
    let few = design.of(group(1.0, 0.1, 29), group(0.0, 0.1, 500));
    assert_eq!(
        few,
        Err(NotYet::Users {
            needed: 30,
            candidate: 29,
            baseline: 500
        })
    );
    assert!(matches!(
        design.between(&Clusters::<u64>::default(), &Clusters::default()),
        Err(NotYet::Users { candidate: 0, .. })
    ));
    assert_eq!(
        design.of(group(1.0, 0.0, 50), group(0.0, 0.0, 50)),
        Err(NotYet::NoVariation)
    );
    assert_eq!(
        design.of(group(f64::NAN, 0.1, 50), group(0.0, 0.1, 50)),
        Err(NotYet::NotFinite)
    );
    assert_eq!(
        design.of(group(1.0, f64::NAN, 50), group(0.0, 0.1, 50)),
        Err(NotYet::NotFinite)
    );
}

#[test]
fn looks_that_contradict_each_other_have_no_common_bounds() {
    let look = |difference, low, high, p| Bounds {
        difference,
        low,
        high,
        p,
        information: 1.0,
        users: [50, 50],
    };
    let mut running = Running::default();
    running.look(&look(0.2, -0.1, 0.5, 0.4));
    running.look(&look(0.3, 0.1, 0.6, 0.01));
    running.look(&look(0.1, 0.0, 0.3, 0.2));
    assert_eq!(running.bounds(), Some([0.1, 0.3]));
    assert_eq!(running.p(), 0.01);
    running.look(&look(-0.2, -0.3, 0.0, 0.2));
    assert_eq!(running.bounds(), None);
}

/// Both arms are the same. Users have their own mean and differ in how often they come. There is a
/// look after each visit. Returns the shares of releases with a false alarm: of the confidence
/// sequence, and of the interval that is made for one look.
fn false_alarms(releases: u64) -> (f64, f64) {
    let design = Design::new(0.1, Sides::Both, 0.15, 30).unwrap();
    let (mut sequence, mut once) = (0, 0);
    for seed in 0..releases {
        let mut rng = StdRng::seed_from_u64(seed);
        let means = (0..160).map(|_| rng.random::<f64>()).collect::<Vec<_>>();
        let mut groups = [Clusters::default(), Clusters::default()];
        let mut alarms = (false, false);
        for _ in 0..900 {
            // Low numbers come more often.
            let user = (160.0 * rng.random::<f64>().powf(1.7)) as usize;
            for _ in 0..rng.random_range(1..6) {
                let value = match (rng.random_bool(0.4), rng.random_bool(means[user])) {
                    (true, _) => 0.0,
                    (false, true) => 0.7,
                    (false, false) => -0.1,
                };
                groups[user % 2].add(user, value);
            }
            let [candidate, baseline] = &groups;
            if let Ok(bounds) = design.between(candidate, baseline) {
                alarms.0 |= bounds.low > 0.0 || bounds.high < 0.0;
                let [candidate, baseline] = [candidate, baseline].map(|group| group.estimate().unwrap());
                let interval = candidate.minus(baseline);
                alarms.1 |= interval.is_above_zero() || interval.is_below_zero();
            }
        }
        sequence += u64::from(alarms.0);
        once += u64::from(alarms.1);
    }
    (sequence as f64 / releases as f64, once as f64 / releases as f64)
}

#[test]
fn equal_arms_with_recurring_users_rarely_raise_an_alarm_at_any_of_900_looks() {
    let (sequence, once) = false_alarms(300);
    // Nominal is 0.1; three standard errors above it are 0.152.
    assert!(sequence <= 0.152, "{sequence}");
    // The interval for one look shows that the simulation can fail: nominal is 0.05.
    assert!(once > 0.15, "{once}");
}
