//! One choice, from its first token until it is logged. Each choice runs as its own task, so that a
//! caller who disconnects frees the slot and the sampled tokens are still logged.

mod record;

use super::completions::available_route;
use super::constraint::UNTRAINABLE;
use super::detokenize::TextBuilder;
use super::exploration::Exploration;
use super::outcome::{ChoiceOutcome, EchoedPrompt, FinishedChoice, SampledToken, StopReason};
use super::request::{GenerationRequest, Prompt};
use super::sessions::Parent;
use super::{Api, bar, deadline, experts, exploration, shadow};
use crate::engine::caller::Caller;
use crate::engine::{Constraint, Finish, LoadedVersion, SampleEvent, SampleRequest, Started, events_max};
use crate::options::LogAway;
use crate::routing::Route;
use edge::Problem;
use event_log::event::{Body, Event, FinishReason, Generation, PayloadRef, Proof, Purpose, signed_bytes};
use event_log::{self as log, feedback_token, payload};
use model::router::Routing;
use model::sampling::Params;
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::answer::Layout;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use uuid::Uuid;

/// How long an answer waits for the payload store.
const EXPERTS_WAIT: Duration = Duration::from_secs(2);

/// How long feedback may be given with a token. Later feedback of trusted keys is still stored.
const FEEDBACK_TOKEN_VALID_FOR: Duration = Duration::from_secs(30 * 24 * 3600);

/// The code of answers whose versions are not known: they ended before their engine said which.
const VERSION_UNKNOWN: &str = "version_unknown";

/// The code of answers that their engine did not finish: of users, and of rollouts that a caller had
/// seen some tokens of.
const ENGINE_FAILED: &str = "engine_failed";

/// The code of users' requests that ended before the first token: the caller left, or its deadline passed.
const NO_FIRST_TOKEN: &str = "no_first_token";

/// The code of answers of a rollout that it did not get: its caller left, or its deadline passed, before
/// the end. It asks again, and only what it got is rewarded.
const CALLER_GONE: &str = "caller_gone";

/// What a streaming caller receives of a choice.
pub type Frame = Result<Chunk, Problem>;

#[derive(Debug)]
pub struct Chunk {
    pub index: usize,
    /// Text and tokens that no earlier chunk carried.
    pub text: String,
    pub tokens: Vec<SampledToken>,
    /// Set in the last chunk, once the choice is in the log.
    pub finished: Option<Box<FinishedChoice>>,
}

/// Sends frames to a streaming caller. Tokens without text are delayed, unless the caller wants
/// every token.
pub struct FrameSender {
    index: usize,
    frames: mpsc::Sender<Frame>,
    every_token: bool,
    sent_bytes: usize,
    sent_tokens: usize,
}

impl FrameSender {
    pub fn new(index: usize, request: &GenerationRequest, frames: mpsc::Sender<Frame>) -> Self {
        FrameSender {
            index,
            frames,
            every_token: request.return_token_ids || request.logprobs.is_some(),
            sent_bytes: 0,
            sent_tokens: 0,
        }
    }

    /// False: the caller is gone. Waits while the caller reads slowly.
    async fn send(&mut self, text: String, token: SampledToken) -> bool {
        if text.is_empty() && !self.every_token {
            return true;
        }
        self.sent_bytes += text.len();
        self.sent_tokens += 1;
        let chunk = Chunk {
            index: self.index,
            text,
            tokens: if self.every_token { vec![token] } else { Vec::new() },
            finished: None,
        };
        self.frames.send(Ok(chunk)).await.is_ok()
    }

    /// Sends the last frame, unless the caller left.
    pub async fn finish(self, result: Result<Option<FinishedChoice>, Problem>) {
        let frame = match result {
            Ok(Some(finished)) if finished.reason != FinishReason::Abort => Ok(Chunk {
                index: self.index,
                text: finished.shown_text().get(self.sent_bytes..).unwrap_or_default().into(),
                tokens: match self.every_token {
                    true => finished.shown_tokens()[self.sent_tokens..].to_vec(),
                    false => Vec::new(),
                },
                finished: Some(Box::new(finished)),
            }),
            Ok(_) => return,
            Err(problem) => Err(problem),
        };
        // the choice is logged even if the caller left
        let _ = self.frames.send(frame).await;
    }
}

/// What is known of a choice that may be answered.
enum Logged {
    Yes,
    No,
    /// The log did not acknowledge it in time. It may still arrive.
    Perhaps,
}

/// A queued choice.
pub struct ChoiceTask {
    pub api: Arc<Api>,
    pub tenant: String,
    pub request: Arc<GenerationRequest>,
    pub layout: Arc<Layout>,
    pub route: Route,
    /// What it is sampled with, and logged with: those of the request, within the bound of its arm.
    pub params: Params,
    pub prompt_ids: Arc<[u32]>,
    /// The session's previous turn.
    pub parent: Option<Parent>,
    pub seed: u64,
    pub exploration: Option<Exploration>,
    pub caller: Caller,
    pub max_tokens: usize,
    pub constraint: Option<Constraint>,
    pub events: mpsc::Receiver<SampleEvent>,
    pub submitted: Instant,
    /// Set once another choice of the request has failed: then nobody waits for this one.
    pub given_up: CancellationToken,
    /// Whether it answers a user's request a second time, for nobody to see.
    pub unseen: bool,
}

impl FinishedChoice {
    /// `unsure`: the engine, if it has not said which versions sampled the tokens.
    async fn check_version(&mut self, unsure: Option<Started>) {
        if let Some(started) = unsure
            && self.outcome.untrainable.is_none()
            && !(started.holds)().await
        {
            self.outcome.untrainable = Some(VERSION_UNKNOWN);
        }
    }
}

/// What came of a choice before its first token.
#[derive(Default)]
struct Begun {
    started: Option<Started>,
    untrainable: Option<&'static str>,
    /// The event after that. The inner `None`: the engine has stopped.
    first: Option<Option<SampleEvent>>,
}

fn version_gone() -> Problem {
    Problem::unavailable("the version that this request was routed to has gone; try again", 1)
}

/// Why sampling ended.
enum End {
    Engine(Finish),
    StopString(String),
    CallerGone,
    DeadlinePassed,
    /// The engine does not answer the request.
    Refused(Problem),
    /// The engine did not finish the answer.
    Failed(Problem),
}

impl ChoiceTask {
    /// Whether this choice must not decline.
    pub fn explores(&self) -> bool {
        self.exploration
            .is_some_and(|exploration| exploration.suppressed.is_some())
    }

    /// Samples to the end and logs the generation; sends frames to a streaming caller. `None`: the
    /// caller left before anything was logged. What a user was not answered in time, or the engine failed,
    /// is logged with the tokens that it has, perhaps none: it is evidence about the version.
    pub async fn run(
        self,
        canceled: &CancellationToken,
        frames: Option<&mut FrameSender>,
    ) -> Result<Option<FinishedChoice>, Problem> {
        let span = self.span();
        let result = self.sample_and_log(canceled, frames).instrument(span.clone()).await;
        if let Ok(Some(finished)) = &result {
            span.record("gen_ai.response.id", tracing::field::display(finished.id));
            span.record("gen_ai.usage.output_tokens", finished.tokens.len());
            span.record("gen_ai.response.finish_reasons", finished.reason.as_str());
        }
        result
    }

    /// OpenTelemetry's conventions for generative AI, without any text.
    fn span(&self) -> tracing::Span {
        let model = &self.request.model;
        tracing::info_span!(
            "gen_ai.choice",
            otel.name = format!("text_completion {model}"),
            otel.kind = "internal",
            gen_ai.operation.name = "text_completion",
            gen_ai.provider.name = "springtide",
            gen_ai.request.model = model,
            gen_ai.request.max_tokens = self.max_tokens,
            gen_ai.request.temperature = self.params.temperature,
            gen_ai.response.model = format!("{}@{}", self.api.policy, self.route.version.serial),
            gen_ai.usage.input_tokens = self.prompt_ids.len(),
            gen_ai.response.id = tracing::field::Empty,
            gen_ai.usage.output_tokens = tracing::field::Empty,
            gen_ai.response.finish_reasons = tracing::field::Empty,
            springtide.arm = self.route.arm,
        )
    }

    async fn sample_and_log(
        mut self,
        canceled: &CancellationToken,
        mut frames: Option<&mut FrameSender>,
    ) -> Result<Option<FinishedChoice>, Problem> {
        let begun = tokio::select! {
            biased;
            () = canceled.cancelled() => Err(End::CallerGone),
            begun = self.begin() => begun?.ok_or(End::DeadlinePassed),
        };
        let (mut begun, mut unanswered) = match begun {
            Ok(begun) => (begun, None),
            Err(end) => (Begun::default(), Some(end)),
        };
        let route = &self.route;
        let bar = bar::of(&self.request, route, self.explores());
        let mut text = TextBuilder::new(route.version.tokenizer.as_ref(), &self.request, &self.layout);
        let mut tokens: Vec<SampledToken> = Vec::new();
        let mut prompt = EchoedPrompt::default();
        let mut generation_id = None;
        let (mut versions, mut untrainable) = (None, begun.untrainable);
        let mut routing = Routing::default();
        let end = loop {
            if let Some(end) = unanswered.take() {
                break end;
            }
            let event = match begun.first.take() {
                Some(event) => event,
                None => tokio::select! {
                    biased;
                    () = canceled.cancelled() => break End::CallerGone,
                    // one that nobody waits for has it for its first token
                    () = self.request.deadline.passed(), if !self.unseen => break End::DeadlinePassed,
                    event = self.events.recv() => event,
                },
            };
            match event {
                Some(SampleEvent::Token(token)) => {
                    generation_id.get_or_insert_with(Uuid::now_v7);
                    routing.append(&token.routing).map_err(Problem::internal)?;
                    let (sampled, shown, stop) = text.push(&token).map_err(Problem::internal)?;
                    tokens.push(sampled.clone());
                    if let Some(stop) = stop {
                        break End::StopString(stop);
                    }
                    // until the bar is reached nobody sees it: then the last frame has all
                    let Some(frames) = frames.as_mut().filter(|_| bar.is_none()) else {
                        continue;
                    };
                    // a slow reader holds it up
                    let sent = tokio::select! {
                        biased;
                        sent = frames.send(shown, sampled) => sent,
                        () = self.request.deadline.passed() => break End::DeadlinePassed,
                    };
                    if !sent {
                        break End::CallerGone;
                    }
                }
                Some(SampleEvent::Prompt(scored)) => {
                    let first = self.prompt_ids.first().copied().unwrap_or_default();
                    prompt.tokens = text.prompt(first, &scored).map_err(Problem::internal)?;
                }
                Some(SampleEvent::Versions(spans)) => versions = Some(spans),
                Some(SampleEvent::Untrainable(code)) => untrainable = Some(code),
                Some(SampleEvent::Started(started)) => begun.started = Some(started),
                Some(SampleEvent::Finished(finish)) => break End::Engine(finish),
                Some(SampleEvent::Displaced) => return Err(super::displaced()),
                Some(SampleEvent::Expired) => return Err(super::expired()),
                Some(SampleEvent::VersionGone) => return Err(version_gone()),
                Some(SampleEvent::Refused(reason)) => break End::Refused(Problem::bad_request(reason)),
                Some(SampleEvent::Busy) => break End::Refused(super::busy()),
                Some(SampleEvent::Unusable(reason)) => break End::Failed(super::unusable(reason)),
                Some(SampleEvent::Failed(error)) => break End::Failed(Problem::internal(error)),
                None => {
                    let problem = Problem::unavailable("the engine has stopped; try again shortly", 2);
                    break End::Failed(problem);
                }
            }
        };
        // cancels the sequence if the engine still samples it
        self.events.close();
        let ended_early = !matches!(end, End::Engine(_));
        let failed = matches!(end, End::Refused(_) | End::Failed(_));
        let is_evidence = match &end {
            End::Failed(_) => self.request.purpose == Purpose::Production || self.unseen,
            End::CallerGone | End::DeadlinePassed => {
                self.request.purpose == Purpose::Production && !self.given_up.is_cancelled()
            }
            End::Engine(_) | End::StopString(_) | End::Refused(_) => false,
        };
        if is_evidence {
            generation_id.get_or_insert_with(Uuid::now_v7);
        }
        if let Some(answered) = generation_id
            && !matches!(end, End::CallerGone | End::DeadlinePassed | End::Refused(_))
        {
            shadow::repeat(&self, answered);
        }
        let not_answered = tokens.is_empty() && !failed;
        let gone = matches!(end, End::CallerGone | End::DeadlinePassed) && self.request.purpose == Purpose::Rollout;
        // what the caller is told instead of an answer
        let problem = match &end {
            End::Refused(problem) | End::Failed(problem) => Some(problem.clone()),
            End::DeadlinePassed => Some(deadline::exceeded()),
            End::Engine(_) | End::StopString(_) | End::CallerGone => None,
        };
        // of other failed answers only what a caller has seen needs a record
        let seen = !failed || is_evidence || frames.is_some_and(|frames| frames.sent_tokens > 0);
        let (Some(generation_id), true) = (generation_id, seen) else {
            return problem.map_or(Ok(None), Err);
        };
        let text = text
            .finish(matches!(end, End::StopString(_)))
            .map_err(Problem::internal)?;
        let (reason, stop_reason) = match end {
            End::Engine(Finish::Stop(id)) => (FinishReason::Stop, Some(StopReason::Token(id))),
            End::Engine(Finish::Length) => (FinishReason::Length, None),
            End::StopString(stop) => (FinishReason::Stop, Some(StopReason::Text(stop))),
            End::CallerGone | End::DeadlinePassed | End::Refused(_) | End::Failed(_) => (FinishReason::Abort, None),
        };
        let declined = tokens.iter().any(|token| Some(token.id) == route.version.decline_id);
        let is_whole = !declined && reason != FinishReason::Abort;
        let held_back = bar.is_some_and(|min| is_whole && !bar::is_reached(min, &tokens));
        // an engine elsewhere names the versions with its last event
        let unsure = begun.started.clone().filter(|_| ended_early && versions.is_none());
        let engine = begun.started.map(|started| started.engine);
        let constraint = record::constraint(&self.request, engine.as_deref());
        let unknown_masks = self.request.constraint.is_some() && constraint.is_none();
        if self.request.echo {
            prompt.text = self.prompt_text()?;
        }
        let mut finished = FinishedChoice {
            id: generation_id,
            prompt_ids: self.prompt_ids.clone(),
            prompt,
            text,
            reason,
            versions,
            engine,
            constraint,
            held_back,
            outcome: ChoiceOutcome {
                stop_reason: match route.version.decline_id {
                    Some(decline) if held_back => Some(StopReason::Token(decline)),
                    _ => stop_reason,
                },
                generation_id: Some(generation_id),
                version: route.version.serial,
                root: route.version.root.to_string(),
                arm: route.arm.clone(),
                feedback_token: Some(self.feedback_token(generation_id)),
                captured: None,
                untrainable: (failed.then_some(ENGINE_FAILED))
                    .or(not_answered.then_some(NO_FIRST_TOKEN))
                    .or(gone.then_some(CALLER_GONE))
                    .or(untrainable)
                    .or(self.request.untrainable())
                    .or(unknown_masks.then_some(UNTRAINABLE)),
                declined: declined || held_back,
            },
            tokens,
        };
        if let Some(problem) = problem {
            // the caller need not wait for the log
            let choices = self.api.choices.clone();
            let log = async move {
                finished.check_version(unsure).await;
                self.log(&finished, &routing).await
            };
            choices.spawn(log.in_current_span());
            return Err(problem);
        }
        finished.check_version(unsure).await;
        match self.log(&finished, &routing).await? {
            Logged::Yes => {}
            Logged::No => finished.outcome.set_uncaptured(),
            Logged::Perhaps => finished.outcome.captured = Some(false),
        }
        if finished.held_back {
            // the log has how it ended; a decline ends by its token
            finished.reason = FinishReason::Stop;
        }
        Ok(Some(finished))
    }

    /// What the engine is asked for. Its events come here from now on.
    pub fn sample(&mut self) -> SampleRequest {
        // every event of a sequence fits, so the engine never waits for a caller
        let (sender, events) = mpsc::channel(events_max(self.max_tokens));
        self.events = events;
        let request = &self.request;
        // the engine keeps the version loaded while it samples; a caller who reads slowly does not
        let copy = Arc::new(LoadedVersion::clone(&self.route.version));
        SampleRequest {
            version: std::mem::replace(&mut self.route.version, copy),
            prompt: self.prompt_ids.clone(),
            max_tokens: self.max_tokens,
            params: self.params.clone(),
            seed: self.seed,
            suppressed: self.exploration.and_then(|exploration| exploration.suppressed),
            constraint: self.constraint.clone(),
            ends: request.ends.clone(),
            score_prompt: request.score_prompt(),
            top_logprobs: request.logprobs.unwrap_or(0),
            caller: self.caller.clone(),
            class: request.class(),
            priority: request.priority,
            session: request.episode_id,
            events: sender,
            submitted: self.submitted,
        }
    }

    /// Waits for the first token, or for why there is none. Routes again if the version has gone.
    /// `None`: the deadline has passed.
    async fn begin(&mut self) -> Result<Option<Begun>, Problem> {
        let (mut started, mut untrainable) = (None, None);
        loop {
            let event = tokio::select! {
                biased;
                () = self.request.deadline.passed() => return Ok(None),
                event = self.events.recv() => event,
            };
            match event {
                Some(SampleEvent::Started(event)) => started = Some(event),
                Some(SampleEvent::Untrainable(code)) => untrainable = Some(code),
                Some(SampleEvent::VersionGone) => {
                    (started, untrainable) = (None, None);
                    self.route_again().await?;
                }
                first => {
                    return Ok(Some(Begun {
                        started,
                        untrainable,
                        first: Some(first),
                    }));
                }
            }
        }
    }

    /// Queues the choice for the version that its user has now. The prompt is the same to both versions,
    /// or the caller has to ask again.
    async fn route_again(&mut self) -> Result<(), Problem> {
        if self.unseen {
            return Err(version_gone());
        }
        let route = available_route(&self.api, &self.request, self.submitted).await?;
        if !route.version.reads_like(&self.route.version) {
            return Err(version_gone());
        }
        let params = self.request.params_on(&route);
        // under another arm's bound it may be trained on: then a caller's seed does not hold
        if self.request.is_trainable(&params) && !self.request.is_trainable(&self.params) {
            self.seed = rand::random::<u64>() >> 1;
        }
        self.exploration = exploration::explore(&self.request, &params, &route, self.seed);
        (self.params, self.route) = (params, route);
        let sample = self.sample();
        self.api.engine.submit(vec![sample]).map_err(super::not_submitted)
    }

    /// Logs the choice. Fails unless it is in the log, or may be answered without.
    async fn log(&self, finished: &FinishedChoice, routing: &Routing) -> Result<Logged, Problem> {
        // nobody trains on a rollout that is not in the log, so it fails
        let may_answer = self.api.options.log_away == LogAway::Answer && self.request.purpose == Purpose::Production;
        if may_answer && !self.api.log_state.try_append(Instant::now()) {
            metrics::counter!("springtide_choices_unlogged_total").increment(1);
            return Ok(Logged::No);
        }
        let mut generation = record::generation(self, finished);
        generation.experts = self.log_experts(finished, routing).await;
        if let Some(parent) = &self.parent {
            parent.split_prefix(&mut generation, self.api.options.shared_prefix_tokens_min);
        }
        let event = self.sign(generation);
        metrics::counter!(
            "springtide_choices_total",
            "finish" => finished.reason.as_str(),
            "purpose" => self.request.purpose.as_str()
        )
        .increment(1);
        if self.explores() {
            metrics::counter!("springtide_choices_explored_total", "arm" => self.route.arm.clone()).increment(1);
        }
        if finished.held_back {
            metrics::counter!("springtide_choices_held_back_total", "arm" => self.route.arm.clone()).increment(1);
        }
        if let Some(code) = finished.outcome.untrainable {
            metrics::counter!("springtide_choices_untrainable_total", "code" => code).increment(1);
        }
        metrics::counter!("springtide_sampled_tokens_total").increment(finished.tokens.len() as u64);
        metrics::counter!("springtide_prompt_tokens_total").increment(finished.prompt_ids.len() as u64);
        let appended = self.api.log.append(&event).await;
        let away = matches!(appended, Err(log::Error::Full | log::Error::Unavailable(_)));
        self.api.log_state.appended(!away, Instant::now());
        if let Err(error) = appended {
            tracing::warn!(generation = %finished.id, %error, "generation not logged");
            metrics::counter!("springtide_choices_unlogged_total").increment(1);
            return match error {
                log::Error::Invalid(_) | log::Error::TooLarge { .. } | log::Error::Refused(_) => {
                    Err(Problem::internal(error))
                }
                log::Error::Full if may_answer => Ok(Logged::No),
                log::Error::Unavailable(_) if may_answer => Ok(Logged::Perhaps),
                log::Error::Full | log::Error::Unavailable(_) => Err(Problem::unavailable(
                    "the completion could not be logged, so it is withheld; try again shortly",
                    2,
                )),
            };
        }
        // no next turn begins with an answer that has no tokens
        if let (Body::Generation(generation), Some(_)) = (&event.body, self.request.episode_id)
            && !generation.token_ids.is_empty()
        {
            self.api
                .sessions
                .remember(&self.tenant, generation, &finished.prompt_ids);
        }
        metrics::histogram!("springtide_choice_seconds").record(self.submitted.elapsed().as_secs_f64());
        Ok(Logged::Yes)
    }

    /// As the caller gave it, else what its ids say.
    fn prompt_text(&self) -> Result<String, Problem> {
        match (&self.request.prompt, &self.route.version.tokenizer) {
            (Prompt::Text(text), _) => Ok(text.clone()),
            (_, Some(tokenizer)) => tokenizer.decode(&self.prompt_ids).map_err(Problem::internal),
            (_, None) => Ok(String::new()),
        }
    }

    fn feedback_token(&self, generation_id: Uuid) -> String {
        let episode_id = self.request.episode_id.unwrap_or(generation_id);
        let expires_at = OffsetDateTime::now_utc() + FEEDBACK_TOKEN_VALID_FOR;
        feedback_token::issue(&self.api.sampler, &self.tenant, generation_id, episode_id, expires_at)
    }

    /// The event of a generation, with the proof that this replica sampled it.
    fn sign(&self, generation: Generation) -> Event {
        let digest = generation.unsigned_digest();
        let mut event = generation.into_event(self.tenant.as_str(), self.api.source());
        let message = signed_bytes(&event.tenant, event.time, &digest);
        if let Body::Generation(generation) = &mut event.body {
            generation.proof = Some(Proof {
                sampler: self.api.sampler.id().to_owned(),
                signature: self.api.sampler.sign(&message),
            });
        }
        event
    }

    /// Stores the experts that the model used. If the store fails, the answer is still given: our
    /// trainer recomputes the same routing bit by bit.
    async fn log_experts(&self, finished: &FinishedChoice, routing: &Routing) -> Option<PayloadRef> {
        let store = self.api.payloads.as_ref().filter(|_| !routing.is_empty())?;
        // the last token was not read
        let read = (finished.prompt_ids.len() + finished.tokens.len()).saturating_sub(1);
        let stored = async {
            let bytes = experts::encode(routing, read, self.route.version.experts.unwrap_or(0))?;
            let put = store.put(&self.tenant, bytes.into(), payload::EXPERTS);
            anyhow::Ok(tokio::time::timeout(EXPERTS_WAIT, put).await??)
        };
        stored
            .await
            .inspect_err(|error| {
                tracing::warn!(generation = %finished.id, %error, "experts not logged");
                metrics::counter!("springtide_experts_unlogged_total").increment(1);
            })
            .ok()
    }
}

/// The seed of a choice: the first one uses the request's seed, the others derive theirs from it.
/// Below 2^63.
pub fn seed(request_seed: u64, index: usize) -> u64 {
    if index == 0 {
        return request_seed;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide choice 1\0");
    hasher.update(&request_seed.to_le_bytes());
    hasher.update(&(index as u64).to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choices_of_one_seed_differ_and_are_reproducible() {
        assert_eq!(seed(7, 0), 7);
        assert_ne!(seed(7, 1), seed(7, 2));
        assert_ne!(seed(7, 1), seed(8, 1));
        assert_eq!(seed(7, 3), seed(7, 3));
        assert!(seed(7, 1) < 1 << 63);
    }
}
