//! What users wrote instead of an answer, the feedback `demonstration`, as samples: to learn from, or to
//! measure a version by.
//!
//! The prompt is the logged one. The text becomes ids by the tokenizer of the version that is trained or
//! measured, and ends with its first id that ends a generation. Texts are users': they are never logged, and one
//! that a tokenizer would read a special token in is refused.

use super::Failed;
use super::pages::{Read, SIZED_AT_ONCE, generations_of};
use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use runs::dataset::store::CLOSED_FOR;
use runs::dataset::{Dataset, Member};
use runs::sample::{ModelLimits, Sample};
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use text::tokenizer::Tokenizer;
use time::OffsetDateTime;
use uuid::Uuid;

/// Why a generation has no such sample, as a step notes it.
const NONE: &str = "no_demonstration";
const SPECIAL: &str = "special_token_in_demonstration";
const TOO_LONG: &str = "longer_than_context";
const OUTSIDE: &str = "token_outside_vocabulary";

/// Reads demonstrations that were stored before the dataset was made, by the margin that its trajectories
/// have. So the same dataset gives the same ones, except those that were taken back meanwhile.
pub(super) struct Demonstrations {
    pool: PgPool,
    stored_before: OffsetDateTime,
    encoder: Encoder,
}

impl Demonstrations {
    /// For the version of this checkpoint, which demands `limits`.
    pub(super) fn new(
        pool: &PgPool,
        checkpoint: &Checkpoint,
        limits: &ModelLimits,
        dataset: &Dataset,
    ) -> Result<Self, Failed> {
        let tokenizer = Tokenizer::from_checkpoint(checkpoint)
            .map_err(|error| Failed(format!("demonstrations need the tokenizer of the version: {error}")))?;
        Ok(Demonstrations {
            pool: pool.clone(),
            stored_before: dataset.created_at - CLOSED_FOR,
            encoder: Encoder::new(tokenizer, limits)?,
        })
    }

    /// Those of the trajectories that have a demonstration about one of their generations.
    pub(super) async fn with_any(&self, members: &[Member]) -> anyhow::Result<Vec<Member>> {
        let mut found = BTreeSet::new();
        for slice in generations_of(members).chunks(SIZED_AT_ONCE) {
            found.extend(self.read(slice, false).await?.into_keys());
        }
        let has = |member: &&Member| member.generations.iter().any(|id| found.contains(id));
        Ok(members.iter().filter(has).cloned().collect())
    }

    /// A page of samples with what users wrote instead of what was sampled. Generations without it are
    /// refused.
    pub(super) async fn instead(&self, page: Read) -> anyhow::Result<Read> {
        let ids: Vec<Uuid> = page.samples.iter().map(|sample| sample.generation).collect();
        let texts = self.read(&ids, true).await?;
        let mut read = Read {
            samples: Vec::with_capacity(page.samples.len()),
            ..page
        };
        for sample in page.samples {
            let id = sample.generation;
            match self.encoder.instead(sample, texts.get(&id).map(String::as_str)) {
                Ok(sample) => read.samples.push(sample),
                Err(code) => read.refused.entry(code.to_owned()).or_default().push(id),
            }
        }
        Ok(read)
    }

    /// By generation. Empty texts if they are not asked for.
    async fn read(&self, ids: &[Uuid], with_texts: bool) -> anyhow::Result<BTreeMap<Uuid, String>> {
        let rows = sqlx::query!(
            r#"select id as "id!", demonstration from demonstrations($1, $2, $3)"#,
            ids,
            self.stored_before,
            with_texts
        )
        .fetch_all(&self.pool)
        .await
        .context("read demonstrations")?;
        let rows = rows.into_iter();
        Ok(rows
            .map(|row| (row.id, row.demonstration.unwrap_or_default()))
            .collect())
    }
}

/// Makes texts the ends of samples.
struct Encoder {
    tokenizer: Tokenizer,
    /// Ends a text.
    end: u32,
    /// Longest sequence, tokens.
    context: usize,
    /// Token ids are below this.
    vocabulary: i64,
}

impl Encoder {
    fn new(tokenizer: Tokenizer, limits: &ModelLimits) -> Result<Self, Failed> {
        let mut stops = tokenizer.stop_ids().iter().copied();
        let end = stops.find(|id| Some(*id) != tokenizer.decline_id()).ok_or_else(|| {
            let why = "demonstrations need an id that ends a generation: the version's generation_config.json has no \
                       eos_token_id";
            Failed(why.to_owned())
        })?;
        Ok(Encoder {
            tokenizer,
            end,
            context: usize::try_from(limits.context).unwrap_or(usize::MAX),
            vocabulary: limits.vocabulary,
        })
    }

    /// The sample with this text as its tokens, all of them trained on. Else the code of the reason.
    fn instead(&self, sample: Sample, text: Option<&str>) -> Result<Sample, &'static str> {
        let text = text.ok_or(NONE)?;
        let mut tokens = self.tokenizer.encode(text).map_err(|_| SPECIAL)?;
        if !tokens.iter().all(|&id| self.tokenizer.is_text(id)) {
            return Err(SPECIAL);
        }
        tokens.push(self.end);
        if tokens.iter().any(|&id| i64::from(id) >= self.vocabulary) {
            return Err(OUTSIDE);
        }
        if sample.prompt.len() + tokens.len() > self.context {
            return Err(TOO_LONG);
        }
        Ok(Sample {
            logprobs: vec![0.0; tokens.len()], // nobody sampled it
            mask: vec![true; tokens.len()],
            tokens,
            ..sample
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const END: u32 = 3;
    const DECLINE: u32 = 4;

    /// A tokenizer of the words `a` (0), `b` (1) and what it does not know (2).
    fn tokenizer(eos: &serde_json::Value) -> Tokenizer {
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
        Tokenizer::from_checkpoint(&checkpoint).unwrap()
    }

    fn limits(context: i64, vocabulary: i64) -> ModelLimits {
        ModelLimits {
            context,
            vocabulary,
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
        let encoder = Encoder::new(tokenizer(&json!([DECLINE, END])), &limits(5, 5)).unwrap();
        let sample = encoder.instead(sampled(), Some("a b")).unwrap();
        assert_eq!((sample.prompt, sample.tokens), (vec![1, 1], vec![0, 1, END]));
        assert_eq!((sample.mask, sample.logprobs), (vec![true; 3], vec![0.0; 3]));
        let empty = encoder.instead(sampled(), Some("")).unwrap();
        assert_eq!(empty.tokens, [END], "nothing should have been written");
    }

    #[test]
    fn what_cannot_be_learned_has_a_code() {
        let encoder = Encoder::new(tokenizer(&json!(END)), &limits(4, 5)).unwrap();
        let code = |text| encoder.instead(sampled(), text).unwrap_err();
        assert_eq!(code(None), "no_demonstration");
        assert_eq!(code(Some("a <decline>")), "special_token_in_demonstration");
        assert_eq!(code(Some("a b")), "longer_than_context");
        let small = Encoder::new(tokenizer(&json!(END)), &limits(4, 3)).unwrap();
        assert_eq!(
            small.instead(sampled(), Some("a")).unwrap_err(),
            "token_outside_vocabulary"
        );
    }

    #[test]
    fn a_model_that_ends_nothing_cannot_learn_texts() {
        let error = Encoder::new(tokenizer(&json!(DECLINE)), &limits(4, 5)).err().unwrap();
        assert!(error.to_string().contains("eos_token_id"), "{error}");
    }
}
