//! Micro-batches: samples become the arrays of a forward pass, sequence after sequence, without
//! padding.
//!
//! Turns of an episode that continue each other exactly are one sequence, with several trained spans.
//! So a long session costs about as much as its last context, and not the sum of all of them. What
//! the model computes at a position depends on the tokens before it alone, bit by bit, so nothing
//! else changes.
//!
//! Everything after the model works on the trained tokens alone, packed into one dimension; masked
//! tokens are left out. Denominators are those of the whole cohort, so cutting it into
//! micro-batches changes only the order of summation.

use crate::learn::mismatch::SampleMismatch;
use model::router::{Mismatch, Routing};
use runs::sample::{Behavior, Sample};
use std::collections::BTreeMap;
use std::sync::Arc;
use text::kept::Kept;

/// Sequences that go through the model together, and their trained tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MicroBatch {
    /// The input ids of each sequence: all but its last token.
    pub sequences: Vec<Vec<u32>>,
    /// Index of each sample, in the order of the trained tokens, and how many of them it has.
    pub samples: Vec<(usize, usize)>,
    /// How many of the trained tokens of each sample its user kept, and of which ones one is wrong.
    pub kept: Vec<Option<Kept>>,
    /// Row, counted through all sequences, whose logits predict the trained token.
    pub positions: Vec<usize>,
    /// The trained token itself.
    pub targets: Vec<i64>,
    /// Logged log μ of the trained token, nats.
    pub behavior: Vec<f32>,
    /// Advantage of its generation, times the generation's weight.
    pub advantage: Vec<f32>,
    pub temperature: Vec<f32>,
    /// Indices of the trained tokens that were sampled with the decline token masked, ascending.
    pub suppressed: Vec<i64>,
    /// The logged experts to replay, of all sequences or of none.
    pub routing: Option<Routing>,
    /// Trained tokens that were not sampled from the model's own distribution, ascending.
    pub reshaped: Vec<ReshapedToken>,
    /// Users typed the tokens.
    pub typed: bool,
    /// Older versions than the head sampled some tokens of each sequence.
    pub stale: bool,
    /// The engine that sampled all of them; `None`: ours.
    pub engine: Option<String>,
}

/// A trained token with a [`Behavior`], and where to find it.
#[derive(Debug, Clone, PartialEq)]
pub struct ReshapedToken {
    /// Index among the trained tokens of the micro-batch.
    pub index: usize,
    /// Index among the sequences of the micro-batch.
    pub sequence: usize,
    pub prompt_len: usize,
    /// Index among the sampled tokens of its sequence.
    pub position: usize,
    pub behavior: Arc<Behavior>,
}

impl MicroBatch {
    /// Whether any token has a gradient. NaN counts, so that a guard finds it.
    pub fn has_gradient(&self) -> bool {
        self.advantage.iter().any(|&a| a != 0.0)
    }

    /// How far the logged log-probabilities of each sample's trained tokens are from `recomputed`, by
    /// the sample's index.
    pub fn mismatches(&self, recomputed: &[f32]) -> Vec<(usize, SampleMismatch)> {
        let mut tokens = self.behavior.iter().copied().zip(recomputed.iter().copied());
        let of = |&(sample, count): &(usize, usize)| (sample, SampleMismatch::of(tokens.by_ref().take(count)));
        self.samples.iter().map(of).collect()
    }
}

/// Denominators of means over a cohort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// An episode is one, however many of its turns are trained on.
    pub trajectories: usize,
    /// Trained tokens.
    pub tokens: usize,
}

/// Cuts samples into micro-batches of at most `tokens_max` input tokens, longest first. A longer
/// sequence gets a micro-batch of its own. Turns that continue each other are one sequence, unless
/// they have more than `tokens_max` trained tokens together. Samples with and without gradient, with
/// and without logged experts, sampled and typed ones, of the head and of older versions, and of
/// different engines are never mixed. The result is a function of the arguments. Logged experts of different layers in one
/// micro-batch are an error.
pub fn pack(samples: &[Sample], advantages: &[f64], tokens_max: usize) -> Result<Vec<MicroBatch>, Mismatch> {
    let mut kinds: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (i, sample) in samples.iter().enumerate() {
        let traits = [
            sample.typed.is_some(),
            sample.staleness > 0,
            advantages[i] == 0.0,
            sample.experts.is_some(),
        ];
        kinds.entry((sample.engine.as_deref(), traits)).or_default().push(i);
    }
    let mut batches = Vec::new();
    for kind in kinds.into_values() {
        let mut order = merge(&kind, samples, tokens_max);
        order.sort_by_key(|merged| (std::cmp::Reverse(merged.input_len), merged.turns.first().copied()));
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = |merged: &&Merged| {
                tokens += merged.input_len;
                tokens <= tokens_max
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            batches.push(micro_batch(now, samples, advantages)?);
            rest = later;
        }
    }
    Ok(batches)
}

/// Samples that go through the model as one sequence, the last one's.
#[derive(Debug)]
struct Merged {
    /// Indices of the samples. Each but the first continues the one before.
    turns: Vec<usize>,
    input_len: usize,
    trained_tokens: usize,
}

/// Joins samples that continue the one before. `trained_tokens_max`: of one sequence with several,
/// because the logits of all of them are in memory at once.
fn merge(order: &[usize], samples: &[Sample], trained_tokens_max: usize) -> Vec<Merged> {
    let mut merged: Vec<Merged> = Vec::new();
    for &i in order {
        let (input_len, trained_tokens) = (samples[i].input_len(), samples[i].trained_tokens());
        let before = merged.last_mut().filter(|before| {
            let last = before.turns.last().map(|&last| &samples[last]);
            before.trained_tokens + trained_tokens <= trained_tokens_max
                && last.is_some_and(|last| continues(&samples[i], last))
        });
        match before {
            Some(before) => {
                before.turns.push(i);
                before.input_len = input_len;
                before.trained_tokens += trained_tokens;
            }
            None => merged.push(Merged {
                turns: vec![i],
                input_len,
                trained_tokens,
            }),
        }
    }
    merged
}

/// Whether a turn's prompt begins with all that the model read and sampled at an earlier turn.
/// Logged experts are those of one pass, so turns with them stay apart.
fn continues(turn: &Sample, earlier: &Sample) -> bool {
    let (prompt, sampled) = (&earlier.prompt, &earlier.tokens);
    turn.turn.is_some()
        && turn.trajectory() == earlier.trajectory()
        && turn.experts.is_none()
        && turn.prompt.get(..prompt.len()) == Some(prompt)
        && turn.prompt[prompt.len()..].starts_with(sampled)
}

fn micro_batch(chosen: &[Merged], samples: &[Sample], advantages: &[f64]) -> Result<MicroBatch, Mismatch> {
    let mut batch = MicroBatch::default();
    let mut first_row = 0;
    for merged in chosen {
        for &i in &merged.turns {
            let sample = &samples[i];
            batch.typed = sample.typed.is_some();
            batch.stale = sample.staleness > 0;
            batch.engine.clone_from(&sample.engine);
            batch.samples.push((i, sample.trained_tokens()));
            batch.kept.push(sample.kept.map(|kept| trained(kept, &sample.mask)));
            if let Some(experts) = &sample.experts {
                batch.routing.get_or_insert_default().append(experts)?;
            }
            batch.add_tokens(sample, advantages[i], first_row);
        }
        let last = merged.turns.last().map(|&last| &samples[last]);
        let inputs = last.map(|last| last.prompt.iter().chain(&last.tokens).take(last.input_len()));
        batch.sequences.push(inputs.into_iter().flatten().copied().collect());
        first_row += merged.input_len;
    }
    Ok(batch)
}

/// Of the trained tokens alone.
fn trained(kept: Kept, mask: &[bool]) -> Kept {
    let count = |mask: &[bool]| mask.iter().filter(|&&trained| trained).count();
    let (right, rest) = mask.split_at(kept.right.min(mask.len()));
    Kept {
        right: count(right),
        wrong: count(&rest[..kept.wrong.min(rest.len())]),
    }
}

impl MicroBatch {
    /// Adds the trained tokens of a sample whose sequence begins at `first_row` and is the next.
    fn add_tokens(&mut self, sample: &Sample, advantage: f64, first_row: usize) {
        for (position, &token) in sample.tokens.iter().enumerate().filter(|&(j, _)| sample.mask[j]) {
            if sample.suppressed {
                self.suppressed.push(self.targets.len() as i64);
            }
            if let Some(behavior) = &sample.behavior {
                self.reshaped.push(ReshapedToken {
                    index: self.targets.len(),
                    sequence: self.sequences.len(),
                    prompt_len: sample.prompt.len(),
                    position,
                    behavior: behavior.clone(),
                });
            }
            self.positions.push(first_row + sample.prompt.len() - 1 + position);
            self.targets.push(i64::from(token));
            self.behavior.push(sample.logprobs[position]);
            self.advantage.push((advantage * sample.weight) as f32);
            self.temperature.push(sample.temperature);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(prompt: &[u32], tokens: &[u32], mask: &[bool]) -> Sample {
        Sample {
            prompt: prompt.to_vec(),
            tokens: tokens.to_vec(),
            logprobs: tokens.iter().map(|&t| -(t as f32)).collect(),
            mask: mask.to_vec(),
            ..Sample::example()
        }
    }

    #[test]
    fn a_sampled_token_is_predicted_by_the_position_before_it() {
        let samples = [
            sample(&[5, 6, 7], &[8, 9], &[true, true]),
            sample(&[1], &[2, 3], &[true, false]),
        ];
        let batches = pack(&samples, &[0.5, -1.0], 100).unwrap();
        assert_eq!(batches.len(), 1);
        let b = &batches[0];
        assert_eq!(b.sequences, [vec![5, 6, 7, 8], vec![1, 2]]);
        assert_eq!(b.positions, [2, 3, 4]); // 7→8, 8→9, and in the second row 1→2
        assert_eq!(b.targets, [8, 9, 2]);
        assert_eq!(b.behavior, [-8.0, -9.0, -2.0]);
        assert_eq!(b.advantage, [0.5, 0.5, -1.0]);
        assert_eq!(samples.iter().map(Sample::trained_tokens).sum::<usize>(), 3);
    }

    #[test]
    fn what_was_kept_is_counted_in_trained_tokens() {
        let kept = |right, wrong| Some(Kept { right, wrong });
        let samples = [
            sample(&[1], &[2], &[true]),
            Sample {
                kept: kept(2, 1),
                ..sample(&[1, 4], &[5, 6, 7, 8], &[true, false, true, true])
            },
        ];
        let batch = &pack(&samples, &[1.0; 2], 100).unwrap()[0];
        assert_eq!(batch.samples, [(1, 3), (0, 1)]);
        assert_eq!(batch.kept, [kept(1, 1), None]);
    }

    #[test]
    fn mismatches_are_those_of_each_sample() {
        let samples = [
            sample(&[1], &[2, 3], &[true, true]),
            sample(&[1, 4, 5], &[6, 7], &[true, false]),
            sample(&[1], &[2], &[false]),
        ];
        let batch = &pack(&samples, &[1.0; 3], 100).unwrap()[0];
        assert_eq!(batch.behavior, [-6.0, -2.0, -3.0]); // the longest first
        let differences = |recomputed: &[f32]| -> Vec<(usize, f64)> {
            let mismatches = batch.mismatches(recomputed).into_iter();
            mismatches.map(|(sample, one)| (sample, one.difference_max)).collect()
        };
        assert_eq!(differences(&[-6.5, -2.0, -2.75]), [(1, 0.5), (0, 0.25), (2, 0.0)]);
        let broken = differences(&[f32::NAN, f32::NEG_INFINITY, -3.0]);
        assert!(broken[0].1.is_nan());
        assert_eq!(broken[1], (0, f64::INFINITY));
    }

    #[test]
    fn exploration_marks_its_tokens_and_weighs_the_advantage() {
        let mut samples = [
            sample(&[5, 6], &[7, 8], &[true, true]),
            sample(&[1], &[2, 3], &[false, true]),
        ];
        samples[1].suppressed = true;
        samples[0].weight = 1.25;
        let batch = &pack(&samples, &[0.5, -1.0], 100).unwrap()[0];
        assert_eq!(batch.targets, [7, 8, 3]);
        assert_eq!(batch.suppressed, [2]);
        assert_eq!(batch.advantage, [0.625, 0.625, -1.0]);
    }

    #[test]
    fn micro_batches_stay_under_their_budget_and_lose_nothing() {
        let samples: Vec<Sample> = (1..20).map(|n| sample(&vec![3; n], &[4, 5], &[true, true])).collect();
        let batches = pack(&samples, &vec![1.0; samples.len()], 40).unwrap();
        for b in &batches {
            assert!(b.sequences.len() == 1 || b.sequences.concat().len() <= 40);
        }
        assert_eq!(batches.iter().map(|b| b.sequences.len()).sum::<usize>(), samples.len());
        assert_eq!(
            batches.iter().map(|b| b.targets.len()).sum::<usize>(),
            2 * samples.len()
        );
    }

    #[test]
    fn samples_without_gradient_are_packed_apart() {
        let samples: Vec<Sample> = (1..5).map(|n| sample(&vec![3; n], &[4], &[true])).collect();
        let batches = pack(&samples, &[0.0, 0.5, f64::NAN, 0.0], 100).unwrap();
        let shape = |b: &MicroBatch| (b.sequences.iter().map(Vec::len).collect::<Vec<_>>(), b.has_gradient());
        let shapes: Vec<_> = batches.iter().map(shape).collect();
        assert_eq!(shapes, [(vec![3, 2], true), (vec![4, 1], false)]);
    }

    #[test]
    fn samples_of_older_versions_are_packed_apart() {
        let samples: Vec<Sample> = (0..4)
            .map(|n| Sample {
                staleness: n % 3,
                ..sample(&vec![3; n + 1], &[4], &[true])
            })
            .collect();
        let batches = pack(&samples, &[1.0; 4], 100).unwrap();
        let shape = |b: &MicroBatch| (b.samples.iter().map(|(i, _)| *i).collect::<Vec<_>>(), b.stale);
        let shapes: Vec<_> = batches.iter().map(shape).collect();
        assert_eq!(shapes, [(vec![3, 0], false), (vec![2, 1], true)]);
    }

    #[test]
    fn samples_of_other_engines_are_packed_apart() {
        let samples: Vec<Sample> = (0..4)
            .map(|n| Sample {
                engine: (n % 2 == 1).then(|| "vllm".into()),
                ..sample(&vec![3; n + 1], &[4], &[true])
            })
            .collect();
        let batches = pack(&samples, &[1.0; 4], 100).unwrap();
        let shape = |b: &MicroBatch| {
            (
                b.samples.iter().map(|(i, _)| *i).collect::<Vec<_>>(),
                b.engine.is_some(),
            )
        };
        let shapes: Vec<_> = batches.iter().map(shape).collect();
        assert_eq!(shapes, [(vec![2, 0], false), (vec![3, 1], true)]);
    }

    #[test]
    fn a_sequence_longer_than_the_budget_goes_alone() {
        let samples = [sample(&[1; 50], &[2], &[true]), sample(&[1], &[2], &[true])];
        let batches = pack(&samples, &[0.0, 0.0], 10).unwrap();
        assert_eq!(batches[0].sequences, [vec![1; 50]]);
        assert_eq!(batches.len(), 2);
    }

    /// Turns of one session, each with what the session has before it as its context.
    fn session(turns: &[(&[u32], &[u32])]) -> Vec<Sample> {
        let mut context = Vec::new();
        let rewards = vec![None; turns.len()];
        let turn = |(index, (prompt, tokens)): (usize, &(&[u32], &[u32]))| {
            context.extend_from_slice(prompt);
            let one = sample(&context, tokens, &vec![true; tokens.len()]);
            context.extend_from_slice(tokens);
            Sample {
                turn: Sample::example_of(1, index, &rewards).turn,
                ..one
            }
        };
        turns.iter().enumerate().map(turn).collect()
    }

    #[test]
    fn turns_that_continue_each_other_are_one_sequence() {
        let mut turns = session(&[(&[5, 6], &[7, 8]), (&[9], &[10]), (&[], &[11, 12])]);
        turns[1].mask = vec![false];
        let batch = &pack(&turns, &[0.5, 1.0, -1.0], 100).unwrap()[0];
        assert_eq!(batch.sequences, [[5, 6, 7, 8, 9, 10, 11]]);
        assert_eq!(batch.samples, [(0, 2), (1, 0), (2, 2)]);
        assert_eq!(batch.positions, [1, 2, 5, 6]);
        assert_eq!(batch.targets, [7, 8, 11, 12]);
        assert_eq!(batch.advantage, [0.5, 0.5, -1.0, -1.0]);
        // a turn between them that is not trained on changes nothing
        turns.remove(1);
        let batch = &pack(&turns, &[0.5, -1.0], 100).unwrap()[0];
        assert_eq!((batch.sequences.len(), batch.targets.len()), (1, 4));
    }

    #[test]
    fn other_turns_stay_apart() {
        let turns = session(&[(&[5, 6], &[7, 8]), (&[9], &[10])]);
        let sequences = |turns: &[Sample], tokens_max: usize| -> usize {
            let batches = pack(turns, &[1.0, 1.0], tokens_max).unwrap();
            batches.iter().map(|batch| batch.sequences.len()).sum()
        };
        assert_eq!(sequences(&turns, 100), 1);
        assert_eq!(sequences(&turns, 2), 2, "too many trained tokens for one sequence");
        let changed = |change: fn(&mut Sample)| {
            let mut turns = turns.clone();
            change(&mut turns[1]);
            sequences(&turns, 100)
        };
        assert_eq!(changed(|turn| turn.prompt[0] = 4), 2, "another context");
        assert_eq!(changed(|turn| turn.prompt[3] = 4), 2, "another answer in it");
        assert_eq!(changed(|turn| turn.prompt.truncate(3)), 2, "less than the answer in it");
        assert_eq!(changed(|turn| turn.staleness = 1), 2, "another version");
        assert_eq!(changed(|turn| turn.turn = None), 2, "another trajectory");
        assert_eq!(changed(|turn| turn.tenant = "b".into()), 2, "another tenant");
    }
}
