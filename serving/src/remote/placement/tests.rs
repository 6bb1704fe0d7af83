use super::TrafficClass::{Background, Production};
use super::*;

fn placement(states: &[State]) -> Placement {
    weighted(states, &vec![1.0; states.len()], Instant::now())
}

/// Engines that all took up their states at `since`.
fn weighted(states: &[State], weights: &[f64], since: Instant) -> Placement {
    let rules = Rules {
        slots: 4,
        reserved: 1,
        slow_start: Duration::from_secs(10),
        affinity_slack: 2,
    };
    let mut placement = Placement::new(weights, rules);
    for (engine, &state) in states.iter().enumerate() {
        placement.set_state(engine, state, since);
    }
    placement
}

/// Where a sequence without a session goes now.
fn pick(placement: &Placement, serial: i64, class: TrafficClass) -> Option<usize> {
    let sequence = Waiting {
        serial,
        class,
        session: None,
    };
    placement.pick(sequence, Instant::now())
}

#[test]
fn a_sequence_goes_to_the_engine_of_its_version_that_runs_the_fewest() {
    let mut engines = placement(&[State::Serving(7), State::Serving(7), State::Serving(1), State::Down]);
    engines.engines[0].production = 1;
    assert_eq!(pick(&engines, 7, Production), Some(1));
    assert_eq!(pick(&engines, 1, Production), Some(2));
    assert_eq!(pick(&engines, 9, Production), None);
}

#[test]
fn background_sequences_leave_the_reserved_slots() {
    let mut engines = placement(&[State::Serving(7)]);
    engines.engines[0].background = 3;
    assert_eq!(pick(&engines, 7, Background), None);
    assert_eq!(pick(&engines, 7, Production), Some(0));
    engines.engines[0].production = 1;
    assert_eq!(pick(&engines, 7, Production), None);
}

#[test]
fn background_sequences_keep_within_what_an_engine_lends() {
    let mut engines = placement(&[State::Serving(1), State::Serving(1)]);
    engines.engines[0].limit.slots = 0;
    engines.engines[1].limit.slots = 1;
    assert_eq!(pick(&engines, 1, TrafficClass::Background), Some(1));
    engines.engines[1].background = 1;
    assert_eq!(pick(&engines, 1, TrafficClass::Background), None);
    assert_eq!(pick(&engines, 1, TrafficClass::Production), Some(0));
}

#[test]
fn production_uses_an_engine_that_is_lent_whole_only_if_no_other_has_a_free_slot() {
    let mut engines = placement(&[State::Serving(1), State::Serving(1)]);
    engines.engines[0].limit.whole = true;
    engines.engines[1].production = 1;
    assert_eq!(pick(&engines, 1, TrafficClass::Production), Some(1));
    assert!(!engines.has_substitute(1) && engines.has_substitute(0));
    engines.engines[1].production = 100;
    assert_eq!(pick(&engines, 1, TrafficClass::Production), Some(0));
}

#[test]
fn a_draining_engine_finishes_what_no_other_engine_can() {
    let mut engines = placement(&[State::Draining(7)]);
    assert_eq!((engines.servers(7), pick(&engines, 7, Production)), (0, Some(0)));
    engines = placement(&[State::Draining(7), State::Serving(7)]);
    assert_eq!(pick(&engines, 7, Production), Some(1));
}

#[test]
fn a_new_version_takes_the_engine_that_is_missed_least() {
    use State::{Down, Serving, Unproven};
    let kept = BTreeSet::from([1, 8]);
    let place = |states: &[State]| placement(states).place(&kept, Instant::now());
    assert_eq!(place(&[Serving(7), Unproven]), Some(1));
    assert_eq!(place(&[Serving(6), Serving(7), Serving(7)]), Some(1));
    assert_eq!(place(&[Serving(1), Serving(7)]), Some(1));
    assert_eq!(place(&[Serving(8), Serving(1), Serving(1)]), Some(1));
    assert_eq!(place(&[Serving(8), Serving(1), Down]), None);
}

#[test]
fn spare_engines_go_to_the_version_that_lacks_them_most() {
    use State::{Serving, Unproven};
    let wanted = [(8, 0.7), (1, 0.3)];
    let spare = |states: &[State]| placement(states).spare(&wanted, Instant::now());
    assert_eq!(spare(&[Serving(8), Serving(1), Unproven]), Some((2, 8)));
    assert_eq!(
        spare(&[Serving(8), Serving(8), Serving(8), Serving(1), Serving(7)]),
        Some((4, 1))
    );
    assert_eq!(spare(&[Serving(8), Unproven]), Some((1, 1)));
    assert_eq!(spare(&[Serving(8), Serving(1)]), None);
}

#[test]
fn sequences_are_divided_by_weight() {
    let mut engines = weighted(&[State::Serving(7); 2], &[1.0, 3.0], Instant::now());
    for _ in 0..4 {
        let engine = pick(&engines, 7, Production).unwrap();
        engines.engines[engine].production += 1;
    }
    assert_eq!((engines.engines[0].production, engines.engines[1].production), (1, 3));
}

/// Where the turns of many sessions go, when nothing else runs.
fn homes(engines: &Placement, sessions: u128) -> Vec<usize> {
    let home = |session| {
        let turn = Waiting {
            serial: 7,
            class: Production,
            session: Some(Uuid::from_u128(session)),
        };
        engines.pick(turn, Instant::now()).unwrap()
    };
    (0..sessions).map(home).collect()
}

#[test]
fn sessions_stay_on_their_engines_and_only_those_of_an_engine_that_goes_move() {
    let mut engines = weighted(&[State::Serving(7); 3], &[1.0, 1.0, 2.0], Instant::now());
    let before = homes(&engines, 1000);
    assert_eq!(homes(&engines, 1000), before);
    let count = |of: usize| before.iter().filter(|&&home| home == of).count();
    assert!(
        (200..300).contains(&count(0)) && (200..300).contains(&count(1)),
        "{} {}",
        count(0),
        count(1)
    );
    engines.set_state(1, State::Down, Instant::now());
    for (before, after) in before.iter().zip(homes(&engines, 1000)) {
        assert!(*before == 1 || after == *before, "{before} became {after}");
        assert_ne!(after, 1);
    }
}

#[test]
fn a_session_leaves_an_engine_that_is_clearly_busier() {
    let mut engines = placement(&[State::Serving(7); 2]);
    let home = homes(&engines, 1)[0];
    engines.engines[home].production = 2;
    assert_eq!(homes(&engines, 1), [home], "two more are allowed");
    engines.engines[home].production = 3;
    assert_eq!(homes(&engines, 1), [1 - home]);
    engines.engines[1 - home].production = 3;
    assert_eq!(homes(&engines, 1), [home], "both are busy");
}

#[test]
fn an_engine_beside_a_warm_one_gets_its_slots_over_the_slow_start() {
    let start = Instant::now();
    let mut engines = weighted(&[State::Serving(7); 2], &[1.0, 1.0], start);
    let after = |seconds| start + Duration::from_secs(seconds);
    let slots = |engines: &Placement, engine, now| engines.slots(engine, &[0, 1], now);
    // both are cold, so neither waits for the other
    assert_eq!((slots(&engines, 0, start), slots(&engines, 1, start)), (4, 4));
    engines.set_state(1, State::Changing, after(15));
    engines.set_state(1, State::Serving(7), after(20));
    assert_eq!(slots(&engines, 0, after(20)), 4);
    let growing: Vec<usize> = [20, 24, 26, 29, 30].map(|at| slots(&engines, 1, after(at))).into();
    assert_eq!(growing, [1, 2, 3, 4, 4]);
    // the warm one goes, and the other must take everything
    engines.set_state(0, State::Down, after(21));
    assert_eq!(engines.slots(1, &[1], after(21)), 4);
}

#[test]
fn an_engine_that_takes_no_weights_is_never_given_another_version() {
    use State::{Serving, Unproven};
    let mut engines = placement(&[Unproven, Serving(6)]);
    engines.engines[0].takes_weights = false;
    assert_eq!(engines.place(&BTreeSet::new(), Instant::now()), Some(1));
    assert_eq!(engines.spare(&[(8, 1.0)], Instant::now()), Some((1, 8)));
    engines.engines[1].takes_weights = false;
    assert_eq!(
        (
            engines.place(&BTreeSet::new(), Instant::now()),
            engines.spare(&[(8, 1.0)], Instant::now())
        ),
        (None, None)
    );
}

#[test]
fn an_engine_whose_update_failed_is_tried_after_others_until_it_may_be_tried_again() {
    use State::{Serving, Unproven};
    let now = Instant::now();
    let mut engines = placement(&[Unproven, Serving(7)]);
    engines.engines[0].retry_at = Some(now + Duration::from_secs(1));
    let kept = BTreeSet::from([8]);
    assert_eq!(engines.place(&kept, now), Some(1));
    assert_eq!(engines.spare(&[(7, 1.0)], now), None);
    // there is no other
    assert_eq!(engines.place(&BTreeSet::from([7]), now), Some(0));
    let later = now + Duration::from_secs(1);
    assert_eq!(engines.place(&kept, later), Some(0));
    assert_eq!(engines.spare(&[(7, 1.0)], later), Some((0, 7)));
}

#[test]
fn an_engine_on_an_operators_word_serves_the_version_before_until_nothing_is_routed_to_it() {
    let mut engines = placement(&[State::Serving(8)]);
    engines.engines[0].vouched = vec![8, 7];
    assert_eq!((engines.servers(7), engines.servers(8)), (1, 1));
    assert_eq!(pick(&engines, 7, Production), Some(0));
    engines.engines[0].vouched = vec![8];
    assert_eq!(
        (engines.servers(7), engines.holds(7), engines.holds(8)),
        (0, false, true)
    );
}
