//! How much of the blame for a failed session falls on the turns that made it fail, by credit
//! (docs/measurements/learning.md). Blame is the sum of the negative advantages.
//!
//! A session has 50 turns. Each is wrong with probability 0.02, and one wrong turn makes the session
//! fail: R = 0, otherwise 1. So 64% fail, by 1.6 turns on average. Users judge a share of the turns:
//! r = 0 if the turn was right, −1 if it was wrong.
//!
//! The last two rows stand for a value function that has learned V(turn, whether a failure shows) from
//! the sessions before. A wrong turn shows in the context of the next one with probability 0.5.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::*;

const TURNS: usize = 50;
const WRONG: f64 = 0.02;
const SHOWS: f64 = 0.5;
/// Sessions from which baselines and values are learned first, and those that are measured.
const SESSIONS: [usize; 2] = [500, 500];
const SEEDS: u64 = 5;

struct Session {
    wrong: [bool; TURNS],
    /// Before each turn and after the last: a wrong turn has shown.
    shown: [bool; TURNS + 1],
    turns: Vec<Turn>,
}

impl Session {
    fn sample(random: &mut StdRng, judged: f64) -> Self {
        let wrong: [bool; TURNS] = std::array::from_fn(|_| random.random_bool(WRONG));
        let mut shown = [false; TURNS + 1];
        for turn in 0..TURNS {
            shown[turn + 1] = shown[turn] || wrong[turn] && random.random_bool(SHOWS);
        }
        let verdict = |wrong: bool| if wrong { -1.0 } else { 0.0 };
        let rewards: Vec<Option<f64>> = wrong
            .iter()
            .map(|wrong| random.random_bool(judged).then(|| verdict(*wrong)))
            .collect();
        let rewards: std::sync::Arc<[Option<f64>]> = rewards.into();
        let turns = (0..TURNS).map(|index| Turn {
            episode: uuid::Uuid::nil(),
            index,
            rewards: rewards.clone(),
        });
        Self {
            wrong,
            shown,
            turns: turns.collect(),
        }
    }

    fn reward(&self) -> f64 {
        if self.wrong.contains(&true) { 0.0 } else { 1.0 }
    }
}

/// Advantages of the turns of one session after another.
trait Method {
    fn next(&mut self, session: &Session) -> Vec<f64>;
}

/// The credits that a realtime run has, with `baseline = "ema"`.
struct Credited {
    credit: Credit,
    discount: f64,
    baselines: Baselines,
}

impl Method for Credited {
    fn next(&mut self, session: &Session) -> Vec<f64> {
        let returns = session.turns.iter();
        let returns = returns.map(|turn| self.credit.of(self.discount, "chat", session.reward(), Some(turn)));
        let (names, values): (Vec<String>, Vec<f64>) = returns.map(|one| (one.baseline, one.value)).unzip();
        let advantages = BaselineKind::Ema.advantages(&self.baselines, &names, &values);
        // A session updates a baseline once, with a mean (`Cohort::returns`).
        let mut compared: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
        for (name, value) in names.iter().zip(values) {
            compared.entry(name).or_default().push(value);
        }
        let means: Vec<f64> = compared.values().map(|values| mean(values)).collect();
        let names: Vec<&String> = compared.into_keys().collect();
        BaselineKind::Ema.update(&mut self.baselines, &names, &means);
        advantages
    }
}

/// V(turn, shown): the mean reward of the sessions before. A_t = R − V_t, or V_{t+1} − V_t with V_T = R.
struct Valued {
    by_difference: bool,
    sums: [[(f64, f64); 2]; TURNS],
}

impl Method for Valued {
    fn next(&mut self, session: &Session) -> Vec<f64> {
        let value = |turn: usize| match self.sums[turn][usize::from(session.shown[turn])] {
            (_, 0.0) => 0.0,
            (sum, count) => sum / count,
        };
        let after = |turn: usize| match self.by_difference && turn + 1 < TURNS {
            true => value(turn + 1),
            false => session.reward(),
        };
        let advantages = (0..TURNS).map(|turn| after(turn) - value(turn)).collect();
        for turn in 0..TURNS {
            let (sum, count) = &mut self.sums[turn][usize::from(session.shown[turn])];
            *sum += session.reward();
            *count += 1.0;
        }
        advantages
    }
}

/// The share of the blame in failed sessions that falls on wrong turns.
fn share(method: &mut dyn Method, judged: f64, seed: u64) -> f64 {
    let mut random = StdRng::seed_from_u64(seed);
    let (mut on_wrong, mut all) = (0.0, 0.0);
    for session in 0..SESSIONS.iter().sum() {
        let of = Session::sample(&mut random, judged);
        let advantages = method.next(&of);
        if session < SESSIONS[0] || of.reward() > 0.0 {
            continue;
        }
        for (advantage, wrong) in advantages.iter().zip(of.wrong) {
            let blame = (-advantage).max(0.0);
            all += blame;
            on_wrong += if wrong { blame } else { 0.0 };
        }
    }
    on_wrong / all
}

fn credited(credit: Credit, discount: f64) -> Box<dyn Method> {
    Box::new(Credited {
        credit,
        discount,
        baselines: Baselines::new(),
    })
}

fn valued(by_difference: bool) -> Box<dyn Method> {
    Box::new(Valued {
        by_difference,
        sums: [[(0.0, 0.0); 2]; TURNS],
    })
}

/// Mean of the seeds, for each share of judged turns; and prints a row of the table.
fn row(name: &str, method: impl Fn() -> Box<dyn Method>) -> [f64; 4] {
    let means = [0.0, 0.1, 0.5, 1.0].map(|judged| {
        let shares: Vec<f64> = (0..SEEDS).map(|seed| share(&mut *method(), judged, seed)).collect();
        (mean(&shares), std(&shares))
    });
    let cells = means.map(|(mean, std)| format!("{:5.1} ± {:.1}", 100.0 * mean, 100.0 * std));
    println!("{name:<22} {}", cells.join("   "));
    means.map(|(mean, _)| mean)
}

#[test]
fn blame_falls_on_guilty_turns_only_as_far_as_turns_are_judged_or_valued() {
    println!("of 100, judged:           0%         10%          50%          100%");
    let trajectory = row("trajectory", || credited(Credit::Trajectory, 1.0));
    let to_go = row("to_go, discount 1", || credited(Credit::ToGo, 1.0));
    let discounted = row("to_go, discount 0.95", || credited(Credit::ToGo, 0.95));
    let turn = row("turn", || credited(Credit::Turn, 1.0));
    let outcome = row("R − V", || valued(false));
    let difference = row("V of next − V", || valued(true));
    // Wrong turns of a failed session: 50 · 0.02 / (1 − 0.98^50) = 1.57 of 50.
    let chance = 1.57 / 50.0;
    for evenly in [trajectory[0], trajectory[3], to_go[0], discounted[0], turn[0]] {
        assert!((evenly - chance).abs() < 0.01, "{evenly}");
    }
    assert!(turn[3] > 0.9 && turn[3] > turn[1], "{turn:?}");
    assert!(to_go[3] > chance && outcome[0] > chance && difference[0] > 0.25);
}
