//! The run: at each arrival a user begins a session with the stack and keeps at it until the line is
//! right or they give up. Open loop: a slow server delays only the users who wait for it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use time::OffsetDateTime;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, sleep_until},
};
use uuid::Uuid;

use super::{
    stats::{self, Session},
    task::{self, Answer, Attempt, CONTEXT_CHARS_MAX, TURNS_MAX, Task},
};
use crate::{
    arrivals::Arrivals,
    client::{Asker, Client, Delivery, SESSION_SURFACE, Target},
    developer::FilePart,
    progress::{Ended, Progress},
    replay::COMPLETIONS_IN_FLIGHT_MAX,
    shuffle::Shuffle,
    stats::Judgment,
};

/// Sessions that are open at one time. One that is due beyond that is shed and counted.
pub const SESSIONS_OPEN_MAX: usize = 256;
const LINE_EVERY: Duration = Duration::from_secs(15);

/// What is played.
#[derive(Debug)]
pub struct Plan {
    pub arrivals: Arrivals,
    pub length: Duration,
    /// Of each user.
    pub user_parts: Vec<Vec<FilePart>>,
    pub seed: u64,
    /// Users also say of each turn whether they keep at least half of the suggestion.
    pub turn_signals: bool,
    /// With `--control`: permutes the verdicts.
    pub shuffle: Option<Shuffle>,
}

/// Plays the plan to its end or to the first Ctrl-C, and waits for the open sessions. The second
/// Ctrl-C leaves them.
pub async fn play(client: Client, plan: Plan) -> Progress<Session> {
    let Plan {
        mut arrivals,
        length,
        user_parts,
        seed,
        turn_signals,
        shuffle,
    } = plan;
    let stack = Arc::new(Stack {
        client,
        in_flight: Semaphore::new(COMPLETIONS_IN_FLIGHT_MAX),
        turn_signals,
        shuffle,
    });
    let mut open = JoinSet::<Ended<Session>>::new();
    let mut progress = Progress::default();
    let mut tick = interval(LINE_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick.tick().await;

    let start = tokio::time::Instant::now();
    let mut next = arrivals.next();
    while next.is_some() || !open.is_empty() {
        let due = start + next.map_or(length, |arrival| arrival.at);
        tokio::select! {
            () = sleep_until(due), if next.is_some() => {
                let Some(arrival) = next else { continue };
                next = arrivals.next();
                let counts = &mut progress.counts;
                counts.due += 1;
                counts.arrival_lateness_ms_max = counts.arrival_lateness_ms_max.max(due.elapsed().as_millis() as u64);
                let task = task::task(&user_parts[arrival.user], seed, arrival.user, arrival.nth);
                let Some(task) = task.filter(|_| open.len() < SESSIONS_OPEN_MAX) else {
                    counts.shed += 1;
                    continue;
                };
                let asker = Asker {
                    // The seed is part of the name, so that another seed puts other people into the
                    // arms.
                    user: format!("s{seed}-u{:04}", arrival.user),
                    session_id: Uuid::now_v7(),
                    surface: SESSION_SURFACE,
                };
                open.spawn(hold(Arc::clone(&stack), asker, (arrival.user, arrival.at), task));
            }
            Some(ended) = open.join_next(), if !open.is_empty() => match ended {
                Ok(ended) => progress.add(ended),
                Err(error) => {
                    tracing::error!(%error, "a simulated user failed");
                    progress.counts.count_error("demo: task failed".to_owned());
                }
            },
            _ = tick.tick() => eprintln!("{}", stats::line(start.elapsed(), &progress)),
            interrupt = tokio::signal::ctrl_c() => {
                if progress.interrupted || interrupt.is_err() {
                    break;
                }
                (next, progress.interrupted) = (None, true);
                eprintln!("no further sessions; waiting for the open ones (Ctrl-C again: do not wait)");
            }
        }
    }
    progress
}

/// What all sessions share.
struct Stack {
    client: Client,
    in_flight: Semaphore,
    turn_signals: bool,
    shuffle: Option<Shuffle>,
}

async fn hold(stack: Arc<Stack>, asker: Asker, (user, at): (usize, Duration), task: Task) -> Ended<Session> {
    let (mut outcome, mut prompts_shortened, mut deliveries) = (None, 0, Vec::new());
    let (mut failed, mut attempts) = (None, Vec::new());
    for turn in 0..TURNS_MAX {
        let Ok(permit) = stack.in_flight.acquire().await else {
            break;
        };
        let requested_at = Instant::now();
        let prompt = |chars| task.prompt(chars, &attempts);
        let answer = stack.client.complete(&asker, CONTEXT_CHARS_MAX, prompt).await;
        drop(permit);
        let suggestion = match answer {
            Ok((suggestion, shortenings)) => {
                prompts_shortened += shortenings;
                suggestion
            }
            Err(failure) => {
                failed = Some(failure); // the user leaves without a word
                break;
            }
        };
        let session: &mut Session =
            outcome.get_or_insert_with(|| Session::begin(user, at, task.answer, &suggestion.arm));
        let judgment = match suggestion.declined {
            true => Judgment::Declined,
            false => task.judge(&attempts, &suggestion.text),
        };
        session.add(&suggestion, judgment, requested_at.elapsed());
        sleep(task.delay(turn)).await;
        if stack.turn_signals && task.answer == Answer::Verdict {
            let target = Target::Generation(suggestion.generation_id);
            let accept = !suggestion.declined && task.keeps_half(&attempts, &suggestion.text);
            let sent = stack
                .client
                .send_feedback(target, "accept", accept, OffsetDateTime::now_utc());
            deliveries.push(sent.await);
        }
        if session.solved {
            break;
        }
        attempts.push(Attempt::new(suggestion.text, suggestion.declined));
    }
    if let (Some(session), None) = (&outcome, &failed) {
        deliveries.extend(stack.answer(&asker, session).await);
    }
    if outcome.is_some() {
        let end = stack.client.end_episode(asker.session_id, OffsetDateTime::now_utc());
        deliveries.push(end.await);
    }
    Ended {
        outcome: failed.map_or(Ok(outcome), Err),
        prompts_shortened,
        deliveries,
    }
}

impl Stack {
    /// What the user says at the end.
    async fn answer(&self, asker: &Asker, session: &Session) -> Option<Delivery> {
        let judgment = if session.solved {
            Judgment::Right
        } else {
            Judgment::Wrong
        };
        // The statistics count what really happened; only what users say is permuted.
        let said = |judgment| match &self.shuffle {
            Some(shuffle) => shuffle.swap(judgment) == Judgment::Right,
            None => judgment == Judgment::Right,
        };
        let (target, now) = (Target::Episode(asker.session_id), OffsetDateTime::now_utc());
        match session.answer {
            Answer::Nothing => None,
            Answer::Verdict => Some(self.client.send_feedback(target, "accept", said(judgment), now).await),
            Answer::Message => {
                let message = task::message(said(judgment));
                Some(self.client.send_feedback(target, "follow_up", message, now).await)
            }
        }
    }
}
