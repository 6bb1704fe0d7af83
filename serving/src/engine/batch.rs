//! The sequences that one loaded version is sampling: admit, step, compact. Sequence i always uses
//! slot i.

use super::backend::{Backend, Step};
use super::caller::Caller;
use super::{Finish, LoadedVersion, SampleEvent, SampleRequest, Token};
use model::sampling;
use std::sync::Arc;

/// One version and its running sequences.
pub struct Batch {
    pub version: Arc<LoadedVersion>,
    backend: Box<dyn Backend>,
    running: Vec<Sequence>,
}

struct Sequence {
    request: SampleRequest,
    source: sampling::Source,
    /// Empty unless a penalty needs it.
    history: sampling::PreviousTokens,
    /// Sampled last, not yet in the cache.
    last: u32,
    sampled: usize,
}

impl Batch {
    pub fn new(version: Arc<LoadedVersion>, backend: Box<dyn Backend>) -> Self {
        Batch {
            version,
            backend,
            running: Vec::new(),
        }
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whose sequences run, one for each slot in use.
    pub fn callers(&self) -> impl Iterator<Item = &Caller> {
        self.running.iter().map(|sequence| &sequence.request.caller)
    }

    pub fn free_slots(&self) -> usize {
        self.backend.slots() - self.running.len()
    }

    /// The backend, if nobody else holds the version. Afterwards no `Weak` of the version can be
    /// upgraded.
    pub fn into_backend(self) -> Result<Box<dyn Backend>, Self> {
        match Arc::try_unwrap(self.version) {
            Ok(_) => Ok(self.backend),
            Err(version) => Err(Batch { version, ..self }),
        }
    }

    /// Reads the prompt and samples the first token. There must be a free slot.
    pub fn admit(&mut self, request: SampleRequest) {
        let slot = self.running.len();
        let step = match self.backend.prefill(slot, &request.prompt) {
            Ok(step) => step,
            Err(error) => {
                self.backend.clear(slot);
                fail(&request, &error);
                return;
            }
        };
        metrics::histogram!("springtide_time_to_first_token_seconds").record(request.submitted.elapsed().as_secs_f64());
        let history = match request.params.has_penalties() {
            true => sampling::PreviousTokens::new(&request.prompt),
            false => sampling::PreviousTokens::default(),
        };
        self.running.push(Sequence {
            source: sampling::Source::new(request.seed),
            request,
            history,
            last: 0,
            sampled: 0,
        });
        if !self.running[slot].sample(step) {
            self.release(slot);
        }
    }

    /// Samples one token for every running sequence.
    pub fn step(&mut self) {
        for slot in (0..self.running.len()).rev() {
            if self.running[slot].request.events.is_closed() {
                metrics::counter!("springtide_choices_cancelled_total").increment(1);
                self.release(slot);
            }
        }
        if self.running.is_empty() {
            return;
        }
        let tokens: Vec<u32> = self.running.iter().map(|sequence| sequence.last).collect();
        let steps = match self.backend.decode(&tokens) {
            Ok(steps) => steps,
            Err(error) => {
                for slot in (0..self.running.len()).rev() {
                    fail(&self.running[slot].request, &error);
                    self.release(slot);
                }
                return;
            }
        };
        // in reverse, so that a release does not move slots still to visit
        for (slot, step) in steps.into_iter().enumerate().rev() {
            if !self.running[slot].sample(step) {
                self.release(slot);
            }
        }
    }

    /// Frees a slot and moves the last sequence into the gap.
    fn release(&mut self, slot: usize) {
        let last = self.running.len() - 1;
        if slot != last {
            self.backend.move_slot(last, slot);
        }
        self.backend.clear(last);
        self.running.swap_remove(slot);
    }
}

impl Sequence {
    /// Samples from the step's logits and sends the token; false when the sequence has ended.
    fn sample(&mut self, step: Step) -> bool {
        let Step { mut logits, routing } = step;
        let request = &self.request;
        if let Some(id) = request.suppressed {
            sampling::suppress(&mut logits, id);
        }
        let drawn = sampling::draw(&logits, &request.params, &self.history, &mut self.source);
        if request.params.has_penalties() {
            self.history.push(drawn.id);
        }
        self.last = drawn.id;
        self.sampled += 1;
        let received = send(
            request,
            SampleEvent::Token(Token {
                id: drawn.id,
                logprob: drawn.log_prob,
                candidates: drawn.candidates,
                routing,
                top: match request.top_logprobs {
                    0 => Vec::new(),
                    k => sampling::top_logprobs(&logits, k),
                },
            }),
        );
        let finish = if request.version.stop_ids.contains(&drawn.id) {
            Finish::Stop(drawn.id)
        } else if self.sampled >= request.max_tokens {
            Finish::Length
        } else {
            return received;
        };
        send(request, SampleEvent::Finished(finish));
        false
    }
}

fn fail(request: &SampleRequest, error: &anyhow::Error) {
    let error = format!("{error:#}");
    tracing::error!(version = request.version.serial, error, "sequence failed");
    send(request, SampleEvent::Failed(error));
}

/// False when the caller went away; the channel has room for every event.
fn send(request: &SampleRequest, event: SampleEvent) -> bool {
    request.events.try_send(event).is_ok()
}
