//! One choice from its first token to its place in the log. Runs as a task of its own, so that a caller who goes away
//! leaves a record of what was sampled and frees the slot.

use super::ask::Ask;
use super::explore::Toss;
use super::sessions::Parent;
use super::stop::Matcher;
use super::wire::StopReason;
use super::{Api, experts, record};
use crate::engine::{Event, Finish, Token};
use crate::routing::Route;
use edge::Problem;
use ingest::event::{Body, FinishReason, PayloadRef};
use ingest::log;
use policy::digest::Digest;
use policy::router::Routing;
use policy::tokenizer::{Decoder, Tokenizer};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How long an answer waits for the store of payloads.
const EXPERTS_WAIT: Duration = Duration::from_secs(2);

/// A sampled token, for the log and for people.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOut {
    pub id: u32,
    pub logprob: f32,
    /// How many ids could have been sampled.
    pub kept: u32,
    /// Its own text; `token_id:<id>` where it has none. Empty unless log-probabilities were asked for.
    pub text: String,
    pub top: Vec<(String, f32)>,
    /// Characters of the completion before it.
    pub offset: usize,
}

/// A choice that ended and is in the log.
#[derive(Debug, Clone)]
pub struct Finished {
    pub generation_id: Uuid,
    pub prompt_ids: Arc<[u32]>,
    pub tokens: Vec<TokenOut>,
    pub text: String,
    pub reason: FinishReason,
    pub stop_reason: Option<StopReason>,
    pub declined: bool,
    pub version: i64,
    pub root: Digest,
    pub arm: String,
}

/// What a streaming caller sees of a choice.
#[derive(Debug)]
pub enum Frame {
    Piece {
        index: usize,
        text: String,
        tokens: Vec<TokenOut>,
    },
    /// In the log. Carries what no piece carried yet.
    Finished {
        index: usize,
        finished: Box<Finished>,
        text: String,
        tokens: Vec<TokenOut>,
    },
    Failed(Problem),
}

/// The way to a streaming caller. Pieces without text are left for later, unless the caller wants every token.
pub struct Outlet {
    index: usize,
    frames: mpsc::Sender<Frame>,
    every_token: bool,
    /// Bytes of text, and tokens, that pieces have carried.
    text: usize,
    tokens: usize,
}

impl Outlet {
    pub fn new(index: usize, ask: &Ask, frames: mpsc::Sender<Frame>) -> Self {
        Outlet {
            index,
            frames,
            every_token: ask.return_token_ids || ask.logprobs.is_some(),
            text: 0,
            tokens: 0,
        }
    }

    /// False: the caller is gone.
    async fn piece(&mut self, text: String, token: TokenOut) -> bool {
        if text.is_empty() && !self.every_token {
            return true;
        }
        self.text += text.len();
        self.tokens += 1;
        let frame = Frame::Piece {
            index: self.index,
            text,
            tokens: if self.every_token { vec![token] } else { Vec::new() },
        };
        self.frames.send(frame).await.is_ok()
    }

    /// The last frame, with what no piece has carried. A choice that its caller left has none.
    pub async fn close(self, result: Result<Option<Finished>, Problem>) {
        let frame = match result {
            Ok(Some(finished)) if finished.reason != FinishReason::Abort => Frame::Finished {
                index: self.index,
                text: finished.text.get(self.text..).unwrap_or_default().into(),
                tokens: match self.every_token {
                    true => finished.tokens[self.tokens..].to_vec(),
                    false => Vec::new(),
                },
                finished: Box::new(finished),
            },
            Ok(_) => return,
            Err(problem) => Frame::Failed(problem),
        };
        // nobody listens any more: it is in the log all the same
        let _ = self.frames.send(frame).await;
    }
}

/// One choice at work.
pub struct Choice {
    pub api: Arc<Api>,
    pub tenant: String,
    pub ask: Arc<Ask>,
    pub route: Route,
    pub prompt_ids: Arc<[u32]>,
    /// The turn before, in its session.
    pub parent: Option<Parent>,
    pub seed: u64,
    /// How the coin of exploration fell, where it was tossed.
    pub toss: Option<Toss>,
    pub events: mpsc::Receiver<Event>,
    pub submitted: Instant,
}

/// Why the tokens ended.
enum End {
    Engine(Finish),
    Text(String),
    CallerGone,
}

impl Choice {
    /// Samples to the end and logs; a streaming caller is told on the way. None: nothing was sampled before the caller went
    /// away, so there is nothing to log.
    pub async fn run(
        mut self,
        cancelled: &CancellationToken,
        mut outlet: Option<&mut Outlet>,
    ) -> Result<Option<Finished>, Problem> {
        let mut text = Text::new(self.route.version.tokenizer.as_ref(), &self.ask);
        let mut tokens: Vec<TokenOut> = Vec::new();
        let mut generation_id = None;
        let mut routing = Routing::default();
        let end = loop {
            let event = tokio::select! {
                biased;
                () = cancelled.cancelled() => break End::CallerGone,
                event = self.events.recv() => event,
            };
            match event {
                Some(Event::Token(token)) => {
                    generation_id.get_or_insert_with(Uuid::now_v7);
                    routing.append(&token.routing).map_err(Problem::internal)?;
                    let (out, shown, stop) = text.take(&token).map_err(Problem::internal)?;
                    tokens.push(out.clone());
                    if let Some(stop) = stop {
                        break End::Text(stop);
                    }
                    if let Some(outlet) = &mut outlet
                        && !outlet.piece(shown, out).await
                    {
                        break End::CallerGone;
                    }
                }
                Some(Event::Finished(finish)) => break End::Engine(finish),
                Some(Event::Displaced) => {
                    return Err(Problem::too_many(
                        "users needed the place in the queue; ask again later",
                        2,
                    ));
                }
                Some(Event::Failed(error)) => return Err(Problem::internal(error)),
                None => return Err(Problem::unavailable("the engine has stopped; ask again shortly", 2)),
            }
        };
        // from here on the engine need not go on
        self.events.close();
        let Some(generation_id) = generation_id else {
            return Ok(None);
        };
        let whole = text.end(matches!(end, End::Text(_))).map_err(Problem::internal)?;
        let version = &self.route.version;
        let declined = version
            .decline_id
            .is_some_and(|decline| tokens.iter().any(|token| token.id == decline));
        let (reason, stop_reason) = match end {
            End::Engine(Finish::Stop(id)) => (FinishReason::Stop, Some(StopReason::Token(id))),
            End::Engine(Finish::Length) => (FinishReason::Length, None),
            End::Text(stop) => (FinishReason::Stop, Some(StopReason::Text(stop))),
            End::CallerGone => (FinishReason::Abort, None),
        };
        let finished = Finished {
            generation_id,
            prompt_ids: self.prompt_ids.clone(),
            tokens,
            text: whole,
            reason,
            stop_reason,
            declined,
            version: version.serial,
            root: version.root,
            arm: self.route.arm.clone(),
        };
        self.log(&finished, &routing).await?;
        Ok(Some(finished))
    }

    async fn log(&self, finished: &Finished, routing: &Routing) -> Result<(), Problem> {
        let mut generation = record::generation(
            &self.api.policy,
            &self.api.options.replica,
            &self.ask,
            &self.route,
            self.seed,
            self.toss,
            finished,
        );
        generation.experts = self.log_experts(finished, routing).await;
        if let Some(parent) = &self.parent {
            parent.share(&mut generation, self.api.options.shared_prefix_tokens_min);
        }
        let event = generation.into_event(self.tenant.as_str(), self.api.source());
        metrics::counter!(
            "springtide_choices_total",
            "finish" => finished.reason.as_str(),
            "purpose" => self.ask.purpose.as_str()
        )
        .increment(1);
        if self.toss.is_some_and(|toss| toss.suppressed.is_some()) {
            metrics::counter!("springtide_choices_explored_total", "arm" => finished.arm.clone()).increment(1);
        }
        metrics::counter!("springtide_sampled_tokens_total").increment(finished.tokens.len() as u64);
        metrics::counter!("springtide_prompt_tokens_total").increment(finished.prompt_ids.len() as u64);
        self.api.log.append(&event).await.map_err(|error| {
            tracing::warn!(generation = %finished.generation_id, error = %error, "generation not logged");
            metrics::counter!("springtide_choices_unlogged_total").increment(1);
            match error {
                log::Error::Invalid(_) | log::Error::TooLarge { .. } => Problem::internal(error),
                log::Error::Full | log::Error::Unavailable(_) | log::Error::Spool(_) => Problem::unavailable(
                    "the completion could not be logged, so it is withheld; ask again shortly",
                    2,
                ),
            }
        })?;
        if let (Body::Generation(generation), Some(_)) = (&event.body, self.ask.episode_id) {
            self.api
                .sessions
                .remember(&self.tenant, generation, &finished.prompt_ids);
        }
        metrics::histogram!("springtide_choice_seconds").record(self.submitted.elapsed().as_secs_f64());
        Ok(())
    }
}

impl Choice {
    /// Puts the experts that sampled into the store of payloads. A generation without them can be trained on all the same, where
    /// sampler and trainer have the same bits, so a store that is away withholds no answer.
    async fn log_experts(&self, finished: &Finished, routing: &Routing) -> Option<PayloadRef> {
        let store = self.api.payloads.as_ref().filter(|_| !routing.is_empty())?;
        let read = finished.prompt_ids.len() + finished.tokens.len() - 1;
        let encoded = experts::encode(routing, read, self.route.version.experts.unwrap_or(0));
        let put = match encoded {
            Ok(bytes) => {
                let put = store.put(&self.tenant, bytes.into(), experts::MEDIA_TYPE);
                let Ok(put) = tokio::time::timeout(EXPERTS_WAIT, put).await else {
                    tracing::warn!(generation = %finished.generation_id, "experts not logged: the store did not answer in time");
                    metrics::counter!("springtide_experts_unlogged_total").increment(1);
                    return None;
                };
                put
            }
            Err(error) => {
                tracing::error!(generation = %finished.generation_id, %error, "experts not logged");
                return None;
            }
        };
        put.inspect_err(|error| {
            tracing::warn!(generation = %finished.generation_id, %error, "experts not logged");
            metrics::counter!("springtide_experts_unlogged_total").increment(1);
        })
        .ok()
    }
}

/// Token ids on their way to text.
struct Text<'a> {
    tokenizer: Option<&'a Tokenizer>,
    decoder: Option<Decoder>,
    stops: Matcher,
    /// Whether each token's own text is wanted.
    spelled: bool,
    shown: String,
    /// Characters decoded so far, shown or held back.
    decoded: usize,
}

impl<'a> Text<'a> {
    fn new(tokenizer: Option<&'a Tokenizer>, ask: &Ask) -> Self {
        Text {
            tokenizer,
            decoder: tokenizer.map(Tokenizer::decoder),
            stops: Matcher::new(ask.stops.clone()),
            spelled: ask.logprobs.is_some(),
            shown: String::new(),
            decoded: 0,
        }
    }

    /// The token for people, the text that may be shown now, and the stop string that was met.
    fn take(&mut self, token: &Token) -> Result<(TokenOut, String, Option<String>), policy::tokenizer::Error> {
        let mut out = TokenOut {
            id: token.id,
            logprob: token.logprob,
            kept: token.kept,
            text: String::new(),
            top: Vec::new(),
            offset: self.decoded,
        };
        if self.spelled {
            out.text = self.spell(token.id)?;
            out.top = token
                .top
                .iter()
                .map(|&(id, logprob)| Ok((self.spell(id)?, logprob)))
                .collect::<Result<_, policy::tokenizer::Error>>()?;
        }
        let piece = match &mut self.decoder {
            Some(decoder) => decoder.push(token.id)?,
            None => String::new(),
        };
        self.decoded += piece.chars().count();
        let step = self.stops.push(&piece);
        self.shown.push_str(&step.text);
        Ok((out, step.text, step.stop))
    }

    fn spell(&self, id: u32) -> Result<String, policy::tokenizer::Error> {
        let text = match self.tokenizer {
            Some(tokenizer) => tokenizer.decode(&[id])?,
            None => String::new(),
        };
        Ok(if text.is_empty() {
            format!("token_id:{id}")
        } else {
            text
        })
    }

    /// The whole text. What was held back belongs to it unless a stop string ended it.
    fn end(mut self, stopped: bool) -> Result<String, policy::tokenizer::Error> {
        if !stopped {
            if let Some(decoder) = &mut self.decoder {
                let rest = decoder.finish()?;
                self.shown.push_str(&self.stops.push(&rest).text);
            }
            self.shown.push_str(&self.stops.finish());
        }
        Ok(self.shown)
    }
}
