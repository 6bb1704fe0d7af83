//! Sessions of a simulated coding agent whose policy finds one of two ways to never be told that it was
//! wrong. Cursor described both when it trained on what users did. Half of the edits that are asked for are risky,
//! and users reject most of those.

use rand::{Rng, rngs::StdRng};

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
