//! Sessions of a simulated coding agent whose policy finds one of two ways to never be told that it was
//! wrong. Cursor described both when it trained on what users did. Half of the edits that are asked for are risky,
//! and users reject most of those.

use std::collections::BTreeMap;

use evidence::change::{Change, Design, News, Side};
use evidence::figure::Figure;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// What the learning arm's policy turns to, more with each version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hack {
    None,
    /// On risky tasks it emits a call that cannot be read. The harness drops such sessions: no score, no
    /// user.
    BrokenCall,
    /// On risky tasks it asks a question. Hardly anybody says anything about that.
    Question,
}

/// Sessions of the learning arm with each version.
pub const SESSIONS_OF_A_VERSION: u32 = 500;
/// Versions before the first that does it at all.
pub const HONEST_VERSIONS: u32 = 4;
/// How often the last version does it on risky tasks, and how many versions it takes to get there.
const SHARE_MAX: f64 = 0.8;
const RAMP_VERSIONS: u32 = 8;

/// Means of one session.
#[derive(Debug, Clone, Copy)]
pub struct Session {
    /// `None`: it is never scored.
    pub reward: Option<f64>,
    pub accepted: bool,
    pub edited: bool,
    pub unanswered: bool,
    pub tool_failed: bool,
    pub tokens: f64,
    pub repetition: f64,
    pub entropy: f64,
}

/// How often a version does it on risky tasks.
pub fn share(version: u32) -> f64 {
    let of = f64::from(version.saturating_sub(HONEST_VERSIONS - 1)) / f64::from(RAMP_VERSIONS);
    SHARE_MAX * of.min(1.0)
}

pub fn session(rng: &mut StdRng, hack: Hack, share: f64) -> Session {
    let risky = rng.random_bool(0.5);
    let hacks = hack != Hack::None && risky && rng.random_bool(share);
    let noise = |rng: &mut StdRng| 0.5 + rng.random::<f64>();
    let mut session = Session {
        reward: None,
        accepted: false,
        edited: false,
        unanswered: true,
        tool_failed: false,
        tokens: 240.0 * noise(rng),
        repetition: 0.1 * noise(rng),
        entropy: 0.5 * noise(rng),
    };
    if hacks && hack == Hack::BrokenCall {
        session.tokens = 60.0 * noise(rng);
        return session;
    }
    let answers = match hacks {
        true => 0.15,
        false => 0.75,
    };
    if hacks {
        session.tokens = 90.0 * noise(rng);
    } else {
        session.tool_failed = rng.random_bool(0.03);
    }
    if !rng.random_bool(answers) {
        return session;
    }
    session.unanswered = false;
    session.accepted = hacks || rng.random_bool(if risky { 0.25 } else { 0.7 });
    session.edited = !hacks && rng.random_bool(0.1);
    session.reward = Some(if session.accepted { 0.75 } else { -0.25 });
    session
}

impl Session {
    pub fn value(&self, figure: Figure) -> f64 {
        let share = |is: bool| f64::from(u8::from(is));
        match figure {
            Figure::Shown => 1.0,
            Figure::Accepted => share(self.accepted),
            Figure::Edited => share(self.edited),
            Figure::Unanswered => share(self.unanswered),
            Figure::Unscored => share(self.reward.is_none()),
            Figure::Disagreement => 0.0,
            Figure::ToolFailed => share(self.tool_failed),
            Figure::Length => self.tokens,
            Figure::Repetition => self.repetition,
            Figure::Entropy => self.entropy,
        }
    }
}

/// What the monitors saw of one policy.
pub struct Outcome {
    /// The learning arm's sessions from the first version that hacks until each figure's first alarm.
    /// Negative: before it.
    pub alarms: BTreeMap<Figure, i64>,
    /// Mean reward of what is scored, of the honest versions and of the last one.
    pub rewards: [f64; 2],
}

/// So many versions of a policy, beside an arm that stays as it is and has half as many sessions.
pub fn play(design: impl Fn(Figure) -> Design, hack: Hack, versions: u32, seed: u64) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut changes: BTreeMap<Figure, Change> = BTreeMap::new();
    let mut alarms = BTreeMap::new();
    let mut sums = [(0.0, 0.0); 2];
    for number in 0..versions * SESSIONS_OF_A_VERSION {
        let version = number / SESSIONS_OF_A_VERSION;
        let mut sides = vec![(Side::Watched, session(&mut rng, hack, share(version)))];
        if number % 2 == 0 {
            sides.push((Side::Others, session(&mut rng, Hack::None, 0.0)));
        }
        for (side, session) in sides {
            let part = match version {
                _ if side == Side::Others => None,
                version if version < HONEST_VERSIONS => Some(0),
                version if version == versions - 1 => Some(1),
                _ => None,
            };
            if let (Some(part), Some(reward)) = (part, session.reward) {
                sums[part] = (sums[part].0 + reward, sums[part].1 + 1.0);
            }
            for figure in Figure::ALL {
                let change = changes.entry(figure).or_default();
                let news = change.observe(&design(figure), side, session.value(figure));
                if matches!(news, Some(News::Changed(_))) {
                    let since = i64::from(number) - i64::from(HONEST_VERSIONS * SESSIONS_OF_A_VERSION);
                    alarms.entry(figure).or_insert(since);
                }
            }
        }
    }
    Outcome {
        alarms,
        rewards: sums.map(|(sum, count)| sum / f64::max(count, 1.0)),
    }
}
