//! The run: at each arrival a developer pauses, asks for a suggestion, judges it and perhaps
//! answers. Open loop: a slow server delays only the developer who waits for it. One loop does all
//! the counting.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, sleep_until},
};
use uuid::Uuid;

use crate::{
    arrivals::{Arrival, Arrivals},
    client::{Asker, CONTEXT_CHARS_MAX, Client, SURFACE, Target},
    corpus::tokenizer::CUT,
    developer::{self, FilePart, Pause},
    progress::{Ended, Progress, Run},
    queries::Live,
    shuffle::Shuffle,
    stats::{Judgment, Observation, Outcome},
    terminal::{Display, Key},
};

/// Completions that are waited for at one time. A pause beyond is shed and counted.
pub const COMPLETIONS_IN_FLIGHT_MAX: usize = 64;
/// Developers at a pause at one time: asking, thinking, or waiting for an acknowledgement.
const PAUSES_OPEN_MAX: usize = 4096;

/// What is replayed.
#[derive(Debug)]
pub struct Plan {
    pub arrivals: Arrivals,
    pub length: Duration,
    /// Of each user.
    pub user_parts: Vec<Vec<FilePart>>,
    pub seed: u64,
    pub tau: f64,
    /// With `--control`: permutes the answers.
    pub shuffle: Option<Shuffle>,
    /// Developers who answer also send what they typed.
    pub demonstrations: bool,
}

/// Plays the plan to its end or to the first Ctrl-C, and waits for the developers who are at a
/// pause. The second Ctrl-C leaves them.
pub async fn replay(
    client: Client,
    plan: Plan,
    mut display: Display,
    mut live: watch::Receiver<Live>,
) -> Progress<Outcome> {
    let client = Arc::new(client);
    let Plan {
        mut arrivals,
        length,
        user_parts,
        seed,
        tau,
        shuffle,
        demonstrations,
    } = plan;
    let shuffle = shuffle.map(Arc::new);
    let in_flight = Arc::new(Semaphore::new(COMPLETIONS_IN_FLIGHT_MAX));
    let mut sessions = HashMap::<(usize, usize), Uuid>::new();
    let mut pauses = JoinSet::<Ended<Outcome>>::new();
    let mut progress = Progress::default();
    let run = Run {
        length,
        users: user_parts.len(),
        seed,
        tau,
    };
    let mut tick = interval(display.period());
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
                let counts = &mut progress.counts;
                counts.due += 1;
                counts.arrival_lateness_ms_max = counts.arrival_lateness_ms_max.max(due.elapsed().as_millis() as u64);
                let permit = Arc::clone(&in_flight).try_acquire_owned().ok();
                let permit = permit.filter(|_| pauses.len() < PAUSES_OPEN_MAX);
                let pause = developer::pause(&user_parts[arrival.user], seed, arrival.user, arrival.nth);
                let (Some(permit), Some(pause)) = (permit, pause) else {
                    counts.shed += 1;
                    continue;
                };
                let session_id = *sessions.entry((arrival.user, pause.part.file)).or_insert_with(Uuid::now_v7);
                // The seed is part of the name, so that another seed puts other people into the
                // arms.
                let asker = Asker { user: format!("s{seed}-u{:04}", arrival.user), session_id, surface: SURFACE };
                let answering = Answering { shuffle: shuffle.clone(), demonstrations };
                pauses.spawn(play_pause(Arc::clone(&client), asker, arrival, pause, answering, permit));
            }
            Some(ended) = pauses.join_next(), if !pauses.is_empty() => match ended {
                Ok(pause) => progress.add(pause),
                Err(error) => {
                    tracing::error!(%error, "a simulated developer failed");
                    progress.counts.count_error("demo: task failed".to_owned());
                }
            },
            _ = tick.tick() => display.show(&run, start.elapsed(), &progress, &live.borrow_and_update()),
            key = display.key() => {
                if key == Key::End {
                    if progress.interrupted {
                        break;
                    }
                    (next, progress.interrupted) = (None, true);
                }
                display.show(&run, start.elapsed(), &progress, &live.borrow_and_update());
            }
            interrupt = tokio::signal::ctrl_c() => {
                if progress.interrupted || interrupt.is_err() {
                    break;
                }
                (next, progress.interrupted) = (None, true);
                display.say("no further pauses; waiting for the developers who are at one (Ctrl-C again: do not wait)");
            }
        }
    }
    display.show(&run, start.elapsed(), &progress, &live.borrow_and_update());
    progress
}

/// What developers say.
struct Answering {
    shuffle: Option<Arc<Shuffle>>,
    demonstrations: bool,
}

async fn play_pause(
    client: Arc<Client>,
    asker: Asker,
    arrival: Arrival,
    pause: Pause,
    answering: Answering,
    permit: OwnedSemaphorePermit,
) -> Ended<Outcome> {
    let requested_at = Instant::now();
    let prompt = |chars| pause.context(chars).to_owned() + CUT;
    let answer = client.complete(&asker, CONTEXT_CHARS_MAX, prompt).await;
    drop(permit);
    let latency = requested_at.elapsed();
    let (suggestion, prompts_shortened) = match answer {
        Ok(answer) => answer,
        Err(failure) => {
            return Ended {
                outcome: Err(failure),
                prompts_shortened: 0,
                deliveries: Vec::new(),
            };
        }
    };
    let judgment = match suggestion.declined {
        true => Judgment::Declined,
        false => pause.judge(&suggestion.text),
    };
    let mut deliveries = Vec::new();
    let target = Target::Generation(suggestion.generation_id);
    let was_shown = judgment != Judgment::Declined;
    if pause.answers && (was_shown || answering.demonstrations) {
        sleep(pause.delay).await;
    }
    if pause.answers && was_shown {
        // The statistics count what developers think; only what they say is permuted.
        let answer = answering.shuffle.map_or(judgment, |shuffle| shuffle.swap(judgment));
        let (accept, time) = (answer == Judgment::Right, OffsetDateTime::now_utc());
        deliveries.push(client.send_feedback(target, "accept", accept, time).await);
    }
    if pause.answers && answering.demonstrations {
        let (typed, time) = (pause.rest().trim_end(), OffsetDateTime::now_utc());
        deliveries.push(client.send_feedback(target, "demonstration", typed, time).await);
    }
    let observation = Observation {
        user: arrival.user,
        answers: pause.answers,
        judgment,
    };
    Ended {
        outcome: Ok(Some(Outcome {
            observation,
            at: arrival.at,
            nth: arrival.nth,
            generation_id: suggestion.generation_id,
            arm: suggestion.arm,
            version: suggestion.version,
            root: suggestion.root,
            latency,
        })),
        prompts_shortened,
        deliveries,
    }
}
