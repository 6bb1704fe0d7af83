//! Did an arm's answers change? A sequential test of one figure, such as the share of answers that
//! nobody answered, that may be read after every answer and goes on for ever.
//!
//! **Values.** Each trajectory of the watched arm gives a value x in [0, 1]; an amount v ≥ 0 such as a
//! length counts as x = v / (v + scale), where the scale is the mean of the first ones. If other
//! arms serve at the same time, k values of the arm are compared with the next m of the others, so
//! that what changes for all does not count: y = (mean of the k − mean of the m + 1) / 2. Without
//! others y = x. k and m are about in the ratio of the first values, and fixed before the rest.
//!
//! **Reference.** The mean r of the first y's. The declared margin δ says which changes do not
//! matter. The test is about "the mean of y, given what came before, is at most c = r + δ" (δ / 2 with
//! others, because y is half of a difference). Falling figures are tested as 1 − y.
//!
//! **Statistic.** For a bet λ in (0, 1/c) the factor L = 1 + λ (y − c) is not negative, and its mean is at
//! most 1 as long as that holds (Waudby-Smith and Ramdas, *Estimating means of bounded random variables
//! by betting*, 2024). The e-detector of Shiryaev and Roberts' form is
//!
//! ```text
//! Mₙ = Lₙ (Mₙ₋₁ + 1),  M₀ = 0          alarm: Mₙ ≥ N
//! ```
//!
//! (Shin, Ramdas and Rinaldo, *E-detectors: a nonparametric framework for sequential change detection*,
//! 2022, arXiv 2203.03532). Mₙ − n is a supermartingale, so the mean time until an alarm, while
//! nothing changes by more than δ, is at least N. M here is the mean of the statistics of five bets,
//! and of both directions where both count; a mean of e-detectors is one too.
//!
//! After an alarm the next values are the new reference. The alarm is over when that is complete.
//!
//! **What it needs.** The reference's mean has an error of its own, about 0.015 for a share of 0.3 and
//! 1,000 values, which uses up some of the margin. Values that depend on each other, such as the turns of
//! a session, must be one value.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Values of the arm that fix the scale and how many values are compared at a time.
const FIRST: usize = 100;
/// With fewer values of the others among the first, the arm is compared with its own past.
const OTHERS_MIN: usize = 10;
/// Values of one side that are compared at a time, at most.
const BLOCK_MAX: usize = 10;
/// Comparisons for which values of one side wait for the other. The oldest beyond are dropped, which
/// depends on no value.
const WAITING_BLOCKS: usize = 10;
/// Values of the arm in a row that met none of the others. Then the others have stopped.
const UNMATCHED_MAX: u32 = 1_000;
/// λ c of each bet.
const BETS: [f64; 5] = [0.5, 0.25, 0.125, 0.0625, 0.03125];
/// About so many of the latest values make the present level.
const RECENT: f64 = 100.0;
/// So that amounts that are all 0 have a scale.
const SCALE_MIN: f64 = 1e-3;

/// Which changes raise an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    Up,
    Down,
    Both,
}

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// From 0 to 1.
    Share,
    /// At least 0. A change of δ = 0.05 is one by about 22% of the first mean.
    Amount,
}

/// Whose value it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Watched,
    Others,
}

/// What is declared before the first value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Design {
    pub unit: Unit,
    pub direction: Direction,
    /// δ: changes up to this do not count. In (0, 0.5].
    pub margin: f64,
    /// N: mean number of the arm's values until a false alarm, at least. At least 100.
    pub values_per_false_alarm: f64,
    /// The arm's values that the reference has. At least 100.
    pub reference: u32,
}

/// A design that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the margin is {0}; it must be above 0 and at most 0.5")]
    Margin(f64),
    #[error("a false alarm in {0} values; it must be one in 100 or more")]
    FalseAlarms(f64),
    #[error("the reference has {0} values; it must have at least 100")]
    Reference(u32),
}

impl Design {
    /// # Errors
    /// A parameter that is out of range.
    pub fn check(&self) -> Result<(), Error> {
        if !(self.margin > 0.0 && self.margin <= 0.5) {
            return Err(Error::Margin(self.margin));
        }
        if !(self.values_per_false_alarm.is_finite() && self.values_per_false_alarm >= 100.0) {
            return Err(Error::FalseAlarms(self.values_per_false_alarm));
        }
        if self.reference < 100 {
            return Err(Error::Reference(self.reference));
        }
        Ok(())
    }
}

/// What one value brought about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum News {
    /// The figure has changed by more than the margin.
    Changed(Levels),
    /// The reference that follows a change is complete.
    Settled(Levels),
}

/// In the values' own unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Levels {
    /// Of the watched arm in the reference.
    pub reference: f64,
    /// Of its latest values.
    pub recent: f64,
    /// Of the others' latest values. `None`: the arm is compared with its own past.
    pub others: Option<f64>,
}

/// The test, with all that it has to remember: one per figure.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// Values of the arm and of the others that were not compared yet.
    waiting: [VecDeque<f64>; 2],
    /// `None`: the first values are still collected.
    plan: Option<Plan>,
    /// Values of the arm since the others had one to compare with.
    unmatched: u32,
    /// Of y, over the reference.
    reference: Mean,
    /// Of the arm's values in the reference, in their own unit.
    level: Mean,
    recent: [Recent; 2],
    /// M of each bet: rising, falling.
    statistics: [[f64; BETS.len()]; 2],
    /// It has changed, and the new reference is not complete.
    changed: bool,
}

/// What the first values fixed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Plan {
    scale: f64,
    /// k and m. m = 0: no others.
    block: [usize; 2],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Mean {
    n: u32,
    sum: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.n += 1;
        self.sum += value;
    }

    fn value(self) -> f64 {
        self.sum / f64::from(self.n.max(1))
    }
}

/// A mean in which older values count less and less.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Recent {
    n: f64,
    mean: f64,
}

impl Recent {
    fn add(&mut self, value: f64) {
        self.n = (self.n + 1.0).min(RECENT);
        self.mean += (value - self.mean) / self.n;
    }
}

impl Change {
    /// Takes the next value of one side. A value that is not a number, or below 0, is left out, and a share
    /// above 1 counts as 1. `design` must be the same for all values and valid ([`Design::check`]).
    pub fn observe(&mut self, design: &Design, side: Side, value: f64) -> Option<News> {
        if !value.is_finite() || value < 0.0 {
            return None;
        }
        let value = match design.unit {
            Unit::Share => value.min(1.0),
            Unit::Amount => value,
        };
        self.recent[side as usize].add(value);
        self.waiting[side as usize].push_back(value);
        let plan = match self.plan {
            Some(plan) => plan,
            None => self.begin()?,
        };
        let mut news = None;
        while self.waiting[0].len() >= plan.block[0] && self.waiting[1].len() >= plan.block[1] {
            news = self.compare(design, plan).or(news);
            if self.plan.is_none() {
                return news;
            }
        }
        self.drop_waiting(side, plan);
        news
    }

    /// Levels of the reference, if it is complete, and of the latest values.
    pub fn levels(&self, design: &Design) -> Option<Levels> {
        self.is_watching(design).then(|| self.levels_now())
    }

    /// It has changed, and the new reference is not complete.
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// M as a share of the alarm's bound, 0 to 1.
    pub fn evidence(&self, design: &Design) -> f64 {
        let bound = self.plan.map_or(f64::INFINITY, |plan| bound(design, plan));
        (self.statistic(design) / bound).min(1.0)
    }

    fn begin(&mut self) -> Option<Plan> {
        let [watched, others] = [self.waiting[0].len(), self.waiting[1].len()];
        // only the others of about the same time
        while self.waiting[1].len() > FIRST * BLOCK_MAX {
            self.waiting[1].pop_front();
        }
        if watched < FIRST {
            return None;
        }
        let block = match others {
            0..OTHERS_MIN => [1, 0],
            _ => [ratio(watched, others), ratio(others, watched)],
        };
        if block[1] == 0 {
            self.waiting[1].clear();
        }
        let scale = self.waiting[0].iter().sum::<f64>() / watched as f64;
        let plan = Plan {
            scale: scale.max(SCALE_MIN),
            block,
        };
        self.plan = Some(plan);
        Some(plan)
    }

    /// Takes the next comparison from what waits.
    fn compare(&mut self, design: &Design, plan: Plan) -> Option<News> {
        self.unmatched = 0;
        let on_scale = |value: f64| match design.unit {
            Unit::Share => value,
            Unit::Amount => value / (value + plan.scale),
        };
        let watching = self.is_watching(design);
        let mut means = [0.0; 2];
        for (side, mean) in means.iter_mut().enumerate() {
            let size = plan.block[side];
            for value in self.waiting[side].drain(..size) {
                *mean += on_scale(value) / size as f64;
                if side == 0 && !watching {
                    self.level.add(value);
                }
            }
        }
        let y = match plan.block[1] {
            0 => means[0],
            _ => 0.5 * (means[0] - means[1] + 1.0),
        };
        if !watching {
            self.reference.add(y);
            let settled = self.changed && self.is_watching(design);
            self.changed &= !settled;
            return settled.then(|| News::Settled(self.levels_now()));
        }
        self.bet(design, plan, y);
        if self.statistic(design) < bound(design, plan) {
            return None;
        }
        let levels = self.levels_now();
        *self = Change {
            recent: self.recent,
            changed: true,
            ..Change::default()
        };
        Some(News::Changed(levels))
    }

    fn bet(&mut self, design: &Design, plan: Plan, y: f64) {
        let margin = match plan.block[1] {
            0 => design.margin,
            _ => 0.5 * design.margin,
        };
        let reference = self.reference.value();
        for (statistics, (y, reference)) in self
            .statistics
            .iter_mut()
            .zip([(y, reference), (1.0 - y, 1.0 - reference)])
        {
            let most = reference + margin;
            for (statistic, bet) in statistics.iter_mut().zip(BETS) {
                *statistic = (1.0 + bet / most * (y - most)) * (*statistic + 1.0);
            }
        }
    }

    fn statistic(&self, design: &Design) -> f64 {
        let [up, down] = self.statistics.map(|bets| bets.iter().sum::<f64>() / BETS.len() as f64);
        match design.direction {
            Direction::Up => up,
            Direction::Down => down,
            Direction::Both => 0.5 * (up + down),
        }
    }

    fn is_watching(&self, design: &Design) -> bool {
        self.level.n >= design.reference
    }

    fn levels_now(&self) -> Levels {
        Levels {
            reference: self.level.value(),
            recent: self.recent[0].mean,
            others: self
                .plan
                .is_some_and(|plan| plan.block[1] > 0)
                .then_some(self.recent[1].mean),
        }
    }

    fn drop_waiting(&mut self, side: Side, plan: Plan) {
        for (waiting, size) in self.waiting.iter_mut().zip(plan.block) {
            while waiting.len() > size * WAITING_BLOCKS {
                waiting.pop_front();
            }
        }
        if side == Side::Watched && plan.block[1] > 0 {
            self.unmatched += 1;
        }
        if self.unmatched > UNMATCHED_MAX {
            *self = Change {
                recent: self.recent,
                changed: self.changed,
                ..Change::default()
            };
        }
    }
}

/// In comparisons, of which each has k of the arm's values.
fn bound(design: &Design, plan: Plan) -> f64 {
    design.values_per_false_alarm / plan.block[0] as f64
}

fn ratio(one: usize, other: usize) -> usize {
    ((one as f64 / other as f64).round() as usize).clamp(1, BLOCK_MAX)
}
