//! The run: at each arrival a user begins a session with the stack and keeps at it until the line is
//! right or they give up.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use time::OffsetDateTime;
use tokio::{sync::Semaphore, time::sleep};
use uuid::Uuid;

use super::{
    stats::{self, Session},
    task::{self, Answer, Attempt, CONTEXT_CHARS_MAX, TURNS_MAX, Task},
};
use crate::{
    arrivals::Arrival,
    client::{Asker, Client, Delivery, Target},
    progress::{Ended, Progress},
    replay::COMPLETIONS_IN_FLIGHT_MAX,
    shuffle::Shuffle,
    stage::{Replayed, Stage},
    stats::Reaction,
    terminal::View,
};

/// Sessions that are open at one time.
const SESSIONS_OPEN_MAX: usize = 256;
const LINE_EVERY: Duration = Duration::from_secs(15);

/// A line of text every few seconds.
struct Lines;

impl View<Session> for Lines {
    fn period(&self) -> Duration {
        LINE_EVERY
    }

    fn show(&mut self, elapsed: Duration, progress: &Progress<Session>) {
        eprintln!("{}", stats::line(elapsed, progress));
    }
}

/// Plays the sessions, as [`crate::replay::replay`] says.
pub async fn play(stage: &Stage) -> Replayed<Session> {
    let assistant = Arc::new(Assistant {
        client: stage.client.clone(),
        in_flight: Semaphore::new(COMPLETIONS_IN_FLIGHT_MAX),
        turn_signals: stage.args.turn_signals,
        shuffle: stage.shuffle(),
    });
    let begin = |arrival: Arrival| {
        let user = arrival.user;
        let task = task::task(&stage.user_parts[user], stage.args.seed, user, arrival.nth)?;
        let asker = stage.asker(&arrival, Uuid::now_v7());
        Some(hold(Arc::clone(&assistant), asker, (user, arrival.at), task))
    };
    stage.replay(SESSIONS_OPEN_MAX, &mut Lines, begin).await
}

/// What all sessions share.
struct Assistant {
    client: Client,
    in_flight: Semaphore,
    turn_signals: bool,
    shuffle: Option<Shuffle>,
}

async fn hold(assistant: Arc<Assistant>, asker: Asker, (user, at): (usize, Duration), task: Task) -> Ended<Session> {
    let (mut outcome, mut prompts_shortened, mut deliveries) = (None, 0, Vec::new());
    let (mut failed, mut attempts) = (None, Vec::new());
    for turn in 0..TURNS_MAX {
        let Ok(permit) = assistant.in_flight.acquire().await else {
            break;
        };
        let requested_at = Instant::now();
        let prompt = |chars| task.prompt(chars, &attempts);
        let answer = assistant.client.complete(&asker, CONTEXT_CHARS_MAX, prompt).await;
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
        let reaction = match suggestion.declined {
            true => Reaction::Declined,
            false => task.judge(&attempts, &suggestion.text),
        };
        session.add(&suggestion, reaction, requested_at.elapsed());
        sleep(task.delay(turn)).await;
        if assistant.turn_signals && task.answer == Answer::Verdict {
            let target = Target::Generation(suggestion.generation_id);
            let accept = !suggestion.declined && task.keeps_half(&attempts, &suggestion.text);
            let sent = assistant
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
        deliveries.extend(assistant.answer(&asker, session).await);
    }
    if outcome.is_some() {
        let end = assistant
            .client
            .end_episode(asker.session_id, OffsetDateTime::now_utc());
        deliveries.push(end.await);
    }
    Ended {
        outcome: failed.map_or(Ok(outcome), Err),
        prompts_shortened,
        deliveries,
    }
}

impl Assistant {
    /// What the user says at the end.
    async fn answer(&self, asker: &Asker, session: &Session) -> Option<Delivery> {
        let reaction = if session.solved {
            Reaction::Right
        } else {
            Reaction::Wrong
        };
        // The statistics count what really happened; only what users say is permuted.
        let said = |reaction| match &self.shuffle {
            Some(shuffle) => shuffle.swap(reaction) == Reaction::Right,
            None => reaction == Reaction::Right,
        };
        let (target, now) = (Target::Episode(asker.session_id), OffsetDateTime::now_utc());
        match session.answer {
            Answer::Nothing => None,
            Answer::Verdict => Some(self.client.send_feedback(target, "accept", said(reaction), now).await),
            Answer::Message => {
                let message = task::message(said(reaction));
                Some(self.client.send_feedback(target, "follow_up", message, now).await)
            }
        }
    }
}
