//! How many sessions a policy completes as it is, measured in this process without the stack.

use artifact::checkpoint::Checkpoint;
use report::{Clusters, Interval};
use serde::Serialize;

use super::task::{Attempt, CONTEXT_CHARS_MAX, TURNS_MAX, Task};
use crate::{
    random::Draws,
    stats::Reaction,
    suggester::{Method, Suggester, on_all_cores},
};

/// How well a policy does at sessions.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Start {
    pub sessions: usize,
    /// Fraction of the sessions in which the user's text was reached, with its interval by user.
    pub success: Option<Interval>,
    /// The same by the turn in which it was reached.
    pub success_by_turn: [f64; TURNS_MAX],
    /// Fraction of the turns in which nothing was shown.
    pub declined: Option<f64>,
}

/// Plays each session, given with its user, on all cores. Sessions that do not fit the model's
/// context are left out.
pub fn measure(
    checkpoint: &Checkpoint,
    sessions: &[(usize, Task)],
    temperature: f32,
    seed: u64,
) -> anyhow::Result<Start> {
    let mut played = on_all_cores(checkpoint, sessions, |suggester, part| {
        play(suggester, part, temperature, seed)
    })?;
    played.retain(|session| session.fits);
    let mut start = Start {
        sessions: played.len(),
        ..Start::default()
    };
    let (mut successes, mut declined) = (Clusters::default(), Clusters::default());
    for session in &played {
        successes.add(session.user, f64::from(u8::from(session.solved)));
        if session.solved
            && let Some(share) = start.success_by_turn.get_mut(session.attempts.len())
        {
            *share += 1.0 / played.len() as f64;
        }
        for attempt in &session.attempts {
            declined.add(session.user, f64::from(u8::from(attempt.declined)));
        }
    }
    start.success = successes.interval();
    start.declined = declined.mean();
    Ok(start)
}

#[derive(Debug, Clone)]
struct Played {
    user: usize,
    attempts: Vec<Attempt>,
    solved: bool,
    fits: bool,
}

fn play(
    suggester: &mut Suggester,
    sessions: &[(u64, &(usize, Task))],
    temperature: f32,
    seed: u64,
) -> anyhow::Result<Vec<Played>> {
    let mut played: Vec<Played> = sessions
        .iter()
        .map(|(_, (user, _))| Played {
            user: *user,
            attempts: Vec::new(),
            solved: false,
            fits: true,
        })
        .collect();
    for turn in 0..TURNS_MAX {
        let (mut asking, mut prompts) = (Vec::new(), Vec::new());
        for ((nth, (_, task)), session) in sessions.iter().zip(&mut played) {
            if session.solved || !session.fits {
                continue;
            }
            let prompt = |chars| task.prompt(chars, &session.attempts);
            let Some(ids) = suggester.fitting(CONTEXT_CHARS_MAX, prompt)? else {
                session.fits = false;
                continue;
            };
            let seed = Draws::new("springtide demo session start 1", &[seed, *nth, turn as u64]).seed();
            prompts.push((ids, [Method::sampled(temperature, seed)]));
            asking.push((task, session));
        }
        let drafts = suggester.suggest(&prompts)?;
        for ((task, session), [draft]) in asking.into_iter().zip(drafts) {
            session.solved = !draft.declined && task.judge(&session.attempts, &draft.text) == Reaction::Right;
            if !session.solved {
                session.attempts.push(Attempt::new(draft.text, draft.declined));
            }
        }
    }
    Ok(played)
}
