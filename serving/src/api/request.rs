//! A checked request: every field validated and every default filled in before anything is routed
//! or queued. Pure. Over 500 lines, because the fields of all APIs are checked in one place.

use super::body::{ChatRequest, CommonFields, CompletionRequest};
use super::constraint::{self, Constraint};
use super::deadline::Deadline;
use crate::engine::caller::Work;
use crate::engine::{self, Ends, LoadedVersion, TrafficClass};
use crate::options::Options;
use crate::routing::Route;
use edge::Problem;
use event_log::event::{
    ANONYMOUS_USER_PREFIX, LOGIT_BIASES_MAX, NAME_BYTES_MAX, PROMPT_TOKENS_MAX, Purpose, SAMPLED_TOKENS_MAX,
};
use event_log::lease::Lease;
use model::sampling::Params;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use text::answer::{self, Format, Layout, Tools};
use text::chat::Conversation;
use uuid::Uuid;

/// Anthropic and vLLM set none; OpenAI's is 4.
const STOPS_MAX: usize = 64;
const STOP_IDS_MAX: usize = 256;
/// Choices of a request with several prompts.
const CHOICES_MAX: usize = 128;
/// OpenAI's limit.
const LOGPROBS_MAX: i64 = 5;
/// vLLM's.
const PROMPT_LOGPROBS_MAX: i64 = 20;
/// Counted for each log-probability of a token that was not sampled.
const LISTED_BYTES: usize = 32;
/// Tokens that a request which names no length is charged for at most.
const LISTED_TOKENS_USUAL: usize = 4096;
/// Longest stop string, in bytes.
const STOP_BYTES_MAX: usize = 256;
/// Text up to here takes some ten microseconds to tokenize.
const SHORT_BYTES_MAX: usize = 2 << 10;
/// Tokens that `<think>` and a line break fit in.
const PROMPT_END_TOKENS: usize = 8;
/// The surface of rollouts.
const ROLLOUTS: &str = "rollout";

/// The code of answers whose end is not the policy's choice, so they are never trained on.
const STEERED_END: &str = "steered_end";
/// The code of answers of which the most probable are returned: those are no draws from the policy.
const CHOSEN: &str = "chosen";

#[derive(Debug, Clone)]
pub struct GenerationRequest {
    pub model: String,
    pub prompt: Prompt,
    /// `None`: the server's default, or what still fits.
    pub max_tokens: Option<usize>,
    /// As the caller asks. [`GenerationRequest::params_on`] has what is sampled with.
    pub params: Params,
    /// How many answers are sampled.
    pub n: usize,
    /// So many of them are returned, the most probable ones. `None`: all.
    pub best: Option<usize>,
    pub stops: Vec<String>,
    pub ends: Ends,
    /// Below 2^63, because it is stored as a signed integer.
    pub seed: Option<u64>,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: Option<usize>,
    /// Whether the prompt comes before the answer.
    pub echo: bool,
    /// Only the prompt is wanted. One token is sampled and not shown.
    pub hides_answer: bool,
    pub user_key: String,
    /// `None`: each choice is an episode of its own.
    pub episode_id: Option<Uuid>,
    pub return_token_ids: bool,
    pub deadline: Deadline,
    /// Whether a model's reasoning is not part of the answer's text.
    pub separate_reasoning: bool,
    pub constraint: Option<Constraint>,
    /// Lower goes first, within a traffic class.
    pub priority: i32,
    pub surface: String,
    pub purpose: Purpose,
    pub run_id: Option<Uuid>,
    pub task_id: Option<String>,
    pub group_id: Option<String>,
    pub consent: bool,
    /// Of the episode: a summary opens the next one.
    pub segment: u32,
    /// False: no token is trained on, but the episode's other turns are.
    pub train: bool,
}

#[derive(Debug, Clone)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    /// Rendered by the template of the version that answers.
    Chat(Box<Conversation>),
}

impl GenerationRequest {
    /// Checks a completion request with one prompt or several: each has answers of its own.
    pub fn completions(mut request: CompletionRequest, options: &Options, tenant: &str) -> Result<Vec<Self>, Problem> {
        let prompts = match &mut request.prompt {
            Value::Array(prompts) if prompts.len() > 1 && !prompts[0].is_number() => std::mem::take(prompts),
            _ => return Ok(vec![Self::completion(request, options, tenant)?]),
        };
        let each = request.best_of.or(request.common.n).unwrap_or(1);
        let each = usize::try_from(each).unwrap_or(1).max(1);
        if prompts.len() > CHOICES_MAX / each {
            let detail = format!(
                "prompt has {} prompts with {each} choices each; at most {CHOICES_MAX} choices together",
                prompts.len()
            );
            return Err(bad(detail).with("field", "prompt"));
        }
        if request.common.stream == Some(true) {
            return Err(bad(
                "several prompts are not streamed; leave out stream, or send one request per prompt",
            ));
        }
        let of_prompt = |prompt| {
            let request = CompletionRequest {
                prompt,
                ..request.clone()
            };
            Self::completion(request, options, tenant)
        };
        prompts.into_iter().map(of_prompt).collect()
    }

    /// Checks a completion request. `tenant` keeps equal session ids of two tenants apart.
    pub fn completion(request: CompletionRequest, options: &Options, tenant: &str) -> Result<Self, Problem> {
        request.unknown.refuse()?;
        if request.suffix.is_some() {
            return Err(bad("suffix is not offered; leave it out"));
        }
        let logprobs = match request.logprobs {
            None => None,
            Some(k) if (0..=LOGPROBS_MAX).contains(&k) => Some(k as usize),
            Some(k) => return Err(bad(format!("logprobs is {k}; give 0 to {LOGPROBS_MAX}"))),
        };
        let echo = request.echo == Some(true);
        let (prompt, mut max_tokens) = (prompt(request.prompt)?, request.common.max_tokens);
        let hides_answer = echo && max_tokens == Some(0);
        if hides_answer {
            max_tokens = Some(1);
        }
        let n = request.common.n;
        let mut common = request.common;
        common.n = request.best_of.or(n);
        let checked = Self::new(prompt, logprobs, max_tokens, request.params, common, options, tenant)?;
        let returned = match n.unwrap_or(1) {
            n if n < 1 => return Err(bad(format!("n is {n}; give 1 to {}", options.choices_max))),
            n => usize::try_from(n).unwrap_or(usize::MAX),
        };
        if returned > checked.n {
            let detail = format!("best_of is {}; give at least n, which is {returned}", checked.n);
            return Err(bad(detail).with("field", "best_of"));
        }
        let checked = GenerationRequest {
            best: (returned < checked.n).then_some(returned),
            echo,
            hides_answer,
            ..checked
        };
        let whole = [
            ("echo", echo),
            ("best_of", checked.best.is_some()),
            ("prompt_logprobs", checked.prompt_logprobs.is_some()),
        ];
        checked.refuse_in_stream(&whole)?;
        Ok(checked)
    }

    /// `fields`: each with whether the caller gives it.
    fn refuse_in_stream(&self, fields: &[(&'static str, bool)]) -> Result<(), Problem> {
        match fields.iter().find(|(_, given)| *given && self.stream) {
            Some((field, _)) => {
                let detail = format!("{field} is not streamed; leave out {field} or stream");
                Err(bad(detail).with("field", *field))
            }
            None => Ok(()),
        }
    }

    /// Checks a chat request.
    pub fn chat(request: ChatRequest, options: &Options, tenant: &str) -> Result<Self, Problem> {
        let (logprobs, max_tokens) = (request.top_logprobs()?, request.max_tokens()?);
        let separate_reasoning = request.separate_reasoning.unwrap_or(false);
        let (conversation, constraint, params, common) = request.into_conversation()?;
        let prompt = Prompt::Chat(Box::new(conversation));
        let request = Self::new(prompt, logprobs, max_tokens, params, common, options, tenant)?;
        request.refuse_in_stream(&[("prompt_logprobs", request.prompt_logprobs.is_some())])?;
        if constraint.is_some() && request.ends != Ends::default() {
            return Err(bad(
                "an answer of a format, or with a tool that it must call, ends when it is whole; leave out \
                 stop_token_ids, ignore_eos and min_tokens",
            ));
        }
        Ok(GenerationRequest {
            separate_reasoning,
            constraint,
            ..request
        })
    }

    fn new(
        prompt: Prompt,
        logprobs: Option<usize>,
        max_tokens: Option<i64>,
        params: Params,
        common: CommonFields,
        options: &Options,
        tenant: &str,
    ) -> Result<Self, Problem> {
        params.check().map_err(bad)?;
        if params.logit_bias.len() > LOGIT_BIASES_MAX {
            return Err(bad(format!(
                "logit_bias names {} tokens; at most {LOGIT_BIASES_MAX}",
                params.logit_bias.len()
            )));
        }
        let metadata = common.metadata.unwrap_or_default();
        let (purpose, run_id) = read_metadata(&metadata)?;
        let consent = flag(&metadata, "consent")?;
        let optional_name = |field: &str, value: Option<String>| value.map(|value| name(field, value)).transpose();
        let task_id = optional_name("metadata.task_id", text_of(&metadata, "task_id")?)?;
        let group_id = optional_name("metadata.group_id", text_of(&metadata, "group_id")?)?;
        let session = optional_name("session_id", common.session_id)?;
        let user = match (common.user, common.safety_identifier) {
            (Some(old), Some(new)) if old != new => {
                return Err(bad("user and safety_identifier, its new name, differ; give one"));
            }
            (old, new) => optional_name("user", old.or(new))?,
        };
        let surface = match optional_name("surface", common.surface)? {
            Some(surface) => surface,
            None if purpose == Purpose::Rollout => ROLLOUTS.into(),
            None => "completion".into(),
        };
        if purpose == Purpose::Production && [ROLLOUTS, Lease::SURFACE].contains(&surface.as_str()) {
            return Err(bad(format!(
                "surface {surface:?} is for rollouts, whose reward is a grader's; name the surface of your product"
            )));
        }
        let max_tokens = tokens_wanted("max_tokens", max_tokens)?;
        let ends = Ends {
            stop_ids: common.stop_token_ids.unwrap_or_default(),
            ignore_eos: common.ignore_eos == Some(true),
            min_tokens: common.min_tokens.unwrap_or(0),
        };
        if ends.stop_ids.len() > STOP_IDS_MAX {
            let detail = format!("stop_token_ids has {} ids; at most {STOP_IDS_MAX}", ends.stop_ids.len());
            return Err(bad(detail).with("field", "stop_token_ids"));
        }
        let prompt_logprobs = match common.prompt_logprobs {
            None => None,
            Some(k) if (0..=PROMPT_LOGPROBS_MAX).contains(&k) => Some(k as usize),
            Some(k) => {
                let detail = format!("prompt_logprobs is {k}; give 0 to {PROMPT_LOGPROBS_MAX}");
                return Err(bad(detail).with("field", "prompt_logprobs"));
            }
        };
        let n = match common.n.unwrap_or(1) {
            n if (1..=options.choices_max as i64).contains(&n) => n as usize,
            n => return Err(bad(format!("n is {n}; give 1 to {}", options.choices_max))),
        };
        let seed = match common.seed {
            Some(seed) if seed < 0 => return Err(bad(format!("seed is {seed}; give 0 or a positive integer"))),
            seed => seed.map(i64::unsigned_abs),
        };
        Ok(GenerationRequest {
            model: common.model,
            prompt,
            max_tokens,
            params,
            n,
            best: None,
            stops: stops("stop", common.stop)?,
            ends,
            seed,
            stream: common.stream.unwrap_or(false),
            include_usage: common.stream_options.unwrap_or_default().include_usage,
            logprobs,
            prompt_logprobs,
            echo: false,
            hides_answer: false,
            episode_id: session.as_deref().map(|id| episode(tenant, id)),
            // without a key the user cannot be recognized, so each request draws its arm anew
            user_key: user
                .or(session)
                .unwrap_or_else(|| format!("{ANONYMOUS_USER_PREFIX}{}", Uuid::now_v7())),
            return_token_ids: common.return_token_ids.unwrap_or(false),
            deadline: Deadline::default(),
            separate_reasoning: false,
            constraint: None,
            priority: match common.priority {
                None => usual_priority(purpose),
                Some(priority) => i32::try_from(priority)
                    .map_err(|_| bad("priority does not fit in 32 bits; lower goes first, and it can be left out"))?,
            },
            surface,
            purpose,
            run_id,
            task_id,
            group_id,
            consent,
            segment: segment(&metadata)?,
            train: flag(&metadata, "train")?,
        })
    }

    /// What the request is sampled with on this route. The route's arm may bound the temperature of
    /// users' requests; rollouts and evaluations keep theirs.
    pub fn params_on(&self, route: &Route) -> Params {
        let mut params = self.params.clone();
        if let Some(max) = route.temperature_max
            && self.purpose == Purpose::Production
        {
            params.temperature = params.temperature.min(max as f32);
        }
        params
    }

    /// Whether an answer that is sampled with these parameters may be trained on as a draw from the
    /// policy. The trainer asks the same of them; with the loss `verdicts` it takes greedy answers, too.
    pub fn is_trainable(&self, params: &Params) -> bool {
        let code = self.untrainable().or(params.untrainable());
        self.purpose == Purpose::Production && self.consent && code.is_none()
    }

    /// The code of why no answer may be trained on, beside the sampling parameters. A run chooses the
    /// sampling of its own rollouts.
    pub fn untrainable(&self) -> Option<&'static str> {
        let constrained = self.constraint.is_some() && self.purpose != Purpose::Rollout;
        let steered = self.ends.ignore_eos || self.ends.min_tokens > 0 || self.hides_answer;
        (constrained.then_some(constraint::UNTRAINABLE))
            .or(steered.then_some(STEERED_END))
            .or(self.best.map(|_| CHOSEN))
    }

    /// How many of the most probable tokens to list with each of the prompt's. `None`: the prompt needs no
    /// log-probabilities.
    pub fn score_prompt(&self) -> Option<usize> {
        self.prompt_logprobs.max(self.logprobs.filter(|_| self.echo))
    }

    /// The seed of the first choice. A caller's seed holds if the answer is never trained on. With
    /// seeds that callers choose, tokens are no independent draws from the policy, and callers
    /// would decide who explores; so the server draws all others. `params`: what is sampled with,
    /// because a bound can make an answer trainable that would have been too hot.
    pub fn first_seed(&self, params: &Params) -> u64 {
        let given = self.seed.filter(|_| !self.is_trainable(params));
        given.unwrap_or_else(|| rand::random::<u64>() >> 1)
    }

    pub fn class(&self) -> TrafficClass {
        match self.purpose {
            Purpose::Production => TrafficClass::Production,
            Purpose::Rollout | Purpose::Evaluation => TrafficClass::Background,
        }
    }

    /// What the engine counts it as.
    pub fn work(&self) -> Work {
        match self.purpose {
            Purpose::Production => Work::Production,
            Purpose::Rollout => Work::Rollout(self.run_id),
            Purpose::Evaluation => Work::Evaluation(self.run_id),
        }
    }

    /// Whether the prompt's token ids take no time to speak of.
    pub fn prompt_is_short(&self) -> bool {
        match &self.prompt {
            Prompt::Ids(_) => true,
            Prompt::Text(text) => text.len() <= SHORT_BYTES_MAX,
            // a template may loop over very little
            Prompt::Chat(_) => false,
        }
    }

    /// The prompt's token ids for the version that answers.
    pub fn prompt_ids(&self, version: &LoadedVersion) -> Result<Arc<[u32]>, Problem> {
        let ids = match (&self.prompt, &version.tokenizer) {
            (Prompt::Ids(ids), _) => ids.clone(),
            (Prompt::Text(text), Some(tokenizer)) => tokenizer.encode_prompt(text).map_err(Problem::internal)?,
            (Prompt::Chat(conversation), Some(tokenizer)) => {
                let templates = version.templates.as_ref().map_err(|error| {
                    Problem::internal(format!("the version's chat templates cannot be read: {error}"))
                })?;
                // what a template refuses is the caller's to change
                let rendered = templates.render(conversation).map_err(bad)?;
                tokenizer.encode(&rendered.text).map_err(Problem::internal)?
            }
            (Prompt::Text(_) | Prompt::Chat(_), None) => {
                return Err(bad(format!(
                    "version {} came without a tokenizer; send the prompt as token ids",
                    version.serial
                )));
            }
        };
        if ids.is_empty() {
            return Err(bad("the prompt has no tokens; send at least one"));
        }
        let stops = &self.ends.stop_ids;
        if let Some(id) = ids.iter().chain(stops).find(|id| **id >= version.vocab) {
            return Err(bad(format!(
                "token id {id} is outside the vocabulary of {} tokens",
                version.vocab
            )));
        }
        // before min_tokens none of these is sampled, and perhaps not the token that declines
        let kept_out = stops.len() + version.stop_ids.len() + 1;
        if self.ends.min_tokens > 0 && kept_out >= version.vocab as usize {
            return Err(bad("stop_token_ids leaves no other token to sample; give fewer"));
        }
        Ok(ids.into())
    }

    /// What follows the constraint of the answer, if there is one.
    pub fn constrain(&self, version: &LoadedVersion) -> Result<Option<engine::Constraint>, Problem> {
        let Some(constraint) = &self.constraint else {
            return Ok(None);
        };
        let Some(tokenizer) = &version.tokenizer else {
            return Err(bad(
                "the version has no tokenizer; ask without a format or a forced tool",
            ));
        };
        Ok(Some(engine::Constraint {
            schema: Arc::new(constraint.schema.clone()),
            matcher: tokenizer.constrain(&constraint.schema).map_err(bad)?,
        }))
    }

    /// Where calls of tools and reasoning are in the answer. `format`: how the model writes calls, if
    /// not as its template does.
    pub fn layout(&self, version: &LoadedVersion, format: Option<Format>, prompt: &[u32]) -> Layout {
        let (Prompt::Chat(conversation), Some(tokenizer)) = (&self.prompt, &version.tokenizer) else {
            return Layout::default();
        };
        let tools = serde_json::to_value(&conversation.tools).unwrap_or_default();
        let tools = Tools::of(tools.as_array().map_or(&[], Vec::as_slice));
        let written = || version.templates.as_ref().ok()?.call_format();
        if let Some(constraint) = &self.constraint {
            return Layout {
                calls: constraint.calls_tool.then_some((Format::Json, tools)),
                ..Layout::default()
            };
        }
        let format = format.or_else(written).filter(|_| !tools.is_empty());
        let end = &prompt[prompt.len().saturating_sub(PROMPT_END_TOKENS)..];
        let end = tokenizer.decode(end).unwrap_or_default();
        Layout {
            calls: format.map(|format| (format, tools)),
            separate_reasoning: self.separate_reasoning,
            begins_with_reasoning: end.trim_end().ends_with(answer::THINK),
        }
    }

    /// Memory that the listed log-probabilities may take, in bytes; in fact a small multiple of it.
    pub fn listed_bytes(&self, prompt: usize, max_tokens: usize) -> usize {
        // each token's own, too
        let of = |tokens: usize, top: Option<usize>| tokens.saturating_mul(top.map_or(0, |top| top + 1));
        // who names no length seldom gets the longest
        let sampled = match self.max_tokens {
            Some(_) => max_tokens,
            None => max_tokens.min(LISTED_TOKENS_USUAL),
        };
        let entries = of(sampled, self.logprobs).saturating_add(of(prompt, self.score_prompt()));
        entries.saturating_mul(self.n).saturating_mul(LISTED_BYTES)
    }

    /// Whether the answer is a chat message.
    pub fn is_chat(&self) -> bool {
        matches!(self.prompt, Prompt::Chat(_))
    }

    /// How many tokens may be sampled after a prompt of `prompt` tokens. `default` applies to
    /// completions without `max_tokens`; a chat answer may fill the context.
    pub fn tokens_to_sample(&self, prompt: usize, version: &LoadedVersion, default: usize) -> Result<usize, Problem> {
        let context = version.context.min(PROMPT_TOKENS_MAX);
        let free = context.saturating_sub(prompt).min(SAMPLED_TOKENS_MAX);
        let default = if self.is_chat() { free } else { default };
        let wanted = self.max_tokens.unwrap_or_else(|| default.min(free.max(1)));
        if self.ends.min_tokens > wanted {
            let detail = format!(
                "min_tokens is {}, and at most {wanted} tokens are sampled; give fewer, or a larger max_tokens",
                self.ends.min_tokens
            );
            return Err(bad(detail).with("field", "min_tokens"));
        }
        if wanted > free {
            return Err(Problem::new(
                axum::http::StatusCode::BAD_REQUEST,
                "context-too-long",
                "The prompt and its completion do not fit the context",
            )
            .detail(format!(
                "the prompt has {prompt} tokens and {wanted} are asked for, together more than the context of {context}; \
                 shorten the prompt or ask for at most {free} tokens"
            ))
            .with("context_tokens", context)
            .with("prompt_tokens", prompt));
        }
        Ok(wanted)
    }
}

/// Of a request that gives none. That of rollouts and evaluations is the one of a run whose own
/// priority is 0, so nobody's go before those of runs unasked.
pub fn usual_priority(purpose: Purpose) -> i32 {
    match purpose {
        Purpose::Production => 0,
        Purpose::Rollout | Purpose::Evaluation => 100,
    }
}

fn bad(detail: impl std::fmt::Display) -> Problem {
    Problem::bad_request(detail)
}

/// Checks how many tokens may be sampled. `field`: the caller's name of it.
pub fn tokens_wanted(field: &'static str, max_tokens: Option<i64>) -> Result<Option<usize>, Problem> {
    match max_tokens {
        Some(n) if n < 1 => Err(bad(format!("{field} is {n}; give at least 1")).with("field", field)),
        n => Ok(n.map(|n| usize::try_from(n).unwrap_or(usize::MAX))),
    }
}

fn prompt(mut value: Value) -> Result<Prompt, Problem> {
    // a list of one prompt, as some clients send it
    if let Value::Array(prompts) = &mut value
        && let [one @ (Value::String(_) | Value::Array(_))] = &mut prompts[..]
    {
        value = one.take();
    }
    let ids: Option<Vec<u32>> = match value {
        Value::String(text) => return Ok(Prompt::Text(text)),
        Value::Array(ids) if ids.len() > PROMPT_TOKENS_MAX => {
            return Err(bad(format!(
                "the prompt has {} token ids; at most {PROMPT_TOKENS_MAX}",
                ids.len()
            )));
        }
        ids => Vec::deserialize(ids).ok(),
    };
    ids.map(Prompt::Ids)
        .ok_or_else(|| bad("prompt must be a string, a list of token ids, or a list of these"))
}

/// Reads stop strings. `field`: the caller's name of them.
pub fn stops(field: &'static str, value: Option<Value>) -> Result<Vec<String>, Problem> {
    let stops: Option<Vec<String>> = match value {
        None => Some(Vec::new()),
        Some(Value::String(stop)) => Some(vec![stop]),
        Some(stops) => Vec::deserialize(stops).ok(),
    };
    let stops = stops.filter(|stops| stops.len() <= STOPS_MAX).ok_or_else(|| {
        let detail = format!("{field} must be a string or a list of at most {STOPS_MAX} strings");
        bad(detail).with("field", field)
    })?;
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX) {
        Some(stop) => {
            let detail = format!(
                "{field} has a string of {} bytes; give 1 to {STOP_BYTES_MAX}",
                stop.len()
            );
            Err(bad(detail).with("field", field))
        }
        None => Ok(stops),
    }
}

/// Checks a name that goes into the log. `field`: the caller's name of it.
pub fn name(field: &str, value: String) -> Result<String, Problem> {
    if value.is_empty() || value.len() > NAME_BYTES_MAX || value.contains('\0') {
        return Err(bad(format!(
            "{field} has {} bytes; give 1 to {NAME_BYTES_MAX}, none of them NUL",
            value.len()
        )));
    }
    Ok(value)
}

/// Other keys are the caller's own, as OpenAI has them.
fn read_metadata(metadata: &Map<String, Value>) -> Result<(Purpose, Option<Uuid>), Problem> {
    let purpose = match text_of(metadata, "purpose")?.as_deref() {
        None | Some("production") => Purpose::Production,
        Some("rollout") => Purpose::Rollout,
        Some("evaluation") => Purpose::Evaluation,
        Some(other) => {
            return Err(bad(format!(
                "metadata.purpose is {other:?}; give production, rollout or evaluation"
            )));
        }
    };
    let run_id = text_of(metadata, "run_id")?
        .map(|id| Uuid::parse_str(&id).map_err(|_| bad(format!("metadata.run_id is {id:?}; give the run's UUID"))))
        .transpose()?;
    if purpose == Purpose::Rollout && run_id.is_none() {
        return Err(bad("a rollout belongs to a run; give metadata.run_id"));
    }
    Ok((purpose, run_id))
}

/// Default: true. OpenAI's `metadata` has only texts.
fn flag(metadata: &Map<String, Value>, key: &str) -> Result<bool, Problem> {
    match metadata.get(key) {
        None | Some(Value::Null) => Ok(true),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(Value::String(flag)) if flag == "true" || flag == "false" => Ok(flag == "true"),
        Some(_) => Err(bad(format!("metadata.{key} must be true or false"))),
    }
}

fn segment(metadata: &Map<String, Value>) -> Result<u32, Problem> {
    let number = match metadata.get("segment") {
        None | Some(Value::Null) => return Ok(0),
        Some(Value::String(text)) => text.parse().ok(),
        Some(value) => value.as_u64(),
    };
    let segment = number.and_then(|number| u32::try_from(number).ok());
    segment
        .filter(|number| i32::try_from(*number).is_ok())
        .ok_or_else(|| bad("metadata.segment must be a number from 0: how many contexts of its episode came before"))
}

fn text_of(metadata: &Map<String, Value>, key: &str) -> Result<Option<String>, Problem> {
    match metadata.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(bad(format!("metadata.{key} must be a string"))),
    }
}

/// The episode of a session: the session id itself if it is a UUID, else a UUID derived from tenant
/// and id.
fn episode(tenant: &str, session_id: &str) -> Uuid {
    if let Ok(id) = Uuid::parse_str(session_id) {
        return id;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide session 1\0");
    hasher.update(tenant.as_bytes());
    hasher.update(b"\0");
    hasher.update(session_id.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests;
