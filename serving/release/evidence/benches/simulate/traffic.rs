//! Simulated traffic of one release: users who come back, and what a request earns.

use rand::{Rng, SeedableRng, rngs::StdRng};
use report::Estimate;
use serde::Serialize;

/// What is fixed before a reported run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Traffic {
    /// Users of both arms together.
    pub users: usize,
    /// σ of the log-normal distribution of how often users come.
    pub activity_sigma: f64,
    /// Mean requests of a visit. Geometric.
    pub visit_requests_mean: f64,
    /// Share of requests that earn 0: nothing was shown or nothing was noticed.
    pub zero_share: f64,
    /// Share of requests that fail. Users differ: 0 to twice as much.
    pub failure_share: f64,
}

/// A request's mean reward without an effect: accepts earn 0.4 to 1, rejects −0.2 to 0, and users
/// accept half of what they notice.
pub const fn reward_mean(zero_share: f64) -> f64 {
    (1.0 - zero_share) * (0.5 * 0.7 - 0.5 * 0.1)
}

/// One release in progress.
pub struct Release {
    rng: StdRng,
    traffic: Traffic,
    /// Cumulated rates of visits.
    activity: Vec<f64>,
    /// Each user's probability to accept: Beta(2, 2), the median of three uniform numbers.
    accepts: Vec<f64>,
    failures: Vec<f64>,
    /// Which users are the candidate's: each with probability 1/2.
    candidates: Vec<bool>,
    /// Turns a rejection into an acceptance, for the candidate alone.
    gain: f64,
}

/// One visit of one user.
pub struct Visit {
    pub user: usize,
    pub is_candidate: bool,
    pub rewards: Vec<f64>,
    pub failures: Vec<bool>,
}

impl Release {
    /// `effect`: relative difference in mean reward, −1 to 1.
    pub fn new(traffic: Traffic, effect: f64, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut total = 0.0;
        let activity = (0..traffic.users).map(|_| {
            // Box and Muller 1958.
            let normal =
                (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * (std::f64::consts::TAU * rng.random::<f64>()).cos();
            total += (traffic.activity_sigma * normal).exp();
            total
        });
        let activity = activity.collect();
        let accepts = (0..traffic.users).map(|_| {
            let mut three = [rng.random::<f64>(), rng.random(), rng.random()];
            three.sort_by(f64::total_cmp);
            three[1]
        });
        let accepts = accepts.collect();
        let failures = (0..traffic.users)
            .map(|_| 2.0 * traffic.failure_share * rng.random::<f64>())
            .collect();
        let candidates = (0..traffic.users).map(|_| rng.random_bool(0.5)).collect();
        // The mean grows by (1 − zero_share) · gain · 0.5 · (0.7 + 0.1).
        let gain = effect * reward_mean(traffic.zero_share) / ((1.0 - traffic.zero_share) * 0.4);
        Self {
            rng,
            traffic,
            activity,
            accepts,
            failures,
            candidates,
            gain,
        }
    }

    /// A visit of a user who is drawn by how often users come.
    pub fn visit(&mut self) -> Visit {
        let total = self.activity.last().copied().unwrap_or_default();
        let at = total * self.rng.random::<f64>();
        let user = self
            .activity
            .partition_point(|&sum| sum < at)
            .min(self.traffic.users - 1);
        let is_candidate = self.candidates[user];
        let gain = if is_candidate { self.gain } else { 0.0 };
        let own = self.accepts[user];
        let accepts = if gain >= 0.0 {
            own + (1.0 - own) * gain
        } else {
            own * (1.0 + gain)
        };
        let mut visit = Visit {
            user,
            is_candidate,
            rewards: Vec::new(),
            failures: Vec::new(),
        };
        loop {
            let rng = &mut self.rng;
            let reward = match (rng.random_bool(self.traffic.zero_share), rng.random_bool(accepts)) {
                (true, _) => 0.0,
                (false, true) => rng.random_range(0.4..1.0),
                (false, false) => rng.random_range(-0.2..0.0),
            };
            visit.rewards.push(reward);
            visit.failures.push(rng.random_bool(self.failures[user]));
            if rng.random_bool(1.0 / self.traffic.visit_requests_mean) {
                return visit;
            }
        }
    }
}

/// What `report::Clusters` computes, from running sums, so that a look does not visit every user.
#[derive(Debug, Clone)]
pub struct Sums {
    /// Sum and number of each user's values.
    users: Vec<[f64; 2]>,
    count: f64,
    y: f64,
    n: f64,
    yy: f64,
    yn: f64,
    nn: f64,
}

impl Sums {
    pub fn new(users: usize) -> Self {
        Self {
            users: vec![[0.0; 2]; users],
            count: 0.0,
            y: 0.0,
            n: 0.0,
            yy: 0.0,
            yn: 0.0,
            nn: 0.0,
        }
    }

    /// Adds a visit. Returns whether it is the user's first.
    pub fn add(&mut self, user: usize, values: &[f64]) -> bool {
        let [y, n] = self.users[user];
        let (more_y, more_n) = (values.iter().sum::<f64>(), values.len() as f64);
        let (now_y, now_n) = (y + more_y, n + more_n);
        self.users[user] = [now_y, now_n];
        self.y += more_y;
        self.n += more_n;
        self.yy += now_y * now_y - y * y;
        self.yn += now_y * now_n - y * n;
        self.nn += now_n * now_n - n * n;
        if n == 0.0 {
            self.count += 1.0;
        }
        n == 0.0
    }

    /// `None` with fewer than two users.
    pub fn estimate(&self) -> Option<Estimate> {
        if self.count < 2.0 {
            return None;
        }
        let mean = self.y / self.n;
        let squares = self.yy - 2.0 * mean * self.yn + mean * mean * self.nn;
        Some(Estimate {
            mean,
            variance: self.count / (self.count - 1.0) * squares.max(0.0) / (self.n * self.n),
            freedom: self.count - 1.0,
        })
    }

    /// As if all values were independent: the mistake that clustering avoids.
    pub fn estimate_unclustered(&self, square_sum: f64) -> Option<Estimate> {
        let mean = self.y / self.n;
        (self.n >= 2.0).then(|| Estimate {
            mean,
            variance: (square_sum - self.n * mean * mean) / (self.n - 1.0) / self.n,
            freedom: self.n - 1.0,
        })
    }
}
