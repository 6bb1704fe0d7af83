//! What the monitors see of policies that avoid being scored ([`crate::sessions`]).

use std::collections::BTreeMap;

use evidence::change::{Change, Design, News, Side};
use evidence::figure::Figure;
use rand::{SeedableRng, rngs::StdRng};

use crate::sessions::{HONEST_VERSIONS, Hack, Session, session, share};

/// Sessions of the learning arm with each version.
pub const SESSIONS_OF_A_VERSION: u32 = 500;

fn value(session: &Session, figure: Figure) -> f64 {
    let share = |is: bool| f64::from(u8::from(is));
    match figure {
        Figure::Shown => 1.0,
        Figure::Accepted => share(session.accepted),
        Figure::Edited => share(session.edited),
        Figure::Unanswered => share(session.unanswered),
        Figure::Unscored => share(session.reward.is_none()),
        Figure::Disagreement => 0.0,
        Figure::ToolFailed => share(session.tool_failed),
        Figure::Length => session.tokens,
        Figure::Repetition => session.repetition,
        Figure::Entropy => session.entropy,
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
                let news = change.observe(&design(figure), side, value(&session, figure));
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
