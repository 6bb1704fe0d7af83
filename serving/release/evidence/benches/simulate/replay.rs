//! Releases made of logged answers: which decisions the judge of a canary takes, and after how many.
//!
//! A release draws users from the log with replacement, each with all their rewards at the times at
//! which they were logged. Every user is in one of two equal arms by chance. An effect δ changes
//! rewards of the candidate's users alone: each below 0 becomes the best reward of the log, or each
//! above 0 the worst, with the probability that changes the mean by δ. So rewards stay those that the
//! surface has.

use crate::traffic::Sums;
use anyhow::Context;
use evidence::sequence::{Design, Sides};
use evidence::verdict::{Goal, Margins, Rule, Verdict};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Differences of the mean reward, in its units.
const EFFECTS: [f64; 9] = [-0.1, -0.05, -0.03, -0.02, 0.0, 0.02, 0.03, 0.05, 0.1];
/// Users are drawn so often as the log has them.
const SCALES: [usize; 3] = [1, 10, 100];
/// The defaults of `[release.canary]`: `judge` in serving/release/src/canary/strategy.rs.
const ALPHA: f64 = 0.05;
const EFFECT: f64 = 0.05;
const MARGIN: f64 = 0.02;
const USERS_MIN: u64 = 20;
/// Looks at one release.
const LOOKS_MAX: usize = 20_000;

/// The rewards of one user with their times, in seconds since the first of the log.
type User = Vec<(f64, f64)>;
type Log = Vec<User>;

/// What came of the releases of one size and effect.
struct Decided {
    better: usize,
    harm: usize,
    /// Answers until the decision.
    answers: Vec<f64>,
    hours: Vec<f64>,
}

pub fn run(file: &Path, releases: usize, seed: u64) -> anyhow::Result<Value> {
    let log = read(file)?;
    let rewards = || log.iter().flatten().map(|(_, reward)| *reward);
    let count = rewards().count();
    let mean = rewards().sum::<f64>() / count as f64;
    let hours = log.iter().flatten().map(|(at, _)| *at).fold(0.0, f64::max) / 3600.0;
    println!(
        "Logged: {} users, {count} rewards of {mean:.3} on average in {hours:.2} hours\n",
        log.len()
    );
    println!(
        "| users | effect | better | harm | undecided | answers: median, 90% | hours: median, 90% |\n|---|---|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    for scale in SCALES {
        for (index, effect) in EFFECTS.into_iter().enumerate() {
            let seed = seed.wrapping_mul(1_000_003).wrapping_add((scale * 1000 + index) as u64);
            let Some(change) = Change::of(&log, effect) else {
                println!(
                    "| {} | {effect:+.2} | not possible with these rewards | | | | |",
                    scale * log.len()
                );
                continue;
            };
            let decided = decide(&log, scale, &change, releases, seed)?;
            let undecided = releases - decided.better - decided.harm;
            let both = |sorted: &[f64], digits| {
                let at = |share| crate::cell(crate::quantile(sorted, releases as u64, share), digits);
                format!("{}, {}", at(0.5), at(0.9))
            };
            println!(
                "| {} | {effect:+.2} | {} | {} | {undecided} | {} | {} |",
                scale * log.len(),
                decided.better,
                decided.harm,
                both(&decided.answers, 0),
                both(&decided.hours, 2)
            );
            rows.push(json!({
                "users": scale * log.len(), "effect": effect, "better": decided.better, "harm": decided.harm,
                "undecided": undecided, "answers": decided.answers, "hours": decided.hours,
            }));
        }
    }
    Ok(json!({
        "users": log.len(), "rewards": count, "mean": mean, "hours": hours, "releases": releases, "seed": seed,
        "alpha": ALPHA, "effect": EFFECT, "margin": MARGIN, "users_min": USERS_MIN, "decisions": rows,
    }))
}

fn decide(log: &Log, scale: usize, change: &Change, releases: usize, seed: u64) -> anyhow::Result<Decided> {
    let design = Design::new(ALPHA, Sides::Both, EFFECT, USERS_MIN)?;
    let rule = |goal| {
        let margins = Margins {
            superiority: 0.0,
            noninferiority: MARGIN,
            harm: 0.0,
            equivalence: None,
            information_max: None,
        };
        Rule::new(goal, margins)
    };
    let (tolerant, strict) = (rule(Goal::NonInferiority)?, rule(Goal::Superiority)?);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut decided = Decided {
        better: 0,
        harm: 0,
        answers: vec![],
        hours: vec![],
    };
    for _ in 0..releases {
        let users = scale * log.len();
        let mut answers = Vec::new();
        for user in 0..users {
            let is_candidate = rng.random_bool(0.5);
            for &(at, reward) in log.choose(&mut rng).context("the log has no users")? {
                let reward = if is_candidate {
                    change.of_one(reward, &mut rng)
                } else {
                    reward
                };
                answers.push((at, user, is_candidate, reward));
            }
        }
        answers.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut arms = [Sums::new(users), Sums::new(users)];
        let look_every = answers.len().div_ceil(LOOKS_MAX);
        for (sent, (at, user, is_candidate, reward)) in (1..).zip(answers) {
            arms[usize::from(is_candidate)].add(user, &[reward]);
            let [Some(champion), Some(candidate)] = [&arms[0], &arms[1]].map(Sums::estimate) else {
                continue;
            };
            if sent % look_every != 0 {
                continue;
            }
            let Ok(bounds) = design.of(candidate, champion) else {
                continue;
            };
            // words are made once, for the look that decides
            if bounds.low <= 0.0 && bounds.high >= 0.0 {
                continue;
            }
            match (tolerant.decide(Ok(bounds)).verdict, strict.decide(Ok(bounds)).verdict) {
                (Verdict::Harmful, _) => decided.harm += 1,
                (_, Verdict::Superior) => decided.better += 1,
                _ => continue,
            }
            decided.answers.push(sent as f64);
            decided.hours.push(at / 3600.0);
            break;
        }
    }
    decided.answers.sort_by(f64::total_cmp);
    decided.hours.sort_by(f64::total_cmp);
    Ok(decided)
}

/// How rewards become others.
struct Change {
    is_better: bool,
    probability: f64,
    to: f64,
}

impl Change {
    /// `None`: too few rewards can change.
    fn of(log: &Log, effect: f64) -> Option<Self> {
        let is_better = effect > 0.0;
        let rewards = || log.iter().flatten().map(|(_, reward)| *reward);
        let to = match is_better {
            true => rewards().fold(f64::MIN, f64::max),
            false => rewards().fold(f64::MAX, f64::min),
        };
        let most = rewards()
            .filter(|reward| *reward != 0.0 && (*reward < 0.0) == is_better)
            .map(|reward| to - reward)
            .sum::<f64>()
            / rewards().count() as f64;
        let probability = if effect == 0.0 { 0.0 } else { effect / most };
        (0.0..=1.0).contains(&probability).then_some(Self {
            is_better,
            probability,
            to,
        })
    }

    fn of_one(&self, reward: f64, rng: &mut StdRng) -> f64 {
        let may = reward != 0.0 && (reward < 0.0) == self.is_better;
        if may && rng.random_bool(self.probability) {
            self.to
        } else {
            reward
        }
    }
}

/// `release-answers.csv` of `make bench NAME=release`: the answers of its commonest version that have a reward.
fn read(file: &Path) -> anyhow::Result<Log> {
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let column = |name: &str| {
        let found = header.iter().position(|column| *column == name);
        found.with_context(|| format!("{} has no column {name}", file.display()))
    };
    let [user, at, version, reward] = [column("user")?, column("at")?, column("version")?, column("reward")?];
    let mut versions: BTreeMap<&str, BTreeMap<&str, User>> = BTreeMap::new();
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        anyhow::ensure!(fields.len() == header.len(), "a line of {} is cut off", file.display());
        if let Ok(reward) = fields[reward].parse() {
            let at: f64 = fields[at].parse().context("a time is no number")?;
            let users = versions.entry(fields[version]).or_default();
            users.entry(fields[user]).or_default().push((at, reward));
        }
    }
    let answers = |users: &BTreeMap<&str, User>| users.values().map(Vec::len).sum::<usize>();
    let commonest = versions.into_values().max_by_key(answers);
    let users = commonest.context("no answer has a reward")?.into_values();
    let mut log: Log = users.collect();
    let first = log.iter().flatten().map(|(at, _)| *at).fold(f64::MAX, f64::min);
    log.iter_mut().flatten().for_each(|(at, _)| *at -= first);
    Ok(log)
}
