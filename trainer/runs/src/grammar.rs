//! Answers whose sampling a grammar constrained: which ids the engine allowed at each token.
//!
//! The generation has the schema, and the trainer has the version's tokenizer. So it follows the
//! sampled tokens as the engine did and gets the same ids, by the same code
//! ([`text::constraint`]). This happens once per sample, before it joins a cohort; unconstrained
//! samples cost nothing. Schemas are customers' text and are never logged.

use artifact::checkpoint::Checkpoint;
use bytes::Bytes;
use event_log::event::Constraint;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use text::constraint::FORMAT;
use text::kept::Kept;
use text::tokenizer::Tokenizer;

/// Memory of a sample's masks. A vocabulary of 150,000 ids has 3,500 different masks in it.
const MASK_BYTES_MAX: usize = 64 << 20;
const BITS: usize = u64::BITS as usize;

/// Why a constrained sample cannot be trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Its masks cannot be computed: it was sampled by other rules than ours, its schema cannot be
    /// compiled, or they need too much memory.
    NotFollowed,
    /// The grammar does not allow one of its tokens.
    Violated,
}

impl Refused {
    /// The code of its disposition.
    pub fn code(self) -> &'static str {
        match self {
            Refused::NotFollowed => "constraint_not_followed",
            Refused::Violated => "constraint_violated",
        }
    }
}

/// Follows constraints with the tokenizer of one version. Cheap to clone. The default has no
/// tokenizer and refuses all.
#[derive(Debug, Clone, Default)]
pub struct Grammars(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    /// The files that a tokenizer is read from, and nothing else.
    files: Checkpoint,
    /// Logits per token.
    vocabulary: usize,
    /// Read when the first sample needs it. `None`: it cannot be.
    tokenizer: OnceLock<Option<Tokenizer>>,
}

impl Grammars {
    /// `vocabulary`: the number of the model's logits.
    pub fn of(checkpoint: &Checkpoint, vocabulary: i64) -> Self {
        let read = ["tokenizer.json", "generation_config.json", "config.json"];
        // copies, because slices would keep the checkpoint's tensors in memory
        let files = checkpoint.files.iter();
        let files = files.filter(|(name, _)| read.contains(&name.as_str()));
        let files = files.map(|(name, bytes)| (name.clone(), Bytes::copy_from_slice(bytes)));
        Grammars(Some(Arc::new(Inner {
            files: Checkpoint {
                files: files.collect(),
                ..Checkpoint::default()
            },
            vocabulary: usize::try_from(vocabulary).unwrap_or(0),
            tokenizer: OnceLock::new(),
        })))
    }

    /// The version's tokenizer. `None`: it cannot be read.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        let inner = self.0.as_ref()?;
        let read = || {
            Tokenizer::from_checkpoint(&inner.files)
                .inspect_err(
                    |error| tracing::warn!(%error, "nothing can be learned from constraints, kept characters or demonstrations"),
                )
                .ok()
        };
        inner.tokenizer.get_or_init(read).as_ref()
    }

    /// What keeping the first `characters` of a text says of its `tokens`. `None`: nothing, as where a text that
    /// the request named ended it (`stopped`, but by no id): that was not shown.
    pub fn kept(&self, tokens: &[u32], stopped: bool, characters: i32, accepted: bool) -> Option<Kept> {
        let tokenizer = self.tokenizer()?;
        let ends = |id: &u32| tokenizer.stop_ids().contains(id) || tokenizer.decline_id() == Some(*id);
        if stopped && !tokens.iter().any(ends) {
            return None;
        }
        let characters = usize::try_from(characters).unwrap_or(0);
        Kept::of(tokenizer, tokens, characters, accepted).ok().flatten()
    }

    /// The masks of `tokens`, which are all that were sampled. Takes up to a second for the first
    /// sample, and then about as long as the engine took.
    pub fn masks(&self, constraint: &Constraint, tokens: &[u32]) -> Result<Masks, Refused> {
        let inner = self.0.as_ref().ok_or(Refused::NotFollowed)?;
        if constraint.format != FORMAT {
            return Err(Refused::NotFollowed);
        }
        let tokenizer = self.tokenizer().ok_or(Refused::NotFollowed)?;
        let schema: Value = serde_json::from_str(&constraint.schema).map_err(|_| Refused::NotFollowed)?;
        let mut matcher = tokenizer.constrain(&schema).map_err(|_| Refused::NotFollowed)?;
        let (ending, decline) = (tokenizer.ending_ids(), tokenizer.decline_id());
        let mut masks = Builder::new(inner.vocabulary, MASK_BYTES_MAX);
        let mut before = None;
        for &token in tokens {
            if let Some(before) = before.replace(token) {
                let ended = ending.contains(&before);
                let accepted = !ended && matcher.accept(before).is_ok();
                accepted.then_some(()).ok_or(Refused::Violated)?;
            }
            let mut logits = vec![0.0; inner.vocabulary];
            let masked = matcher.mask(&mut logits, &ending, decline);
            masked.map_err(|_| Refused::Violated)?;
            if !logits.get(token as usize).is_some_and(|logit| *logit == 0.0) {
                return Err(Refused::Violated);
            }
            masks.push(&logits).ok_or(Refused::NotFollowed)?;
        }
        Ok(masks.masks)
    }
}

/// Which ids could be sampled at each token. Equal sets are kept once: within a text of JSON most
/// tokens have the same one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Masks {
    words_per_set: usize,
    /// One bit per id, set after set.
    words: Vec<u64>,
    /// The set of each token.
    sets: Vec<usize>,
}

impl Masks {
    /// Sets the logits of ids that could not be sampled as token `position` to −∞.
    pub fn exclude(&self, position: usize, logits: &mut [f32]) {
        let Some(set) = self.sets.get(position) else { return };
        let words = self.words.chunks_exact(self.words_per_set).nth(*set);
        let words = words.unwrap_or_default();
        for (logits, word) in logits.chunks_mut(BITS).zip(words.iter().chain(std::iter::repeat(&0))) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

struct Builder {
    bytes_max: usize,
    masks: Masks,
    known: HashMap<Vec<u64>, usize>,
}

impl Builder {
    fn new(vocabulary: usize, bytes_max: usize) -> Self {
        Builder {
            bytes_max,
            masks: Masks {
                words_per_set: vocabulary.div_ceil(BITS).max(1),
                ..Masks::default()
            },
            known: HashMap::new(),
        }
    }

    /// `None`: the masks need too much memory.
    fn push(&mut self, logits: &[f32]) -> Option<()> {
        let of = |logits: &[f32]| {
            let bits = (0..).zip(logits).filter(|(_, logit)| logit.is_finite());
            bits.fold(0_u64, |word, (bit, _): (u32, _)| word | 1 << bit)
        };
        let words: Vec<u64> = logits.chunks(BITS).map(of).collect();
        let next = self.known.len();
        let set = match self.known.get(&words) {
            Some(set) => *set,
            None => {
                self.masks.words.extend(&words);
                self.known.insert(words, next);
                next
            }
        };
        self.masks.sets.push(set);
        (size_of_val(self.masks.words.as_slice()) <= self.bytes_max).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokenizer::{CHARACTERS, END, constraint, with_tokenizer};

    mod tokenizer;

    fn ids(text: &str) -> Vec<u32> {
        let id = |c| CHARACTERS.find(c).unwrap() as u32;
        text.chars().map(id).collect()
    }

    fn grammars() -> Grammars {
        Grammars::of(&with_tokenizer(Checkpoint::default()), 61)
    }

    #[test]
    fn every_token_has_the_ids_that_could_come() {
        let mut tokens = ids("[\"ab\"]");
        tokens.push(END);
        let schema = json!({"type": "array", "items": {"enum": ["ab", "ac"]}, "minItems": 1, "maxItems": 1});
        let masks = grammars().masks(&constraint(&schema), &tokens).unwrap();
        let allowed = |position| {
            let mut logits = vec![1.0; 61];
            masks.exclude(position, &mut logits);
            let ids = (0..61u32).filter(|id| logits[*id as usize] == 1.0);
            ids.collect::<Vec<_>>()
        };
        let expected = ["[", "\"", "a", "bc", "\"", "]"];
        for (position, expected) in expected.into_iter().enumerate() {
            assert_eq!(allowed(position), {
                let mut expected = ids(expected);
                expected.sort_unstable();
                expected
            });
        }
        assert_eq!(allowed(6), [END]);
        assert!(masks.sets.len() > masks.words.len(), "equal sets are kept once");
    }

    #[test]
    fn what_cannot_be_followed_or_was_not_allowed_is_refused() {
        let list = json!({"type": "array", "items": {"type": "boolean"}});
        let refused = |constraint: &Constraint, tokens: &[u32]| grammars().masks(constraint, tokens).unwrap_err();
        assert!(grammars().masks(&constraint(&list), &ids("[true,f")).is_ok(), "cut off");
        let ended_twice = [ids("[]"), vec![END, END]].concat();
        for tokens in [ids("[a"), ids("{"), vec![60], vec![7_000], ended_twice] {
            assert_eq!(refused(&constraint(&list), &tokens), Refused::Violated, "{tokens:?}");
        }
        let other = Constraint {
            format: "json_schema/1 llguidance/1.9.0".into(),
            ..constraint(&list)
        };
        let broken = Constraint {
            schema: "{".into(),
            ..constraint(&list)
        };
        for constraint in [other, broken, constraint(&json!({"type": "sandwich"}))] {
            assert_eq!(refused(&constraint, &ids("[")), Refused::NotFollowed);
        }
        let none = Grammars::default().masks(&constraint(&list), &ids("["));
        assert_eq!(none, Err(Refused::NotFollowed));
        let without_tokenizer = Grammars::of(&Checkpoint::default(), 61);
        assert_eq!(
            without_tokenizer.masks(&constraint(&list), &ids("[")),
            Err(Refused::NotFollowed)
        );
    }

    #[test]
    fn masks_that_need_too_much_memory_are_refused() {
        let mut masks = Builder::new(100, 2 * 2 * 8);
        let mut logits = vec![0.0; 100];
        for (different, expected) in [(0, true), (1, true), (1, true), (2, false)] {
            logits[different] = f32::NEG_INFINITY;
            assert_eq!(masks.push(&logits).is_some(), expected);
        }
    }

    #[test]
    fn a_set_has_the_ids_whose_logits_are_finite() {
        for vocabulary in [1, 63, 64, 65, 200] {
            let allowed = |id: usize| blake3::hash(&[vocabulary as u8, id as u8]).as_bytes()[0] & 1 == 0;
            let logit = |id| if allowed(id) { 0.5 } else { f32::NEG_INFINITY };
            let logits: Vec<f32> = (0..vocabulary).map(logit).collect();
            let mut builder = Builder::new(vocabulary, MASK_BYTES_MAX);
            builder.push(&vec![0.0; vocabulary]).unwrap();
            builder.push(&logits).unwrap();
            let mut masked = vec![0.5; vocabulary];
            builder.masks.exclude(0, &mut masked);
            assert_eq!(masked, vec![0.5; vocabulary]);
            builder.masks.exclude(1, &mut masked);
            assert_eq!(masked, logits);
        }
    }
}
