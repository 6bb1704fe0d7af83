//! The sequences of one loaded version. Each pass reads one token of every sequence that decodes,
//! and parts of prompts up to a limit, so that a long prompt delays nobody for long.
//!
//! A slot keeps its tokens after its sequence has ended. A later sequence of the same tenant that
//! begins with them does not read them again, and neither does one that begins like a sequence that
//! runs. This does not change results: a token's logits depend on the version and the tokens before
//! it only.
//!
//! If all slots are taken, or fewer are lent, a background sequence loses its slot between two passes:
//! the one that has sampled the fewest tokens. It is parked with its tokens and the state of its
//! sampler, and continues with the same bits once a slot is free. Its keys and values stay in the
//! slot until somebody else needs it; what is overwritten is read again.

mod sequence;

use super::backend::{Backend, Step};
use super::caller::Caller;
use super::load;
use super::{LoadedVersion, SampleRequest, TrafficClass};
use sequence::Sequence;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A shorter common prefix is read again rather than copied.
const REUSED_TOKENS_MIN: usize = 16;

/// One version, and the sequences in its slots.
pub struct Batch {
    pub version: Arc<LoadedVersion>,
    backend: Box<dyn Backend>,
    slots: Vec<Slot>,
    /// Background sequences that lost their slots, the first to continue first, and since when.
    paused: VecDeque<(Instant, Sequence)>,
    /// Counts admissions.
    admissions: u64,
}

/// A place in the backend.
#[derive(Default)]
struct Slot {
    /// What the backend holds.
    read: Vec<u32>,
    /// Of the last sequence. Nobody else may learn from delays what was read.
    tenant: Arc<str>,
    sequence: Option<Sequence>,
    /// The value of `admissions` when its last sequence was admitted.
    admitted: u64,
}

impl Slot {
    /// How many tokens of `ids` the slot holds at its beginning, but not all of `ids`: the logits
    /// after the last one are needed.
    fn common_prefix(&self, tenant: &str, ids: &[u32]) -> usize {
        if *self.tenant != *tenant {
            return 0;
        }
        common(&self.read, ids).min(ids.len() - 1)
    }
}

/// The part of a slot's sequence that the next pass reads.
struct Part {
    slot: usize,
    tokens: Vec<u32>,
}

impl Batch {
    pub fn new(version: Arc<LoadedVersion>, backend: Box<dyn Backend>) -> Self {
        Batch {
            version,
            slots: std::iter::repeat_with(Slot::default).take(backend.slots()).collect(),
            backend,
            paused: VecDeque::new(),
            admissions: 0,
        }
    }

    /// How many sequences have not ended.
    pub fn sequences(&self) -> usize {
        self.running().count() + self.paused.len()
    }

    /// How many sequences of a class have slots.
    pub fn in_slots(&self, class: TrafficClass) -> usize {
        let running = self.running();
        running.filter(|sequence| sequence.request.class == class).count()
    }

    /// How many background sequences wait to continue.
    pub fn parked(&self) -> usize {
        self.paused.len()
    }

    /// How many tokens the background sequence that [`Batch::park_one`] would park has sampled.
    pub fn least_progress(&self) -> Option<usize> {
        self.running()
            .filter(|sequence| sequence.is_background())
            .map(Sequence::sampled)
            .min()
    }

    /// Whose sequences run, one for each slot in use.
    pub fn callers(&self) -> impl Iterator<Item = &Caller> {
        self.running().map(|sequence| &sequence.request.caller)
    }

    /// How many sequences of a class could start now. `reserved`: slots that background sequences
    /// leave free.
    pub fn room(&self, class: TrafficClass, reserved: usize) -> usize {
        let free = self.slots.len() - self.running().count();
        match class {
            TrafficClass::Production => free + self.running().filter(|sequence| sequence.is_background()).count(),
            // those that pause come first
            TrafficClass::Background => free.saturating_sub(reserved + self.paused.len()),
        }
    }

    /// How many running sequences of a class, or of one that goes before it, are constrained.
    pub fn constrained(&self, class: TrafficClass) -> usize {
        let running = self.running().map(|sequence| &sequence.request);
        running
            .filter(|request| request.constraint.is_some() && request.class <= class)
            .count()
    }

    /// The backend, if nobody else holds the version. Afterwards no `Weak` of the version can be
    /// upgraded.
    pub fn into_backend(self) -> Result<Box<dyn Backend>, Self> {
        match Arc::try_unwrap(self.version) {
            Ok(_) => Ok(self.backend),
            Err(version) => Err(Batch { version, ..self }),
        }
    }

    /// Starts a sequence. [`Batch::room`] must have said that there is room for it.
    pub fn admit(&mut self, request: SampleRequest) {
        if self.free_slot(&request.caller, &request.prompt).is_none() {
            self.park_one();
        }
        self.place(Sequence::new(request));
    }

    /// Continues at most `most` parked sequences, but leaves `reserved` slots free. Returns how many.
    pub fn resume(&mut self, reserved: usize, most: usize) -> usize {
        self.paused.retain(|(_, sequence)| !sequence.is_canceled());
        let free = self.slots.len() - self.running().count();
        let count = free.saturating_sub(reserved).min(most).min(self.paused.len());
        let continued: Vec<_> = self.paused.drain(..count).collect();
        for (_, sequence) in continued {
            self.place(sequence);
        }
        count
    }

    /// Takes the sequences that have been parked for longer.
    pub fn remove_parked(&mut self, longest: Duration) -> Vec<Sequence> {
        let (gone, kept) = self.paused.drain(..).partition(|(since, _)| since.elapsed() > longest);
        self.paused = kept;
        let gone: VecDeque<_> = gone;
        gone.into_iter().map(|(_, sequence)| sequence).collect()
    }

    /// One pass: reads at most `prompt_tokens` tokens of prompts, and samples a token for every
    /// sequence that has none left to read. Says what it did for each sequence.
    pub fn advance(&mut self, prompt_tokens: usize) -> Vec<load::Part> {
        for slot in &mut self.slots {
            if slot.sequence.as_ref().is_some_and(Sequence::is_canceled) {
                slot.sequence = None;
            }
        }
        let parts = self.plan(prompt_tokens);
        if parts.is_empty() {
            return Vec::new();
        }
        let began = Instant::now();
        let mut done: Vec<load::Part> = parts
            .iter()
            .filter_map(|part| self.slots[part.slot].describe(part))
            .collect();
        let segments: Vec<(usize, &[u32])> = parts.iter().map(|part| (part.slot, &part.tokens[..])).collect();
        match self.backend.advance(&segments) {
            Ok(steps) => {
                for (part, step) in parts.iter().zip(steps) {
                    self.slots[part.slot].finish(part, step);
                }
            }
            // one of them is at fault
            Err(_) => {
                for part in &parts {
                    let step = self.backend.advance(&[(part.slot, &part.tokens)]);
                    let step =
                        step.and_then(|mut steps| steps.pop().ok_or_else(|| anyhow::anyhow!("no step came back")));
                    match step {
                        Ok(step) => self.slots[part.slot].finish(part, step),
                        Err(error) => {
                            if let Some(sequence) = self.slots[part.slot].sequence.take() {
                                sequence.fail(&error);
                            }
                        }
                    }
                }
            }
        }
        // measured before the pass
        let took = began.elapsed();
        for part in &mut done {
            part.first_token = part.first_token.map(|waited| waited + took);
        }
        done
    }

    fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().filter_map(|slot| slot.sequence.as_ref())
    }

    /// The free slot that holds most of `ids`, or else the one that was used longest ago.
    fn free_slot(&self, caller: &Caller, ids: &[u32]) -> Option<usize> {
        let free = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.sequence.is_none());
        let rank = |slot: &Slot| (self.reusable(slot, caller, ids), std::cmp::Reverse(slot.admitted));
        free.max_by_key(|(_, slot)| rank(slot)).map(|(at, _)| at)
    }

    /// How many tokens need not be read because a slot holds them.
    fn reusable(&self, slot: &Slot, caller: &Caller, ids: &[u32]) -> usize {
        // the experts that read a prompt are logged, and nobody has kept those of a slot
        if self.version.experts.is_some() {
            return 0;
        }
        match slot.common_prefix(caller.tenant(), ids) {
            tokens if tokens < REUSED_TOKENS_MIN => 0,
            tokens => tokens,
        }
    }

    fn place(&mut self, sequence: Sequence) {
        let Some(at) = self.free_slot(&sequence.request.caller, &sequence.ids) else {
            // `room` was not asked; it continues like one that was parked
            self.paused.push_back((Instant::now(), sequence));
            return;
        };
        // nobody has kept the logits of what a slot holds
        let reused = match sequence.scores_prompt() {
            true => 0,
            false => self.reusable(&self.slots[at], &sequence.request.caller, &sequence.ids),
        };
        self.take_prefix(at, at, reused);
        self.admissions += 1;
        let slot = &mut self.slots[at];
        slot.tenant = sequence.request.caller.tenant().clone();
        slot.admitted = self.admissions;
        slot.sequence = Some(sequence);
    }

    /// Parks the background sequence that has sampled least; of several, the one that was admitted last.
    pub fn park_one(&mut self) {
        let background = self.slots.iter_mut().filter_map(|slot| {
            let sequence = slot.sequence.as_ref().filter(|sequence| sequence.is_background())?;
            Some(((sequence.sampled(), std::cmp::Reverse(slot.admitted)), slot))
        });
        let least = background.min_by_key(|(progress, _)| *progress);
        if let Some(sequence) = least.and_then(|(_, slot)| slot.sequence.take()) {
            metrics::counter!("springtide_choices_paused_total").increment(1);
            self.paused.push_front((Instant::now(), sequence));
        }
    }

    /// What the next pass reads. Prompts of production come first, then the earlier admitted.
    fn plan(&mut self, prompt_tokens: usize) -> Vec<Part> {
        let mut order: Vec<usize> = (0..self.slots.len())
            .filter(|&at| self.slots[at].sequence.is_some())
            .collect();
        order.sort_by_key(|&at| {
            let slot = &self.slots[at];
            let background = slot.sequence.as_ref().is_some_and(Sequence::is_background);
            (background, slot.admitted)
        });
        let mut left = prompt_tokens;
        let mut parts = Vec::with_capacity(order.len());
        for (place, &at) in order.iter().enumerate() {
            if self.unread(at) > 1 {
                if left == 0 || !self.scores_prompt(at) && self.waits_for(at, &order[..place]) {
                    continue;
                }
                if !self.scores_prompt(at) {
                    self.reuse(at);
                }
            }
            let slot = &self.slots[at];
            let Some(sequence) = &slot.sequence else { continue };
            let unread = &sequence.ids[slot.read.len()..];
            let tokens = match unread.len() {
                1 => unread,
                _ if sequence.scores_prompt() => &unread[..1],
                more => &unread[..more.min(left)],
            };
            if tokens.len() > 1 {
                left -= tokens.len();
            }
            parts.push(Part {
                slot: at,
                tokens: tokens.to_vec(),
            });
        }
        parts
    }

    fn scores_prompt(&self, at: usize) -> bool {
        let sequence = self.slots[at].sequence.as_ref();
        sequence.is_some_and(Sequence::scores_prompt)
    }

    fn unread(&self, at: usize) -> usize {
        let slot = &self.slots[at];
        slot.sequence
            .as_ref()
            .map_or(0, |sequence| sequence.ids.len() - slot.read.len())
    }

    /// Whether a sequence that comes before reads tokens which this one, too, begins with.
    fn waits_for(&self, at: usize, before: &[usize]) -> bool {
        let slot = &self.slots[at];
        let Some(sequence) = slot.sequence.as_ref().filter(|_| self.version.experts.is_none()) else {
            return false;
        };
        before.iter().any(|&other| {
            let other = &self.slots[other];
            let Some(earlier) = &other.sequence else { return false };
            let all = match *other.tenant == *slot.tenant {
                true => common(&earlier.ids, &sequence.ids).min(sequence.ids.len() - 1),
                false => 0,
            };
            // what it has read can be copied now
            all >= slot.read.len().max(other.read.len()) + REUSED_TOKENS_MIN
        })
    }

    /// Copies from another slot what this one would have to read.
    fn reuse(&mut self, at: usize) {
        let slot = &self.slots[at];
        let Some(sequence) = &slot.sequence else { return };
        let of = |other: &Slot| self.reusable(other, &sequence.request.caller, &sequence.ids);
        let best = self
            .slots
            .iter()
            .enumerate()
            .map(|(from, other)| (of(other), from))
            .max();
        if let Some((tokens, from)) = best
            && from != at
            && tokens >= slot.read.len() + REUSED_TOKENS_MIN
        {
            self.take_prefix(from, at, tokens);
        }
    }

    fn take_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        self.backend.copy_prefix(from, to, tokens);
        let prefix = self.slots[from].read[..tokens].to_vec();
        self.slots[to].read = prefix;
        metrics::counter!("springtide_prompt_tokens_reused_total").increment(tokens as u64);
    }
}

impl Slot {
    /// What a pass that reads `part` does for the slot's sequence.
    fn describe(&self, part: &Part) -> Option<load::Part> {
        let sequence = self.sequence.as_ref()?;
        let end = self.read.len() + part.tokens.len();
        let samples = end == sequence.ids.len();
        Some(load::Part {
            work: sequence.request.caller.work(),
            background: sequence.is_background(),
            read: part.tokens.len(),
            read_again: sequence.again(self.read.len(), end),
            samples,
            first_token: (samples && sequence.sampled() == 0).then(|| sequence.request.submitted.elapsed()),
        })
    }

    /// After a pass has read a part.
    fn finish(&mut self, part: &Part, step: Step) {
        let before = self.read.len();
        self.read.extend(&part.tokens);
        if let Some(sequence) = &mut self.sequence
            && !sequence.after(before, self.read.len(), step)
        {
            self.sequence = None;
        }
    }
}

/// The length of the common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
