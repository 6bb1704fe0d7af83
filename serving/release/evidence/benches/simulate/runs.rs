//! Many simulated releases, counted.

use evidence::rates::{self, Arm, Rates};
use evidence::ratio::{self, SampleRatio};
use evidence::sequence::{Design, Sides};
use evidence::verdict::{Goal, Margins, Rule, Verdict};
use evidence::{Clusters, Estimate};

use crate::traffic::{Release, Sums, Traffic};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// The design of every release.
pub struct Plan {
    pub alpha: f64,
    /// In units of reward.
    pub soonest: f64,
    pub users_min: u64,
}

/// Level of the tests of failures and of sample ratios.
const ALPHA_COUNTS: f64 = 0.01;

/// How many releases raised one kind of alarm at any look.
pub struct Kind {
    pub name: &'static str,
    /// `None`: the method promises nothing for continuous looks.
    pub nominal: Option<f64>,
    pub count: u64,
    pub releases: u64,
}

impl Kind {
    fn new(name: &'static str, nominal: Option<f64>) -> Self {
        Self {
            name,
            nominal,
            count: 0,
            releases: 0,
        }
    }

    /// Wilson's score interval (Wilson 1927), 95%.
    pub fn wilson(&self) -> [f64; 2] {
        let (z, n) = (1.959_964_f64, self.releases as f64);
        let p = self.count as f64 / n;
        let centre = p + z * z / (2.0 * n);
        let half = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
        [centre - half, centre + half].map(|bound| (bound / (1.0 + z * z / n)).clamp(0.0, 1.0))
    }
}

/// Both arms with what a look needs.
struct Arms {
    sums: [Sums; 2],
    /// Σ of squared rewards.
    squares: [f64; 2],
    users: [u64; 2],
}

impl Arms {
    fn new(users: usize) -> Self {
        Self {
            sums: [Sums::new(users), Sums::new(users)],
            squares: [0.0; 2],
            users: [0; 2],
        }
    }

    fn estimates(&self) -> Option<(Estimate, Estimate)> {
        Some((self.sums[0].estimate()?, self.sums[1].estimate()?))
    }
}

/// Releases with equal arms, and a look after every visit.
pub fn false_alarms(
    plan: &Plan,
    traffic: Traffic,
    requests: u64,
    releases: u64,
    seed: u64,
) -> anyhow::Result<Vec<Kind>> {
    let both = Design::new(plan.alpha, Sides::Both, plan.soonest, plan.users_min)?;
    let lower = Design::new(plan.alpha, Sides::Lower, plan.soonest, plan.users_min)?;
    let mut kinds = vec![
        Kind::new("difference, two-sided", Some(plan.alpha)),
        Kind::new("superior, by the two-sided bounds", Some(plan.alpha / 2.0)),
        Kind::new("harmful, by the two-sided bounds", Some(plan.alpha / 2.0)),
        Kind::new("superior, by a one-sided bound", Some(plan.alpha)),
        Kind::new("sample-ratio mismatch", Some(ALPHA_COUNTS)),
        Kind::new("failures, one request of each user", Some(ALPHA_COUNTS)),
        Kind::new("failures, all requests", Some(ALPHA_COUNTS)),
        Kind::new("for comparison: 95% interval for one look", None),
        Kind::new("for comparison: bounds that ignore users", None),
    ];
    for index in 0..releases {
        let mut release = Release::new(traffic, 0.0, seed.wrapping_mul(1_000_003).wrapping_add(index));
        let mut arms = Arms::new(traffic.users);
        let mut seen = [false; 9];
        let mut shares = SampleRatio::new(&[1.0, 1.0], ratio::CONCENTRATION)?;
        let design = rates::Design {
            alpha: ALPHA_COUNTS,
            ..Default::default()
        };
        let (mut first, mut all) = (Rates::new(design)?, Rates::new(design)?);
        let mut sent = 0;
        while sent < requests {
            let visit = release.visit();
            sent += visit.rewards.len() as u64;
            let arm = usize::from(!visit.is_candidate);
            let name = if visit.is_candidate {
                Arm::Candidate
            } else {
                Arm::Baseline
            };
            arms.squares[arm] += visit.rewards.iter().map(|reward| reward * reward).sum::<f64>();
            if arms.sums[arm].add(visit.user, &visit.rewards) {
                arms.users[arm] += 1;
                first.observe(name, visit.failures[0]);
                seen[4] |= shares.look(&arms.users)?.p <= ALPHA_COUNTS;
            }
            for failed in visit.failures {
                all.observe(name, failed);
            }
            let Some((candidate, baseline)) = arms.estimates() else {
                continue;
            };
            let Ok(bounds) = both.of(candidate, baseline) else {
                continue;
            };
            seen[1] |= bounds.low > 0.0;
            seen[2] |= bounds.high < 0.0;
            // The one-sided mixture is at most about twice the two-sided one.
            seen[3] |= bounds.p < 0.5 && lower.of(candidate, baseline).is_ok_and(|bounds| bounds.p <= plan.alpha);
            let interval = candidate.minus(baseline);
            seen[7] |= interval.is_above_zero() || interval.is_below_zero();
            let flat = [0, 1].map(|arm| arms.sums[arm].estimate_unclustered(arms.squares[arm]));
            if let [Some(candidate), Some(baseline)] = flat {
                seen[8] |= both
                    .of(candidate, baseline)
                    .is_ok_and(|bounds| bounds.low > 0.0 || bounds.high < 0.0);
            }
        }
        seen[0] = seen[1] || seen[2];
        seen[5] = first.is_alarm();
        seen[6] = all.is_alarm();
        for (kind, seen) in kinds.iter_mut().zip(seen) {
            kind.count += u64::from(seen);
            kind.releases += 1;
        }
    }
    Ok(kinds)
}

/// The candidate's shares of a release in steps. Users who have it keep it.
const STEPS: [f64; 3] = [0.1, 0.25, 0.5];
/// Looks at such a release. Each reads every user, so there are few.
const LOOKS_OF_STEPS: u64 = 144;

/// Releases whose arms are equal and whose candidate gets more users from step to step, as canaries do.
pub fn false_alarms_in_steps(
    plan: &Plan,
    traffic: Traffic,
    requests: u64,
    releases: u64,
    seed: u64,
) -> anyhow::Result<Vec<Kind>> {
    let design = Design::new(plan.alpha, Sides::Both, plan.soonest, plan.users_min)?;
    let mut kinds = vec![
        Kind::new("difference over three steps, two-sided", Some(plan.alpha)),
        Kind::new("superior", Some(plan.alpha / 2.0)),
        Kind::new("harmful", Some(plan.alpha / 2.0)),
    ];
    for index in 0..releases {
        let seed = seed.wrapping_mul(5_000_011).wrapping_add(index);
        let mut release = Release::new(traffic, 0.0, seed);
        let mut draws = StdRng::seed_from_u64(seed);
        // a user is in the candidate from the step on whose share is above this
        let users: Vec<f64> = (0..traffic.users).map(|_| draws.random()).collect();
        let mut periods: Vec<[Clusters<usize>; 2]> = Vec::new();
        let (mut sent, mut looks, mut seen) = (0, 0, [false; 2]);
        while sent < requests {
            let step = (sent * STEPS.len() as u64 / requests) as usize;
            let visit = release.visit();
            sent += visit.rewards.len() as u64;
            periods.resize_with(step + 1, Default::default);
            let side = usize::from(users[visit.user] >= STEPS[step]);
            for reward in visit.rewards {
                periods[step][side].add(visit.user, reward);
            }
            if sent * LOOKS_OF_STEPS / requests == looks {
                continue;
            }
            looks = sent * LOOKS_OF_STEPS / requests;
            if let Ok(bounds) = design.across(&periods, Clusters::estimate) {
                seen[0] |= bounds.low > 0.0;
                seen[1] |= bounds.high < 0.0;
            }
        }
        for (kind, seen) in kinds.iter_mut().zip([seen[0] || seen[1], seen[0], seen[1]]) {
            kind.count += u64::from(seen);
            kind.releases += 1;
        }
    }
    Ok(kinds)
}

/// When releases with an effect were decided.
pub struct Detections {
    /// Requests until the right verdict, sorted; of detected releases alone.
    pub requests: Vec<f64>,
    /// Releases with the opposite verdict.
    pub wrong: u64,
    pub releases: u64,
}

/// Releases with a relative `effect`, until their verdict or `requests_max`.
pub fn detections(
    plan: &Plan,
    traffic: Traffic,
    effect: f64,
    requests_max: u64,
    releases: u64,
    seed: u64,
) -> anyhow::Result<Detections> {
    let design = Design::new(plan.alpha, Sides::Both, plan.soonest, plan.users_min)?;
    let rule = Rule::new(
        Goal::Superiority,
        Margins {
            superiority: 0.0,
            noninferiority: plan.soonest,
            harm: 0.0,
            equivalence: None,
            information_max: None,
        },
    )?;
    let right = if effect > 0.0 {
        Verdict::Superior
    } else {
        Verdict::Harmful
    };
    let mut found = Detections {
        requests: Vec::new(),
        wrong: 0,
        releases,
    };
    for index in 0..releases {
        let mut release = Release::new(traffic, effect, seed.wrapping_mul(7_000_003).wrapping_add(index));
        let mut arms = Arms::new(traffic.users);
        let mut sent = 0;
        while sent < requests_max {
            let visit = release.visit();
            sent += visit.rewards.len() as u64;
            arms.sums[usize::from(!visit.is_candidate)].add(visit.user, &visit.rewards);
            let Some((candidate, baseline)) = arms.estimates() else {
                continue;
            };
            let Ok(bounds) = design.of(candidate, baseline) else {
                continue;
            };
            // Words are made once, for the look that decides.
            if bounds.low <= 0.0 && bounds.high >= 0.0 {
                continue;
            }
            if rule.decide(Ok(bounds)).verdict == right {
                found.requests.push(sent as f64);
            } else {
                found.wrong += 1;
            }
            break;
        }
    }
    found.requests.sort_by(f64::total_cmp);
    Ok(found)
}

/// Requests of each arm until an alarm about failures, sorted; of releases with an alarm alone.
pub fn failures(
    candidate: f64,
    baseline: f64,
    requests_max: u64,
    releases: u64,
    seed: u64,
) -> anyhow::Result<Vec<f64>> {
    let mut requests = Vec::new();
    for index in 0..releases {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_mul(3_000_017).wrapping_add(index));
        let mut test = Rates::new(rates::Design {
            alpha: ALPHA_COUNTS,
            ..Default::default()
        })?;
        for sent in 1..=requests_max {
            test.observe(Arm::Candidate, rng.random_bool(candidate));
            test.observe(Arm::Baseline, rng.random_bool(baseline));
            if test.is_alarm() {
                requests.push(sent as f64);
                break;
            }
        }
    }
    requests.sort_by(f64::total_cmp);
    Ok(requests)
}
