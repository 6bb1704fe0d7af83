//! Simulated trajectories of users who come back, one figure of each.

use evidence::change::{Change, Design, News, Side, Unit};
use evidence::figure::Figure;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Users of all arms.
const USERS: usize = 600;
/// Visits that go on at the same time, and trajectories of one.
const VISITS: usize = 40;
const VISIT_MEAN: f64 = 5.0;
/// Standard deviation of users, in logits or in logarithms.
const USER_SIGMA: f64 = 0.5;
/// Trajectories of a day.
const DAY: f64 = 6_000.0;

#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    /// Shares of users.
    pub watched: f64,
    pub others: f64,
    /// What changes for all arms over a day, in logits or in logarithms.
    pub day_amplitude: f64,
}

/// 40% of users get the learning arm and 20% one that does not follow it; the rest is not looked at.
pub const WITH_OTHERS: Traffic = Traffic {
    watched: 0.4,
    others: 0.2,
    day_amplitude: 0.3,
};
pub const ALONE: Traffic = Traffic {
    watched: 1.0,
    others: 0.0,
    day_amplitude: 0.0,
};

/// The mean of a figure, and for amounts the standard deviation of its logarithm within a user.
pub fn level(figure: Figure) -> (f64, f64) {
    match figure {
        Figure::Shown => (0.65, 0.0),
        Figure::Accepted => (0.35, 0.0),
        Figure::Edited => (0.05, 0.0),
        Figure::Unanswered => (0.2, 0.0),
        Figure::Unscored => (0.25, 0.0),
        Figure::Disagreement => (0.02, 0.0),
        Figure::ToolFailed => (0.03, 0.0),
        Figure::Repetition => (0.08, 0.0),
        Figure::Length => (180.0, 0.8),
        Figure::Entropy => (0.6, 0.4),
    }
}

/// One stream.
pub struct Stream {
    figure: Figure,
    rng: StdRng,
    users: Vec<(Option<Side>, f64)>,
    visits: Vec<usize>,
    day_amplitude: f64,
    trajectories: f64,
    /// What the watched arm's mean is moved by: added to a share, multiplied to an amount.
    pub effect: f64,
}

impl Stream {
    pub fn new(figure: Figure, traffic: Traffic, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let users = (0..USERS).map(|_| {
            let drawn = rng.random::<f64>();
            let side = if drawn < traffic.watched {
                Some(Side::Watched)
            } else if drawn < traffic.watched + traffic.others {
                Some(Side::Others)
            } else {
                None
            };
            (side, USER_SIGMA * normal(&mut rng))
        });
        let users: Vec<(Option<Side>, f64)> = users.collect();
        let visits = (0..VISITS).map(|_| rng.random_range(0..USERS)).collect();
        Stream {
            figure,
            rng,
            users,
            visits,
            day_amplitude: traffic.day_amplitude,
            trajectories: 0.0,
            effect: if is_amount(figure) { 1.0 } else { 0.0 },
        }
    }

    /// The next trajectory of either side.
    pub fn next(&mut self) -> (Side, f64) {
        loop {
            self.trajectories += 1.0;
            let visit = self.rng.random_range(0..VISITS);
            let (side, user) = self.users[self.visits[visit]];
            if self.rng.random_bool(1.0 / VISIT_MEAN) {
                self.visits[visit] = self.rng.random_range(0..USERS);
            }
            if let Some(side) = side {
                return (side, self.value(side, user));
            }
        }
    }

    fn value(&mut self, side: Side, user: f64) -> f64 {
        let (mean, sigma) = level(self.figure);
        let day = self.day_amplitude * (std::f64::consts::TAU * self.trajectories / DAY).sin();
        let moved = user + day;
        if is_amount(self.figure) {
            let effect = if side == Side::Watched { self.effect } else { 1.0 };
            return effect * mean * (moved + sigma * normal(&mut self.rng) - 0.5 * sigma * sigma).exp();
        }
        let effect = if side == Side::Watched { self.effect } else { 0.0 };
        let logit = (mean / (1.0 - mean)).ln() + moved;
        let share = (1.0 / (1.0 + (-logit).exp()) + effect).clamp(0.0, 1.0);
        match self.figure {
            // a share within each answer, that differs from answer to answer
            Figure::Repetition => (share * 2.0 * self.rng.random::<f64>()).min(1.0),
            _ => f64::from(u8::from(self.rng.random_bool(share))),
        }
    }
}

fn is_amount(figure: Figure) -> bool {
    figure.design(0.05, 1e5, 1_000).unit == Unit::Amount
}

/// Box and Muller 1958.
fn normal(rng: &mut StdRng) -> f64 {
    let (one, other) = (1.0 - rng.random::<f64>(), rng.random::<f64>());
    (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * other).cos()
}

/// The watched arm's trajectories until its first alarm, of at most so many after the reference.
pub fn until_alarm(design: &Design, stream: &mut Stream, effect: f64, most: u32) -> Option<u32> {
    let mut change = Change::default();
    while change.levels(design).is_none() {
        let (side, value) = stream.next();
        change.observe(design, side, value);
    }
    stream.effect = effect;
    let mut watched = 0;
    while watched < most {
        let (side, value) = stream.next();
        watched += u32::from(side == Side::Watched);
        if let Some(News::Changed(_)) = change.observe(design, side, value) {
            return Some(watched);
        }
    }
    None
}

/// Alarms of so many trajectories of the watched arm, all references included.
pub fn alarms(design: &Design, stream: &mut Stream, trajectories: u32) -> u32 {
    let (mut change, mut watched, mut alarms) = (Change::default(), 0, 0);
    while watched < trajectories {
        let (side, value) = stream.next();
        watched += u32::from(side == Side::Watched);
        alarms += u32::from(matches!(change.observe(design, side, value), Some(News::Changed(_))));
    }
    alarms
}
