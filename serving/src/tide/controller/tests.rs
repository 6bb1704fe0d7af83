use super::*;
use proptest::prelude::*;
use time::Duration as Span;
use time::macros::datetime;

const START: OffsetDateTime = datetime!(2026-11-02 09:00 UTC);

fn options() -> Options {
    Options {
        forecast_weight: 1.0,
        newest_week_weight: 1.0,
        release_slots_per_s: 1.0,
        cool_down_ms: 5_000,
        whole_after_ms: 0,
        ..Options::default()
    }
}

fn uses(production: usize) -> Sample {
    Sample {
        production,
        ..Sample::default()
    }
}

/// Looks once a second from `START` on.
fn looks(controller: &mut Controller, samples: &[Sample]) -> Vec<(usize, Why)> {
    let look = |(second, sample): (i64, &Sample)| {
        let decision = controller.look(START + Span::seconds(second), *sample);
        (decision.slots, decision.why)
    };
    (0..).zip(samples).map(look).collect()
}

#[test]
fn slots_are_taken_at_once_and_lent_again_slowly() {
    let mut controller = Controller::new(16, 1, options());
    let samples = [uses(2), uses(9), uses(4), uses(4), uses(4), uses(4), uses(4), uses(4)];
    let expected = [
        (13, Why::Floor),
        (6, Why::Floor),
        (8, Why::Release),
        (9, Why::Release),
        (10, Why::Release),
        (11, Why::Floor),
        (11, Why::Floor),
        (11, Why::Floor),
    ];
    assert_eq!(looks(&mut controller, &samples), expected);
}

#[test]
fn nothing_is_lent_for_a_while_after_production_had_to_wait() {
    let mut controller = Controller::new(4, 0, options());
    let full = Sample {
        production_waiting: 1,
        ..uses(4)
    };
    let mut samples = vec![uses(0), full];
    samples.extend([uses(0); 6]);
    let decided = looks(&mut controller, &samples);
    assert_eq!(decided[0], (4, Why::Demand));
    assert_eq!(decided[1..6], [(0, Why::CoolDown); 5]);
    assert_eq!(decided[6].0, 4, "after five seconds");
}

#[test]
fn a_slow_first_token_begins_a_cool_down() {
    let slow_is = Options {
        first_token_ms_max: 100,
        ..options()
    };
    let mut controller = Controller::new(4, 0, slow_is);
    let waited = |ms| Sample {
        first_token: Some(Duration::from_millis(ms)),
        ..uses(1)
    };
    let decided = looks(&mut controller, &[waited(100), waited(101), uses(1)]);
    assert_eq!(decided.map_why(), [Why::Demand, Why::CoolDown, Why::CoolDown]);
}

trait MapWhy {
    fn map_why(&self) -> Vec<Why>;
}

impl MapWhy for Vec<(usize, Why)> {
    fn map_why(&self) -> Vec<Why> {
        self.iter().map(|(_, why)| *why).collect()
    }
}

#[test]
fn what_last_week_needed_is_kept_after_a_restart() {
    let mut controller = Controller::new(16, 1, options());
    controller.remember(START - Span::weeks(1), 10.0, 0.0);
    controller.remember(START - Span::weeks(1) + Span::minutes(10), 0.0, 0.0);
    controller.remember(START - Span::weeks(1) + Span::minutes(15), 0.0, 0.0);
    let decision = controller.look(START, uses(2));
    assert_eq!(
        (decision.slots, decision.why, decision.expected),
        (6, Why::Forecast, Some(10.0))
    );
    let later = controller.look(START + Span::minutes(10), uses(2));
    assert_eq!((later.slots, later.why), (13, Why::Floor));
}

#[test]
fn nothing_is_lent_outside_the_windows() {
    let at_night = Options {
        windows: vec!["22:00-06:00 Europe/Berlin".parse().unwrap()],
        ..options()
    };
    let mut controller = Controller::new(4, 0, at_night);
    assert_eq!(controller.look(START, uses(0)).why, Why::OutsideWindow);
    assert_eq!(controller.look(START + Span::hours(12), uses(0)).slots, 4);
}

#[test]
fn a_day_lends_no_more_than_its_budget_also_after_a_restart() {
    let little = Options {
        slot_seconds_per_day_max: 100,
        ..options()
    };
    let mut controller = Controller::new(4, 0, little);
    controller.remember(START - Span::hours(1), 0.0, 97.0);
    let lent = Sample {
        lent_slot_seconds: 2.0,
        ..uses(0)
    };
    let decided = looks(&mut controller, &[lent, lent, lent]);
    assert_eq!(decided[0].0, 4);
    assert_eq!(decided[1..], [(0, Why::BudgetUsedUp); 2]);
    let tomorrow = controller.look(START + Span::hours(15), uses(0));
    assert_eq!(tomorrow.slots, 4);
}

#[test]
fn nothing_is_lent_while_the_trainer_computes_or_is_silent() {
    let mut controller = Controller::new(4, 1, options());
    let beside = |trainer| Sample { trainer, ..uses(1) };
    let samples = [Trainer::Silent, Trainer::Waits, Trainer::Computes, Trainer::Waits].map(beside);
    let expected = [
        (0, Why::TrainerSilent),
        (2, Why::Floor),
        (0, Why::TrainerComputes),
        (2, Why::Floor),
    ];
    assert_eq!(looks(&mut controller, &samples), expected);
}

#[test]
fn an_unused_engine_is_lent_whole_if_another_serves_and_taken_back_at_once() {
    let after_two = Options {
        whole_after_ms: 2_000,
        ..options()
    };
    let mut controller = Controller::new(4, 2, after_two.clone());
    let unused = Sample {
        has_substitute: true,
        ..uses(0)
    };
    let decided = looks(&mut controller, &[uses(1), unused, unused, unused, uses(1)]);
    assert_eq!(decided[3], (4, Why::Whole), "two seconds after it became unused");
    assert_eq!(decided[4], (1, Why::Floor));
    // the last engine of a version is not lent whole
    let mut alone = Controller::new(4, 2, after_two);
    assert_eq!(looks(&mut alone, &[uses(0); 4])[3], (2, Why::Floor));
}

fn sample() -> impl Strategy<Value = Sample> {
    let trainer = prop::sample::select(vec![
        Trainer::Absent,
        Trainer::Waits,
        Trainer::Computes,
        Trainer::Silent,
    ]);
    let counts = (0usize..20, 0usize..4, 0usize..20, any::<bool>());
    (counts, trainer).prop_map(|((production, waiting, background, has_substitute), trainer)| Sample {
        production,
        production_waiting: waiting,
        background,
        production_slot_seconds: production as f64,
        lent_slot_seconds: background as f64,
        first_token: None,
        has_substitute,
        trainer,
    })
}

proptest! {
    #[test]
    fn the_floor_and_production_are_never_lent_and_slots_come_back_within_one_look(
        slots in 1usize..20,
        floor in 0usize..4,
        known in prop::collection::vec(0.0..20.0, 0..20),
        samples in prop::collection::vec((sample(), 1i64..90), 1..60),
    ) {
        let whole = Options { whole_after_ms: 30_000, ..options() };
        let mut controller = Controller::new(slots, floor, whole);
        for (minute, peak) in (0i64..).zip(known) {
            controller.remember(START - Span::weeks(1) + Span::minutes(minute), peak, 0.0);
        }
        let mut now = START;
        for (sample, seconds) in samples {
            now += Span::seconds(seconds);
            let decision = controller.look(now, sample);
            let demand = sample.production + sample.production_waiting;
            let free = slots.saturating_sub(demand);
            prop_assert!(decision.slots <= free);
            if matches!(sample.trainer, Trainer::Computes | Trainer::Silent) {
                prop_assert_eq!(decision.slots, 0);
            }
            match decision.whole {
                true => prop_assert!(demand == 0 && sample.has_substitute),
                false => prop_assert!(decision.slots == 0 || decision.slots + demand + floor <= slots),
            }
        }
    }
}
