//! What users typed instead of an answer, the feedback `demonstration`, as the tokens of samples.
//!
//! The prompt is the logged one. The text becomes ids by the tokenizer of the version that is trained or
//! measured, and ends with its first id that ends a generation. Texts are users': they are never logged, and one
//! that a tokenizer would read a special token in is refused.

use anyhow::Context;
use runs::grammar::Grammars;
use runs::publish::run_state::Typed;
use runs::sample::{ModelLimits, Sample};
use sqlx::PgPool;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Why a generation has no such sample, as a step notes it.
const NONE: &str = "no_demonstration";
const SPECIAL: &str = "special_token_in_demonstration";
const TOO_LONG: &str = "longer_than_context";
const OUTSIDE: &str = "token_outside_vocabulary";
/// Of a longer text that is typed the realtime run learns its beginning, which is right by itself. So a few long ones do not
/// outweigh a cohort.
const TYPED_TOKENS_MAX: usize = 128;

/// Makes texts the ends of samples.
pub(crate) struct Encoder {
    grammars: Grammars,
    /// Ends a text.
    end: u32,
    /// Longest sequence, tokens.
    context: usize,
    /// Token ids are below this.
    vocabulary: i64,
}

impl Encoder {
    /// Fails with the reason for people.
    pub fn new(limits: &ModelLimits) -> Result<Self, String> {
        let tokenizer = limits.grammars.tokenizer();
        let tokenizer = tokenizer.ok_or_else(|| "demonstrations need the tokenizer of the version".to_owned())?;
        let mut stops = tokenizer.stop_ids().iter().copied();
        let end = stops.find(|id| Some(*id) != tokenizer.decline_id()).ok_or_else(|| {
            let why = "demonstrations need an id that ends a generation: the version's generation_config.json has no \
                       eos_token_id";
            why.to_owned()
        })?;
        Ok(Encoder {
            grammars: limits.grammars.clone(),
            end,
            context: usize::try_from(limits.context).unwrap_or(usize::MAX),
            vocabulary: limits.vocabulary,
        })
    }

    /// The sample with this text as its tokens. Else the code of the reason.
    pub fn instead(&self, sample: Sample, text: Option<&str>) -> Result<Sample, &'static str> {
        let tokens = self.tokens(&sample, text, usize::MAX)?;
        Ok(sample.instead(tokens, Uuid::nil()))
    }

    /// At most the first `most` of them.
    fn tokens(&self, sample: &Sample, text: Option<&str>, most: usize) -> Result<Vec<u32>, &'static str> {
        let text = text.ok_or(NONE)?;
        let tokenizer = self.grammars.tokenizer().ok_or(NONE)?;
        let mut tokens = tokenizer.encode(text).map_err(|_| SPECIAL)?;
        if !tokens.iter().all(|&id| tokenizer.is_text(id)) {
            return Err(SPECIAL);
        }
        tokens.push(self.end);
        tokens.truncate(most);
        if tokens.iter().any(|&id| i64::from(id) >= self.vocabulary) {
            return Err(OUTSIDE);
        }
        if sample.prompt.len() + tokens.len() > self.context {
            return Err(TOO_LONG);
        }
        Ok(tokens)
    }
}

/// For the realtime run: what users typed takes the place of what was sampled in these trajectories, until it has `places`
/// of the cohort, `taken` among them. Only of keys that may teach, which take turns, and not in sessions, whose later
/// turns continue what was sampled. Texts that cannot be learned leave the sample as it is.
pub(crate) async fn take_places(
    pool: &PgPool,
    limits: &ModelLimits,
    trajectories: &mut [Vec<Sample>],
    taken: &BTreeMap<Uuid, Typed>,
    places: usize,
) -> anyhow::Result<()> {
    // one without trained tokens was logged with `train` "false"
    let single =
        |samples: &&mut Vec<Sample>| samples.len() == 1 && samples[0].turn.is_none() && samples[0].trained_tokens() > 0;
    let singles: Vec<&mut Sample> = trajectories
        .iter_mut()
        .filter(single)
        .map(|samples| &mut samples[0])
        .collect();
    let room = places.saturating_sub(taken.len());
    if room == 0 || singles.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = singles.iter().map(|sample| sample.generation).collect();
    let rows = sqlx::query!(
        r#"select id as "id!", demonstration as "demonstration!", teacher as "teacher!" from taught($1)"#,
        &ids
    );
    let rows = rows.fetch_all(pool).await.context("read what users typed")?;
    let rows = rows.into_iter().map(|row| (row.id, (row.demonstration, row.teacher)));
    let texts: BTreeMap<Uuid, (String, Uuid)> = rows.collect();
    if texts.is_empty() {
        return Ok(());
    }
    let encoder = Encoder::new(limits).map_err(anyhow::Error::msg)?;
    let mut of_keys: BTreeMap<Uuid, usize> = BTreeMap::new();
    for typed in taken.values() {
        *of_keys.entry(typed.key).or_default() += 1;
    }
    let mut turns = Vec::new();
    for sample in singles {
        if let Some((text, key)) = texts.get(&sample.generation)
            && let Ok(tokens) = encoder.tokens(sample, Some(text), TYPED_TOKENS_MAX)
        {
            let turn = of_keys.entry(*key).or_default();
            turns.push((*turn, sample, tokens, *key));
            *turn += 1;
        }
    }
    turns.sort_by_key(|(turn, ..)| *turn); // stable: the oldest first
    for (_, sample, tokens, key) in turns.into_iter().take(room) {
        *sample = Sample::clone(sample).instead(tokens, key);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::checkpoint::Checkpoint;
    use serde_json::json;

    const END: u32 = 3;
    const DECLINE: u32 = 4;

    /// A tokenizer of the words `a` (0), `b` (1) and what it does not know (2).
    fn tokenizer(eos: &serde_json::Value) -> Grammars {
        let special = |(content, id): (&str, u32)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        };
        let added = [("<end>", END), ("<decline>", DECLINE)].map(special);
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "decoder": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "added_tokens": added,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
        });
        let generation = json!({"eos_token_id": eos, "springtide_decline_token_id": DECLINE});
        let mut checkpoint = Checkpoint::default();
        for (name, json) in [
            ("tokenizer.json", tokenizer),
            ("generation_config.json", generation),
            ("config.json", json!({})),
        ] {
            checkpoint.files.insert(name.into(), json.to_string().into());
        }
        Grammars::of(&checkpoint, 5)
    }

    fn limits(context: i64, vocabulary: i64, eos: &serde_json::Value) -> ModelLimits {
        ModelLimits {
            context,
            vocabulary,
            grammars: tokenizer(eos),
            ..ModelLimits::default()
        }
    }

    fn sampled() -> Sample {
        Sample {
            prompt: vec![1, 1],
            tokens: vec![0, 0, 0],
            mask: vec![true, false, true],
            logprobs: vec![-1.0; 3],
            ..Sample::example()
        }
    }

    #[test]
    fn what_the_user_wrote_takes_the_place_of_what_was_sampled() {
        let encoder = Encoder::new(&limits(5, 5, &json!([DECLINE, END]))).unwrap();
        let sample = encoder.instead(sampled(), Some("a b")).unwrap();
        assert_eq!((sample.prompt, sample.tokens), (vec![1, 1], vec![0, 1, END]));
        assert_eq!((sample.mask, sample.logprobs), (vec![true; 3], vec![0.0; 3]));
        let empty = encoder.instead(sampled(), Some("")).unwrap();
        assert_eq!(empty.tokens, [END], "nothing should have been written");
        let long = encoder.tokens(&sampled(), Some("a b a b a b"), 3);
        assert_eq!(long, Ok(vec![0, 1, 0]), "what fits of a text that does not");
    }

    #[test]
    fn what_cannot_be_learned_has_a_code() {
        let encoder = Encoder::new(&limits(4, 5, &json!(END))).unwrap();
        let code = |text| encoder.instead(sampled(), text).unwrap_err();
        assert_eq!(code(None), "no_demonstration");
        assert_eq!(code(Some("a <decline>")), "special_token_in_demonstration");
        assert_eq!(code(Some("a b")), "longer_than_context");
        let small = Encoder::new(&limits(4, 3, &json!(END))).unwrap();
        assert_eq!(
            small.instead(sampled(), Some("a")).unwrap_err(),
            "token_outside_vocabulary"
        );
    }

    #[test]
    fn a_model_that_ends_nothing_cannot_learn_texts() {
        let error = Encoder::new(&limits(4, 5, &json!(DECLINE))).err().unwrap();
        assert!(error.to_string().contains("eos_token_id"), "{error}");
    }
}
