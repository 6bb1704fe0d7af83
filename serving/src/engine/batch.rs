//! The sequences that one resident version is sampling: admit, step, compact. Sequence i is in slot i, always.

use super::model::{Model, Step};
use super::{Event, Finish, Request, Token, Version};
use policy::sampling;
use std::sync::Arc;

/// One resident version at work.
pub struct Batch {
    pub version: Arc<Version>,
    model: Box<dyn Model>,
    running: Vec<Sequence>,
}

struct Sequence {
    request: Request,
    source: sampling::Source,
    /// Empty where no penalty looks back.
    history: sampling::History,
    /// Sampled last, not yet in the cache.
    last: u32,
    sampled: usize,
}

impl Batch {
    pub fn new(version: Arc<Version>, model: Box<dyn Model>) -> Self {
        Batch {
            version,
            model,
            running: Vec::new(),
        }
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn free(&self) -> usize {
        self.model.slots() - self.running.len()
    }

    /// The weights and cache, if nobody else holds the version: from then on no `Weak` of it can be upgraded.
    pub fn into_model(self) -> Result<Box<dyn Model>, Self> {
        let Batch {
            version,
            model,
            running,
        } = self;
        match Arc::try_unwrap(version) {
            Ok(_) => Ok(model),
            Err(version) => Err(Batch {
                version,
                model,
                running,
            }),
        }
    }

    /// Reads the prompt and samples the first token. There must be a free slot.
    pub fn admit(&mut self, request: Request) {
        let slot = self.running.len();
        let step = match self.model.prefill(slot, &request.prompt) {
            Ok(step) => step,
            Err(error) => {
                self.model.clear(slot);
                fail(&request, &error);
                return;
            }
        };
        metrics::histogram!("springtide_time_to_first_token_seconds").record(request.submitted.elapsed().as_secs_f64());
        let source = sampling::Source::new(request.seed);
        let history = match request.params.looks_back() {
            true => sampling::History::new(&request.prompt),
            false => sampling::History::default(),
        };
        self.running.push(Sequence {
            request,
            source,
            history,
            last: 0,
            sampled: 0,
        });
        if !self.running[slot].take(step) {
            self.release(slot);
        }
    }

    /// One token for every running sequence.
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
        let steps = match self.model.decode(&tokens) {
            Ok(steps) => steps,
            Err(error) => {
                self.fail_all(&error);
                return;
            }
        };
        // from the back, so that the slots still to visit stay where they are
        for (slot, step) in steps.into_iter().enumerate().rev() {
            if !self.running[slot].take(step) {
                self.release(slot);
            }
        }
    }

    /// Frees a slot and closes the gap with the last one.
    fn release(&mut self, slot: usize) {
        let last = self.running.len() - 1;
        if slot != last {
            self.model.move_slot(last, slot);
        }
        self.model.clear(last);
        self.running.swap_remove(slot);
    }

    fn fail_all(&mut self, error: &anyhow::Error) {
        for slot in (0..self.running.len()).rev() {
            fail(&self.running[slot].request, error);
            self.release(slot);
        }
    }
}

impl Sequence {
    /// Samples from the step's logits and tells the caller; false when that was the last token.
    fn take(&mut self, step: Step) -> bool {
        let Step { mut logits, routing } = step;
        let logits = logits.as_mut_slice();
        let request = &self.request;
        if let Some(id) = request.suppressed {
            sampling::suppress(logits, id);
        }
        let drawn = sampling::draw(logits, &request.params, &self.history, &mut self.source);
        let (id, logprob) = (drawn.id, drawn.log_prob);
        if request.params.looks_back() {
            self.history.push(id);
        }
        let top = match request.top_logprobs {
            0 => Vec::new(),
            k => sampling::top_logprobs(logits, k),
        };
        self.last = id;
        self.sampled += 1;
        let told = send(
            request,
            Event::Token(Token {
                id,
                logprob,
                kept: drawn.kept,
                routing,
                top,
            }),
        );
        let finish = if request.version.stop_ids.contains(&id) || request.stop_ids.contains(&id) {
            Some(Finish::Stop(id))
        } else if self.sampled >= request.max_tokens {
            Some(Finish::Length)
        } else {
            None
        };
        match finish {
            Some(finish) => {
                send(request, Event::Finished(finish));
                false
            }
            None => told,
        }
    }
}

fn fail(request: &Request, error: &anyhow::Error) {
    tracing::error!(
        version = request.version.serial,
        error = format!("{error:#}"),
        "sequence failed"
    );
    send(request, Event::Failed(format!("{error:#}")));
}

/// False when the caller went away; the channel has room for everything a sequence can say.
fn send(request: &Request, event: Event) -> bool {
    request.events.try_send(event).is_ok()
}
