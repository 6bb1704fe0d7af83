//! The test for changes that goes on for ever.

use evidence::change::{Change, Design, Direction, Error, News, Side, Unit};
use rand::{Rng, SeedableRng, rngs::StdRng};

const DESIGN: Design = Design {
    unit: Unit::Share,
    direction: Direction::Up,
    margin: 0.05,
    values_per_false_alarm: 10_000.0,
    reference: 1_000,
};

/// After a reference in which every other value is 1.
fn watching(design: &Design) -> Change {
    let mut change = Change::default();
    for nth in 0..design.reference {
        assert_eq!(change.observe(design, Side::Watched, f64::from(nth % 2)), None);
    }
    assert!(change.levels(design).is_some());
    change
}

/// The mean of M over all sequences of so many more values, of which each is 1 with this probability.
fn mean_statistic(design: &Design, change: &Change, values: u32, rate: f64) -> f64 {
    if values == 0 {
        return change.evidence(design) * design.values_per_false_alarm;
    }
    let of = |value: f64, probability: f64| {
        let mut next = change.clone();
        assert_eq!(next.observe(design, Side::Watched, value), None);
        probability * mean_statistic(design, &next, values - 1, rate)
    };
    of(1.0, rate) + of(0.0, 1.0 - rate)
}

#[test]
fn over_all_sequences_at_the_margin_the_statistic_grows_by_1_a_value() {
    for (direction, rate) in [(Direction::Up, 0.55), (Direction::Down, 0.45)] {
        let design = Design {
            direction,
            values_per_false_alarm: 1e9,
            ..DESIGN
        };
        let mean = mean_statistic(&design, &watching(&design), 10, rate);
        assert!((mean - 10.0).abs() < 1e-6, "{direction:?}: {mean}");
    }
    // within the margin it grows more slowly, and beyond it faster
    let design = Design {
        values_per_false_alarm: 1e9,
        ..DESIGN
    };
    assert!(mean_statistic(&design, &watching(&design), 10, 0.5) < 9.9);
    assert!(mean_statistic(&design, &watching(&design), 10, 0.7) > 11.0);
    let both = Design {
        direction: Direction::Both,
        ..design
    };
    assert!(mean_statistic(&both, &watching(&both), 10, 0.5) < 10.0);
}

/// Values until the first alarm after the reference, at most `most`.
fn values_until_alarm(design: &Design, rng: &mut StdRng, rate: f64, most: u32) -> u32 {
    let mut change = watching(design);
    for nth in 1..=most {
        let value = f64::from(u8::from(rng.random_bool(rate)));
        if change.observe(design, Side::Watched, value).is_some() {
            return nth;
        }
    }
    most
}

#[test]
fn at_the_margin_false_alarms_are_as_rare_as_declared_and_a_change_beyond_is_seen() {
    let design = Design {
        values_per_false_alarm: 1_000.0,
        ..DESIGN
    };
    let mut rng = StdRng::seed_from_u64(1);
    let runs = 300;
    let mut until = |rate, most| -> f64 {
        let sum: u32 = (0..runs)
            .map(|_| values_until_alarm(&design, &mut rng, rate, most))
            .sum();
        f64::from(sum) / f64::from(runs)
    };
    // cut off at 20,000 values, so the true mean is larger
    let at_the_margin = until(0.55, 20_000);
    assert!(at_the_margin > 1_000.0, "{at_the_margin}");
    let beyond = until(0.8, 20_000);
    assert!(beyond < 80.0, "{beyond}");
}

/// A stream of both sides, in which the watched arm has one of three values.
struct Stream {
    rng: StdRng,
    change: Change,
    news: Vec<News>,
}

impl Stream {
    fn new() -> Self {
        Stream {
            rng: StdRng::seed_from_u64(7),
            change: Change::default(),
            news: Vec::new(),
        }
    }

    fn values(&mut self, design: &Design, count: u32, watched: f64, others: f64) {
        for nth in 0..count {
            let (side, rate) = match nth % 3 {
                0 => (Side::Watched, watched),
                _ => (Side::Others, others),
            };
            let value = f64::from(u8::from(self.rng.random_bool(rate)));
            self.news.extend(self.change.observe(design, side, value));
        }
    }
}

#[test]
fn what_changes_for_all_arms_is_no_change_of_one() {
    let mut stream = Stream::new();
    stream.values(&DESIGN, 6_000, 0.3, 0.3);
    assert!(stream.change.levels(&DESIGN).unwrap().others.is_some());
    stream.values(&DESIGN, 20_000, 0.6, 0.6);
    assert_eq!(stream.news, []);
    // an arm that differs from the others from the first value on has not changed
    let mut stream = Stream::new();
    stream.values(&DESIGN, 40_000, 0.6, 0.3);
    assert_eq!(stream.news, []);
    stream.values(&DESIGN, 3_000, 0.9, 0.3);
    assert!(matches!(stream.news[..], [News::Changed(_)]), "{:?}", stream.news);
}

#[test]
fn after_an_alarm_the_next_values_are_the_reference() {
    let mut stream = Stream::new();
    stream.values(&DESIGN, 6_000, 0.2, 0.2);
    stream.values(&DESIGN, 9_000, 0.5, 0.2);
    let [News::Changed(before), News::Settled(after)] = stream.news[..] else {
        panic!("{:?}", stream.news)
    };
    assert!((before.reference - 0.2).abs() < 0.05, "{before:?}");
    assert!(before.recent > 0.3 && before.others.unwrap() < 0.35, "{before:?}");
    assert!((after.reference - 0.5).abs() < 0.06, "{after:?}");
    assert!(!stream.change.is_changed());
    // back again: only a fall, which does not count
    stream.values(&DESIGN, 9_000, 0.2, 0.2);
    assert_eq!(stream.news.len(), 2);
}

#[test]
fn an_arm_whose_others_stop_is_compared_with_its_own_past() {
    let mut stream = Stream::new();
    stream.values(&DESIGN, 6_000, 0.2, 0.2);
    let alone = |stream: &mut Stream, count, rate| {
        for _ in 0..count {
            let value = f64::from(u8::from(stream.rng.random_bool(rate)));
            stream.news.extend(stream.change.observe(&DESIGN, Side::Watched, value));
        }
    };
    alone(&mut stream, 3_000, 0.2);
    assert_eq!(stream.change.levels(&DESIGN).unwrap().others, None);
    assert_eq!(stream.news, []);
    alone(&mut stream, 500, 0.6);
    assert!(matches!(stream.news[..], [News::Changed(_)]), "{:?}", stream.news);
}

#[test]
fn lengths_count_by_their_ratio_to_the_first_ones() {
    let design = Design {
        unit: Unit::Amount,
        direction: Direction::Both,
        ..DESIGN
    };
    for (scale, factor, changes) in [
        (10.0, 1.1, false),
        (5_000.0, 1.1, false),
        (10.0, 2.0, true),
        (5_000.0, 0.5, true),
    ] {
        let mut rng = StdRng::seed_from_u64(3);
        let mut change = Change::default();
        let mut alarms = 0;
        for nth in 0..5_000 {
            let length = scale * (1.0 + rng.random::<f64>()) * if nth < 2_000 { 1.0 } else { factor };
            alarms += u32::from(matches!(
                change.observe(&design, Side::Watched, length),
                Some(News::Changed(_))
            ));
        }
        assert_eq!(alarms, u32::from(changes), "{scale} × {factor}");
    }
}

#[test]
fn a_stored_test_goes_on_as_if_it_had_not_been_stored() {
    let mut stream = Stream::new();
    stream.values(&DESIGN, 8_000, 0.3, 0.25);
    let text = serde_json::to_string(&stream.change).unwrap();
    assert!(text.len() < 4_000, "{}", text.len());
    let restored: Change = serde_json::from_str(&text).unwrap();
    let mut again = Stream {
        rng: stream.rng.clone(),
        change: restored,
        news: Vec::new(),
    };
    stream.values(&DESIGN, 2_000, 0.6, 0.25);
    again.values(&DESIGN, 2_000, 0.6, 0.25);
    assert_eq!(stream.news.len(), 1);
    assert_eq!(format!("{:.9?}", stream.news), format!("{:.9?}", again.news));
}

#[test]
fn values_that_are_none_are_left_out() {
    let mut change = Change::default();
    for value in [f64::NAN, f64::INFINITY, -0.1] {
        assert_eq!(change.observe(&DESIGN, Side::Watched, value), None);
    }
    assert_eq!(change, Change::default());
}

#[test]
fn a_design_that_cannot_be_used_says_what_to_change() {
    let of = |change: fn(&mut Design)| {
        let mut design = DESIGN;
        change(&mut design);
        design.check().unwrap_err()
    };
    assert_eq!(DESIGN.check(), Ok(()));
    assert_eq!(of(|design| design.margin = 0.0), Error::Margin(0.0));
    assert_eq!(
        of(|design| design.values_per_false_alarm = 99.0),
        Error::FalseAlarms(99.0)
    );
    assert_eq!(of(|design| design.reference = 99), Error::Reference(99));
}
