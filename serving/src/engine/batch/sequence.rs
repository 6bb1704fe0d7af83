//! One sequence while it is sampled.

use crate::engine::backend::Step;
use crate::engine::{Finish, SampleEvent, SampleRequest, Token, TrafficClass};
use model::router::Routing;
use model::sampling;
use text::constraint;

/// A request, and how far it has come.
pub struct Sequence {
    pub request: SampleRequest,
    /// The prompt and the sampled tokens.
    pub ids: Vec<u32>,
    source: sampling::Source,
    /// Empty unless a penalty needs it.
    history: sampling::PreviousTokens,
    /// The experts of tokens that were read since the last sampled token.
    routing: Routing,
    /// The prompt's tokens after the first, if their log-probabilities are wanted.
    scored: Vec<Token>,
    stop_ids: Vec<u32>,
    /// How many of `ids` have been read, once or more often: a paused sequence reads them again.
    read: usize,
}

impl Sequence {
    pub fn new(request: SampleRequest) -> Self {
        Sequence {
            ids: request.prompt.to_vec(),
            source: sampling::Source::new(request.seed),
            history: match request.params.has_penalties() {
                true => sampling::PreviousTokens::new(&request.prompt),
                false => sampling::PreviousTokens::default(),
            },
            routing: Routing::default(),
            scored: Vec::new(),
            stop_ids: request.stop_ids(),
            read: 0,
            request,
        }
    }

    /// How many tokens were sampled.
    pub fn sampled(&self) -> usize {
        self.ids.len() - self.request.prompt.len()
    }

    /// How many of the tokens `from..to` were read before, in a slot that was lost.
    pub fn again(&self, from: usize, to: usize) -> usize {
        self.read.saturating_sub(from).min(to - from)
    }

    /// Whether it needs the logits after every token that it reads.
    pub fn scores_prompt(&self) -> bool {
        self.request.score_prompt.is_some() && self.scored.len() + 1 < self.request.prompt.len()
    }

    pub fn is_background(&self) -> bool {
        self.request.class == TrafficClass::Background
    }

    /// Whether the caller went away. Counts it, so the sequence must be dropped then.
    pub fn is_canceled(&self) -> bool {
        let canceled = self.request.events.is_closed();
        if canceled {
            metrics::counter!("springtide_choices_cancelled_total").increment(1);
        }
        canceled
    }

    /// After a pass that read the tokens `from..to`. Samples if none is left to read. False when the
    /// sequence has ended.
    pub fn after(&mut self, from: usize, to: usize, step: Step) -> bool {
        let again = self.again(from, to);
        let mut parts = step.routing.split([again, to - from - again].into_iter());
        let appended = parts.pop().map_or(Ok(()), |new| self.routing.append(&new));
        if let Err(error) = appended {
            self.send(SampleEvent::Failed(error.to_string()));
            return false;
        }
        self.read = self.read.max(to);
        if to < self.ids.len() {
            if self.scores_prompt() && to == self.scored.len() + 1 {
                self.score(self.ids[to], &step.logits);
            }
            return true;
        }
        self.sample(step.logits)
    }

    /// Log-probabilities of a prompt are those of the model itself, as vLLM's are.
    fn score(&mut self, id: u32, logits: &[f32]) {
        let top = sampling::top_logprobs(logits, self.request.score_prompt.unwrap_or(0));
        self.scored.push(Token {
            id,
            logprob: sampling::log_prob(logits, 1.0, id),
            candidates: None,
            routing: Routing::default(),
            top,
        });
    }

    /// Samples from the logits and sends the token; false when the sequence has ended.
    fn sample(&mut self, mut logits: Vec<f32>) -> bool {
        if let Err(error) = self.constrain(&mut logits) {
            self.send(SampleEvent::Failed(error.to_string()));
            return false;
        }
        let request = &self.request;
        if self.ids.len() == request.prompt.len() {
            let waited = request.submitted.elapsed();
            metrics::histogram!("springtide_time_to_first_token_seconds").record(waited.as_secs_f64());
        }
        if self.sampled() < request.ends.min_tokens {
            self.stop_ids.iter().for_each(|&id| sampling::suppress(&mut logits, id));
        }
        if let Some(id) = request.suppressed {
            sampling::suppress(&mut logits, id);
        }
        // those of ids that are suppressed are negative infinity
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            let version = request.version.serial;
            self.send(SampleEvent::Failed(format!(
                "the logits of version {version} are not finite"
            )));
            return false;
        }
        let drawn = sampling::draw(&logits, &request.params, &self.history, &mut self.source);
        if request.params.has_penalties() {
            self.history.push(drawn.id);
        }
        self.ids.push(drawn.id);
        let mut top = match request.top_logprobs {
            0 => Vec::new(),
            k => sampling::top_logprobs(&logits, k),
        };
        top.retain(|(_, logprob)| logprob.is_finite());
        let token = Token {
            id: drawn.id,
            logprob: drawn.log_prob,
            candidates: Some(drawn.candidates),
            routing: std::mem::take(&mut self.routing),
            top,
        };
        if self.request.score_prompt.is_some() && self.sampled() == 1 {
            let scored = std::mem::take(&mut self.scored);
            self.send(SampleEvent::Prompt(scored));
            self.request.score_prompt = None;
        }
        let received = self.send(SampleEvent::Token(token));
        let request = &self.request;
        let finish = if self.stop_ids.contains(&drawn.id) {
            Finish::Stop(drawn.id)
        } else if self.ids.len() >= request.prompt.len() + request.max_tokens {
            Finish::Length
        } else {
            return received;
        };
        self.send(SampleEvent::Finished(finish));
        false
    }

    /// Excludes ids that the constraint does not allow after the tokens so far.
    fn constrain(&mut self, logits: &mut [f32]) -> Result<(), constraint::Error> {
        let SampleRequest {
            version,
            prompt,
            constraint: Some(constraint),
            ..
        } = &mut self.request
        else {
            return Ok(());
        };
        if let Some(&last) = self.ids.get(prompt.len()..).and_then(<[u32]>::last) {
            constraint.matcher.accept(last)?;
        }
        constraint.matcher.mask(logits, &version.stop_ids, version.decline_id)
    }

    pub fn fail(&self, error: &anyhow::Error) {
        let error = format!("{error:#}");
        tracing::error!(version = self.request.version.serial, error, "sequence failed");
        self.send(SampleEvent::Failed(error));
    }

    /// It was parked for too long, and is asked for again if its caller wants it.
    pub fn give_up(&self) {
        self.send(SampleEvent::Displaced);
    }

    /// False when the caller went away; the channel has room for every event.
    fn send(&self, event: SampleEvent) -> bool {
        self.request.events.try_send(event).is_ok()
    }
}
