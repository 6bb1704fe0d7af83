//! Unseen answers of a canary: some requests of `champion` are answered a second time by the version
//! under the alias `canary`. They wait behind production, and are logged as evaluations, so that nothing
//! is learned from them. The caller does not wait for them, and no user sees them.
//!
//! Only what `champion` answered to the end, or failed at, is repeated: a user who left might have left
//! the other version, too.

use super::Api;
use super::choice::ChoiceTask;
use super::deadline::Deadline;
use super::request::{GenerationRequest, usual_priority};
use crate::routing::Route;
use event_log::event::Purpose;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use uuid::Uuid;

/// Unseen answers at a time, so that rollouts keep their places in the queue.
const AT_ONCE_MAX: usize = 16;

/// What all unseen answers of a replica share.
#[derive(Debug, Clone)]
pub struct Shadow {
    places: Arc<Semaphore>,
    /// Ends all of them.
    ended: CancellationToken,
}

impl Default for Shadow {
    fn default() -> Self {
        Shadow {
            places: Arc::new(Semaphore::new(AT_ONCE_MAX)),
            ended: CancellationToken::new(),
        }
    }
}

impl Shadow {
    /// Before the engine stops: what it drops then would look like its failures.
    pub fn end(&self) {
        self.places.close();
        self.ended.cancel();
    }
}

/// Answers a request a second time, if it is drawn and there is a place. `answered`: the generation of the first
/// answer. Requests that do not let the data be trained on, or that name a version, are left out.
pub fn repeat(choice: &ChoiceTask, answered: Uuid) {
    let (api, request) = (&choice.api, &choice.request);
    let is_users = request.purpose == Purpose::Production && !request.hides_answer;
    if !is_users || !request.consent || request.model != api.policy {
        return;
    }
    let Some(route) = api.routes.shadow(&choice.route, rand::random()) else {
        return;
    };
    let place = api.shadow.places.clone().try_acquire_owned();
    let taken = place.is_ok_and(|place| submit(choice, answered, route, place));
    if !taken {
        metrics::counter!("springtide_shadow_dropped_total").increment(1);
    }
}

/// Returns whether the engine took it. It has the place until it ends.
fn submit(choice: &ChoiceTask, answered: Uuid, route: Route, place: OwnedSemaphorePermit) -> bool {
    let mut unseen = unseen(choice, answered, route);
    let sample = unseen.sample();
    let api: &Arc<Api> = &choice.api;
    if api.engine.submit(vec![sample]).is_err() {
        return false;
    }
    let ended = api.shadow.ended.clone();
    let task = async move {
        let _place = place;
        if let Err(problem) = unseen.run(&ended, None).await {
            tracing::debug!(detail = problem.detail, "an unseen answer failed");
        }
    };
    api.choices.spawn(task.in_current_span());
    true
}

fn unseen(choice: &ChoiceTask, answered: Uuid, route: Route) -> ChoiceTask {
    // to its first token, as long as a user would wait for a slot
    let wait_max = Duration::from_millis(choice.api.options.queue_wait_ms_max);
    let request = GenerationRequest {
        purpose: Purpose::Evaluation,
        priority: usual_priority(Purpose::Evaluation),
        n: 1,
        stream: false,
        logprobs: None,
        prompt_logprobs: None,
        echo: false,
        best: None,
        // an episode of its own
        episode_id: None,
        segment: 0,
        group_id: Some(answered.to_string()),
        deadline: Deadline::after(wait_max),
        consent: false,
        ..(*choice.request).clone()
    };
    ChoiceTask {
        api: choice.api.clone(),
        tenant: choice.tenant.clone(),
        layout: choice.layout.clone(),
        route,
        // with the bound of champion's arm, which the canary's users will have
        params: choice.params.clone(),
        prompt_ids: choice.prompt_ids.clone(),
        parent: None,
        seed: rand::random::<u64>() >> 1,
        exploration: None,
        caller: choice.caller.clone().working_on(request.work()),
        max_tokens: choice.max_tokens,
        constraint: choice.constraint.clone(),
        // until it is submitted
        events: mpsc::channel(1).1,
        submitted: Instant::now(),
        given_up: CancellationToken::new(),
        unseen: true,
        request: Arc::new(request),
    }
}
