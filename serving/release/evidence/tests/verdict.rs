//! Every verdict, its order, and its reason.

use evidence::sequence::{Bounds, NotYet};
use evidence::verdict::{Error, Goal, Margins, Rule, Verdict};

const MARGINS: Margins = Margins {
    superiority: 0.0,
    noninferiority: 0.02,
    harm: 0.0,
    equivalence: Some(0.03),
    information_max: Some(1e6),
};

fn bounds(low: f64, high: f64) -> Bounds {
    Bounds {
        difference: (low + high) / 2.0,
        low,
        high,
        p: 0.5,
        information: 1e5,
        users: [120, 130],
    }
}

#[test]
fn each_range_has_its_verdict() {
    use Verdict::*;
    let table = [
        // low, high, superiority as goal, non-inferiority as goal
        (0.001, 0.1, Superior, Superior),
        (-0.01, 0.1, Inconclusive, NonInferior),
        (-0.02, 0.1, Inconclusive, Inconclusive),
        (-0.1, -0.001, Harmful, Harmful),
        (-0.1, 0.0, Inconclusive, Inconclusive),
        // Worse for certain, but by less than is tolerated.
        (-0.015, -0.001, Harmful, NonInferior),
        (-0.025, 0.029, Equivalent, Equivalent),
        (-0.025, 0.03, Inconclusive, Inconclusive),
        (0.0, 0.01, Equivalent, NonInferior),
        (f64::NEG_INFINITY, -0.01, Harmful, Harmful),
        (0.01, f64::INFINITY, Superior, Superior),
    ];
    for (low, high, superiority, noninferiority) in table {
        for (goal, expected) in [(Goal::Superiority, superiority), (Goal::NonInferiority, noninferiority)] {
            let decision = Rule::new(goal, MARGINS).unwrap().decide(Ok(bounds(low, high)));
            assert_eq!(decision.verdict, expected, "[{low}, {high}] for {goal:?}");
        }
    }
}

#[test]
fn margins_move_the_verdicts() {
    let margins = Margins {
        superiority: 0.05,
        harm: 0.05,
        equivalence: None,
        ..MARGINS
    };
    let rule = Rule::new(Goal::Superiority, margins).unwrap();
    let verdict = |low, high| rule.decide(Ok(bounds(low, high))).verdict;
    assert_eq!(verdict(0.04, 0.2), Verdict::Inconclusive);
    assert_eq!(verdict(0.06, 0.2), Verdict::Superior);
    assert_eq!(verdict(-0.2, -0.04), Verdict::Inconclusive);
    assert_eq!(verdict(-0.2, -0.06), Verdict::Harmful);
    assert_eq!(verdict(-0.001, 0.001), Verdict::Inconclusive);
}

#[test]
fn the_maximum_of_evidence_ends_the_wait_but_no_result() {
    let rule = Rule::new(Goal::Superiority, MARGINS).unwrap();
    let at_the_end = |low, high| Bounds {
        information: 1e6,
        ..bounds(low, high)
    };
    assert_eq!(rule.decide(Ok(at_the_end(-0.05, 0.05))).verdict, Verdict::Futile);
    assert_eq!(rule.decide(Ok(at_the_end(0.01, 0.05))).verdict, Verdict::Superior);
    assert_eq!(rule.decide(Ok(at_the_end(-0.05, -0.01))).verdict, Verdict::Harmful);
}

#[test]
fn reasons_name_the_range_and_the_users() {
    let rule = Rule::new(Goal::Superiority, MARGINS).unwrap();
    assert_eq!(
        rule.decide(Ok(bounds(-0.1, -0.01))).reason,
        "The candidate is worse: its difference in reward is between -0.1000 and -0.0100, from 120 users against 130."
    );
    let too_early = rule.decide(Err(NotYet::Users {
        needed: 30,
        candidate: 4,
        baseline: 60,
    }));
    assert_eq!(too_early.verdict, Verdict::Inconclusive);
    assert_eq!(
        too_early.reason,
        "There is too little evidence: the candidate has 4 users and the baseline 60; both need 30."
    );
}

#[test]
fn margins_that_are_no_distances_are_refused() {
    let refused = |margins| Rule::new(Goal::Superiority, margins).unwrap_err();
    let negative = refused(Margins { harm: -0.1, ..MARGINS });
    assert_eq!(
        negative,
        Error::Negative {
            name: "harm",
            value: -0.1
        }
    );
    let zero = refused(Margins {
        noninferiority: 0.0,
        ..MARGINS
    });
    assert_eq!(
        zero,
        Error::NotPositive {
            name: "noninferiority",
            value: 0.0
        }
    );
    assert!(matches!(
        refused(Margins {
            information_max: Some(f64::NAN),
            ..MARGINS
        }),
        Error::NotPositive { .. }
    ));
}
