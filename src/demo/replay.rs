//! The run itself: at each arrival one developer pauses, asks, looks and perhaps answers. Open loop: a slow or absent
//! server delays nobody but the developer who waits for it. All counting is done by the one loop in [`replay`].

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use serde::Serialize;
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, sleep_until},
};
use uuid::Uuid;

use super::{
    arrivals::{Arrival, Arrivals},
    client::{Asker, Client, Failed, Told},
    control::Permutation,
    developer::{self, Desk, Pause},
    live::{Asked, Board, Run},
    records::Live,
    tally::{Outcome, Verdict},
};
use crate::console;

/// Completions asked for at one time. A pause beyond is shed and counted, as an editor that gives up.
pub const COMPLETIONS_IN_FLIGHT_MAX: usize = 64;
/// Developers at a pause at one time: asking, thinking, or waiting for their answer to be acknowledged.
pub const PAUSES_OPEN_MAX: usize = 4096;

/// What is replayed.
#[derive(Debug)]
pub struct Plan {
    pub arrivals: Arrivals,
    pub length: Duration,
    /// Of each user.
    pub desks: Vec<Vec<Desk>>,
    pub seed: u64,
    pub tau: f64,
    /// Permutes the answers, so that they say nothing.
    pub control: Option<Permutation>,
}

/// Everything that was counted beside the outcomes.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Counts {
    /// Pauses that were due.
    pub due: u64,
    /// Not asked for, because the bound on completions in flight or on open pauses was hit.
    pub shed: u64,
    /// Asked for in vain.
    pub failed: u64,
    /// Prompts that the server refused as too long and that were sent again with less context.
    pub prompts_shortened: u64,
    /// Answers of developers that were acknowledged, and the repetitions that took.
    pub feedback_acknowledged: u64,
    pub feedback_retries: u64,
    /// How late the replay itself was at worst with an arrival: it should keep up.
    pub arrival_lateness_ms_max: u64,
    pub errors: BTreeMap<String, u64>,
}

#[derive(Debug, Default)]
pub struct Replayed {
    pub outcomes: Vec<Outcome>,
    pub counts: Counts,
    pub interrupted: bool,
}

/// One pause that is over.
struct Ended {
    outcome: Result<Outcome, Failed>,
    prompts_shortened: u32,
    told: Option<Told>,
}

/// Plays the plan to its end, or until the first Ctrl-C, and waits for the developers who are still at a pause. The second
/// Ctrl-C leaves them.
pub async fn replay(client: Client, plan: Plan, mut live: watch::Receiver<Live>) -> Replayed {
    let client = Arc::new(client);
    let Plan {
        mut arrivals,
        length,
        desks,
        seed,
        tau,
        control,
    } = plan;
    let control = control.map(Arc::new);
    let in_flight = Arc::new(Semaphore::new(COMPLETIONS_IN_FLIGHT_MAX));
    let mut sessions = HashMap::<(usize, usize), Uuid>::new();
    let mut pauses = JoinSet::<Ended>::new();
    let mut replayed = Replayed::default();
    let users = desks.len();
    let mut board = Board::new(Run {
        length,
        users,
        seed,
        tau,
    });
    let mut tick = interval(board.every());
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick.tick().await;

    let start = tokio::time::Instant::now();
    let mut next = arrivals.next();
    while next.is_some() || !pauses.is_empty() {
        let due = start + next.map_or(length, |arrival| arrival.at);
        tokio::select! {
            () = sleep_until(due), if next.is_some() => {
                let Some(arrival) = next else { continue };
                next = arrivals.next();
                let counts = &mut replayed.counts;
                counts.due += 1;
                counts.arrival_lateness_ms_max = counts.arrival_lateness_ms_max.max(due.elapsed().as_millis() as u64);
                let permit = Arc::clone(&in_flight).try_acquire_owned();
                let (Ok(permit), true) = (permit, pauses.len() < PAUSES_OPEN_MAX) else {
                    counts.shed += 1;
                    continue;
                };
                let Some(pause) = developer::pause(&desks[arrival.user], seed, arrival.user, arrival.nth) else {
                    counts.shed += 1;
                    continue;
                };
                let session_id = *sessions.entry((arrival.user, pause.file)).or_insert_with(Uuid::now_v7);
                // The seed is part of the name, so that another seed puts other people into the arms.
                let asker = Asker { user: format!("s{seed}-u{:04}", arrival.user), session_id };
                pauses.spawn(at_pause(Arc::clone(&client), asker, arrival, pause, control.clone(), permit));
            }
            Some(ended) = pauses.join_next(), if !pauses.is_empty() => match ended {
                Ok(ended) => count(&mut replayed, ended),
                Err(error) => {
                    tracing::error!(%error, "a simulated developer failed");
                    *replayed.counts.errors.entry("demo: task failed".to_owned()).or_default() += 1;
                }
            },
            _ = tick.tick() => board.show(start.elapsed(), &replayed, &live.borrow_and_update()),
            asked = board.asked() => match asked {
                Asked::Redraw => board.show(start.elapsed(), &replayed, &live.borrow_and_update()),
                Asked::End if replayed.interrupted => break,
                Asked::End => {
                    (next, replayed.interrupted) = (None, true);
                    board.show(start.elapsed(), &replayed, &live.borrow_and_update());
                }
            },
            interrupt = tokio::signal::ctrl_c() => {
                if replayed.interrupted || interrupt.is_err() {
                    break;
                }
                (next, replayed.interrupted) = (None, true);
                console::say("no further pauses; waiting for the developers who are at one (Ctrl-C again to leave them)");
            }
        }
    }
    board.show(start.elapsed(), &replayed, &live.borrow_and_update());
    replayed
}

async fn at_pause(
    client: Arc<Client>,
    asker: Asker,
    arrival: Arrival,
    pause: Pause,
    control: Option<Arc<Permutation>>,
    permit: OwnedSemaphorePermit,
) -> Ended {
    let asked = Instant::now();
    let answer = client.complete(&asker, |chars| pause.context(chars).to_owned()).await;
    drop(permit);
    let (suggestion, prompts_shortened) = match answer {
        Ok(answer) => answer,
        Err(error) => {
            return Ended {
                outcome: Err(error),
                prompts_shortened: 0,
                told: None,
            };
        }
    };
    let verdict = match suggestion.declined {
        true => Verdict::Declined,
        false if pause.is_right(&suggestion.text) => Verdict::Right,
        false => Verdict::Wrong,
    };
    let told = match control {
        Some(control) if verdict != Verdict::Declined => control.swap(verdict),
        _ => verdict,
    };
    let outcome = Outcome {
        at: arrival.at,
        user: arrival.user,
        nth: arrival.nth,
        generation_id: suggestion.generation_id,
        arm: suggestion.arm,
        version: suggestion.version,
        root: suggestion.root,
        verdict,
        told,
        answers: pause.answers,
        latency: asked.elapsed(),
    };
    let told = if pause.answers && verdict != Verdict::Declined {
        sleep(pause.delay).await;
        Some(
            client
                .tell(
                    outcome.generation_id,
                    outcome.told == Verdict::Right,
                    OffsetDateTime::now_utc(),
                )
                .await,
        )
    } else {
        None
    };
    Ended {
        outcome: Ok(outcome),
        prompts_shortened,
        told,
    }
}

fn count(replayed: &mut Replayed, ended: Ended) {
    let counts = &mut replayed.counts;
    counts.prompts_shortened += u64::from(ended.prompts_shortened);
    if let Some(told) = ended.told {
        counts.feedback_retries += told.retries;
        match told.failed {
            Some(failed) => *counts.errors.entry(failed.to_string()).or_default() += 1,
            None => counts.feedback_acknowledged += 1,
        }
    }
    match ended.outcome {
        Ok(outcome) => replayed.outcomes.push(outcome),
        Err(failed) => {
            counts.failed += 1;
            *counts.errors.entry(failed.to_string()).or_default() += 1;
        }
    }
}
