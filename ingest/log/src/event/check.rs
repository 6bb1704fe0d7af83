//! The rules that depend only on the event itself. They are checked before an event enters the log,
//! and again before it enters the tables.

use time::OffsetDateTime;

use super::{
    Body, Event, Feedback, FinishReason, Generation, PayloadRef, Retraction, Sampling, TOKEN_IDS, Target, Value,
    time_of,
};

/// Bytes of a name: tenant, source, id, policy, line, surface, metric, tag.
pub const NAME_BYTES_MAX: usize = 256;
/// Bytes of a code.
const CODE_BYTES_MAX: usize = 64;
/// Bytes of a comment or demonstration.
pub const TEXT_BYTES_MAX: usize = 64 * 1024;
pub const TAGS_MAX: usize = 32;
/// Prompt ids in one record. Longer prompts use a payload or share a prefix with their parent.
pub const PROMPT_TOKENS_MAX: usize = 128 * 1024;
pub const SAMPLED_TOKENS_MAX: usize = 64 * 1024;
/// Turns of an episode that is scored. One with more is censored at once, so that nobody's episode
/// fills the memory or stays open for ever.
pub const TURNS_MAX: usize = 4_096;
/// Entries of a logit bias. OpenAI allows 300.
pub const LOGIT_BIASES_MAX: usize = 1024;
/// Bytes of a schema that constrained sampling.
pub const CONSTRAINT_BYTES_MAX: usize = 64 * 1024;
/// Bytes of a payload. Readers hold it in memory.
pub const PAYLOAD_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// How far above 0 rounding may put a logprob, nats.
pub const LOGPROBS_TOLERANCE: f32 = 1e-3;
/// Token ids are stored as signed 32-bit integers.
const TOKEN_ID_MAX: u32 = i32::MAX as u32;
/// 2020-01-01. No event is older.
const TIME_UNIX_SECONDS_MIN: i64 = 1_577_836_800;
/// 2200-01-01.
const TIME_UNIX_SECONDS_MAX: i64 = 7_258_118_400;

/// The rule that an event breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {rule}")]
pub struct Invalid {
    pub field: &'static str,
    pub rule: String,
}

impl Invalid {
    pub fn new(field: &'static str, rule: impl Into<String>) -> Self {
        Self {
            field,
            rule: rule.into(),
        }
    }
}

impl Event {
    /// Checks all rules that depend only on the event.
    pub fn check(&self) -> Result<(), Invalid> {
        name("tenant", &self.tenant)?;
        name("source", &self.source)?;
        name("id", &self.id)?;
        time("time", self.time)?;
        match &self.body {
            Body::Generation(generation) => check_generation(generation),
            Body::Feedback(feedback) => check_feedback(feedback),
            Body::Retraction(retraction) => check_retraction(retraction),
            Body::EpisodeEnd(_) => Ok(()),
        }
    }
}

fn check_generation(generation: &Generation) -> Result<(), Invalid> {
    let sampled_at = time_of(generation.id).ok_or_else(|| Invalid::new("generation_id", "is not a UUIDv7"))?;
    time("generation_id", sampled_at)?;
    for (field, value) in [
        ("policy", &generation.policy),
        ("line", &generation.line),
        ("replica", &generation.replica),
        ("surface", &generation.surface),
        ("user_key", &generation.user_key),
        ("arm", &generation.arm),
    ] {
        name(field, value)?;
    }
    for (field, value) in [
        ("task_id", &generation.task_id),
        ("group_id", &generation.group_id),
        ("engine", &generation.engine),
    ] {
        value.as_deref().map_or(Ok(()), |value| name(field, value))?;
    }
    ordinal("segment", generation.segment)?;
    ordinal("turn", generation.turn)?;
    if let Some(payload) = &generation.payload {
        check_payload("payload", payload)?;
        ensure(
            payload.media_type != TOKEN_IDS || payload.size_bytes.is_multiple_of(4),
            "payload",
            "the size is not a multiple of 4 bytes",
        )?;
    }
    if let Some(experts) = &generation.experts {
        check_payload("experts", experts)?;
    }
    if let Some(prefix) = generation.prompt_prefix {
        ensure(prefix.length > 0, "prompt_prefix", "has no tokens")?;
        ordinal("prompt_prefix", prefix.length)?;
        let parent = generation.parent_id.is_some();
        ensure(parent, "prompt_prefix", "needs a parent_generation_id")?;
        let itself = generation.parent_id == Some(generation.id);
        ensure(!itself, "parent_generation_id", "is the generation itself")?;
    }
    if let Some(proof) = &generation.proof {
        let digits = proof.sampler.len() == 64 && proof.sampler.bytes().all(|digit| digit.is_ascii_hexdigit());
        ensure(digits, "proof.sampler", "is not 64 hexadecimal digits")?;
    }
    if let Some(code) = &generation.untrainable {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        let valid = (1..=CODE_BYTES_MAX).contains(&code.len()) && code.bytes().all(plain);
        ensure(
            valid,
            "untrainable",
            "is not a code of 1 to 64 lower-case letters, digits and underscores",
        )?;
    }
    check_tokens(generation)?;
    check_spans(generation)?;
    check_sampling(generation)
}

fn check_payload(field: &'static str, payload: &PayloadRef) -> Result<(), Invalid> {
    ensure(payload.size_bytes > 0, field, "has no bytes")?;
    ensure_else(payload.size_bytes <= PAYLOAD_BYTES_MAX, field, || {
        format!("{} bytes are more than {PAYLOAD_BYTES_MAX}", payload.size_bytes)
    })?;
    name(field, &payload.media_type)
}

fn check_tokens(generation: &Generation) -> Result<(), Invalid> {
    let prompt = generation.prompt_ids.len();
    let sampled = generation.token_ids.len();
    ensure_else(prompt <= PROMPT_TOKENS_MAX, "prompt_ids", || {
        format!("{prompt} tokens are more than {PROMPT_TOKENS_MAX}; send them by reference")
    })?;
    let failed = generation.finish_reason == FinishReason::Abort && generation.untrainable.is_some();
    ensure(
        sampled > 0 || failed,
        "token_ids",
        "is empty, and the answer has not failed",
    )?;
    ensure_else(sampled <= SAMPLED_TOKENS_MAX, "token_ids", || {
        format!("{sampled} tokens are more than {SAMPLED_TOKENS_MAX}")
    })?;
    for (field, ids) in [
        ("prompt_ids", &generation.prompt_ids),
        ("token_ids", &generation.token_ids),
    ] {
        let small = ids.iter().all(|id| *id <= TOKEN_ID_MAX);
        ensure_else(small, field, || format!("a token id is above {TOKEN_ID_MAX}"))?;
    }
    ensure_else(generation.logprobs.len() == sampled, "logprobs", || {
        format!("{} for {sampled} sampled tokens", generation.logprobs.len())
    })?;
    let valid = |logprob: &f32| logprob.is_finite() && *logprob <= LOGPROBS_TOLERANCE;
    ensure(
        generation.logprobs.iter().all(valid),
        "logprobs",
        "a logprob is above 0 or not finite",
    )?;
    let masked = generation.train_mask.as_ref().map_or(sampled, Vec::len);
    ensure_else(masked == sampled, "train_mask", || {
        format!("{masked} entries for {sampled} sampled tokens")
    })
}

fn check_spans(generation: &Generation) -> Result<(), Invalid> {
    let mut covered: u64 = 0;
    for span in &generation.versions {
        ensure(span.version > 0, "versions", "a version is not positive")?;
        let whole = generation.versions.len() == 1;
        ensure(
            span.tokens > 0 || whole && generation.token_ids.is_empty(),
            "versions",
            "a span has no tokens",
        )?;
        covered += u64::from(span.tokens);
    }
    let sampled = generation.token_ids.len();
    ensure(!generation.versions.is_empty(), "versions", "is empty")?;
    ensure_else(covered == sampled as u64, "versions", || {
        format!("spans cover {covered} of {sampled} sampled tokens")
    })
}

fn check_sampling(generation: &Generation) -> Result<(), Invalid> {
    let probability = generation.arm_probability;
    ensure(
        probability > 0.0 && probability <= 1.0,
        "arm_probability",
        "is not in (0, 1]",
    )?;
    let temperature = generation.temperature;
    ensure(
        temperature.is_finite() && temperature >= 0.0,
        "temperature",
        "is negative or not finite",
    )?;
    let top_p = generation.top_p;
    ensure(top_p > 0.0 && top_p <= 1.0, "top_p", "is not in (0, 1]")?;
    if let Some(sampling) = &generation.sampling {
        check_parameters(sampling, generation.token_ids.len())?;
    }
    check_exploration(generation)
}

fn check_parameters(sampling: &Sampling, sampled: usize) -> Result<(), Invalid> {
    ensure(
        (0.0..=1.0).contains(&sampling.min_p),
        "sampling.min_p",
        "is not in [0, 1]",
    )?;
    // Larger values would overflow f32.
    ensure(
        (0.01..=100.0).contains(&sampling.repetition_penalty),
        "sampling.repetition_penalty",
        "is not in [0.01, 100]",
    )?;
    for (field, penalty) in [
        ("sampling.presence_penalty", sampling.presence_penalty),
        ("sampling.frequency_penalty", sampling.frequency_penalty),
    ] {
        ensure((-100.0..=100.0).contains(&penalty), field, "is not in [-100, 100]")?;
    }
    let biases = sampling.logit_bias.len();
    ensure_else(biases <= LOGIT_BIASES_MAX, "sampling.logit_bias", || {
        format!("{biases} tokens are more than {LOGIT_BIASES_MAX}")
    })?;
    let valid = |(id, bias): (&u32, &f32)| *id <= TOKEN_ID_MAX && (-1000.0..=1000.0).contains(bias);
    ensure_else(sampling.logit_bias.iter().all(valid), "sampling.logit_bias", || {
        format!("a token id is above {TOKEN_ID_MAX}, or a bias is not in [-1000, 1000]")
    })?;
    let values = sampling.kept.as_ref().map_or(sampled, Vec::len);
    ensure_else(values == sampled, "sampling.kept", || {
        format!("{values} entries for {sampled} sampled tokens")
    })?;
    let positive = sampling.kept.iter().flatten().all(|count| *count > 0);
    ensure(positive, "sampling.kept", "is 0 for a sampled token")?;
    let Some(constraint) = &sampling.constraint else {
        return Ok(());
    };
    name("sampling.constraint.format", &constraint.format)?;
    ensure(!constraint.schema.is_empty(), "sampling.constraint.schema", "is empty")?;
    text("sampling.constraint.schema", &constraint.schema, CONSTRAINT_BYTES_MAX)
}

fn check_exploration(generation: &Generation) -> Result<(), Invalid> {
    let share = generation.exploration_share;
    ensure(
        share.is_none_or(|share| share > 0.0 && share < 1.0),
        "exploration_share",
        "is not in (0, 1)",
    )?;
    let suppressed = generation.decline_suppressed;
    ensure(
        share.is_some() || !suppressed,
        "decline_suppressed",
        "needs exploration_share",
    )?;
    ensure(
        !(suppressed && generation.declined),
        "decline_suppressed",
        "contradicts declined",
    )
}

fn check_feedback(feedback: &Feedback) -> Result<(), Invalid> {
    let id = time_of(feedback.id).ok_or_else(|| Invalid::new("feedback_id", "is not a UUIDv7"))?;
    time("feedback_id", id)?;
    if let Target::Generation(id) = feedback.target {
        ensure(time_of(id).is_some(), "generation_id", "is not a UUIDv7")?;
    }
    name("metric_name", &feedback.metric_name)?;
    let reserved = ["comment", "demonstration"].contains(&feedback.metric_name.as_str());
    match &feedback.value {
        Value::Text(value) => text("value", value, TEXT_BYTES_MAX)?,
        Value::Float(value) => {
            ensure(value.is_finite(), "value", "is not finite")?;
            ensure(!reserved, "value", "a comment or demonstration is a text")?;
        }
        Value::Bool(_) => ensure(!reserved, "value", "a comment or demonstration is a text")?,
    }
    let tags = feedback.tags.len();
    ensure_else(tags <= TAGS_MAX, "tags", || format!("{tags} are more than {TAGS_MAX}"))?;
    for (key, value) in &feedback.tags {
        name("tags", key)?;
        text("tags", value, NAME_BYTES_MAX)?;
    }
    Ok(())
}

fn check_retraction(retraction: &Retraction) -> Result<(), Invalid> {
    let id = time_of(retraction.id).ok_or_else(|| Invalid::new("retraction_id", "is not a UUIDv7"))?;
    time("retraction_id", id)?;
    let feedback = time_of(retraction.feedback_id);
    ensure(feedback.is_some(), "feedback_id", "is not a UUIDv7")?;
    text("reason", &retraction.reason, TEXT_BYTES_MAX)
}

fn ensure(holds: bool, field: &'static str, rule: &str) -> Result<(), Invalid> {
    ensure_else(holds, field, || rule.to_owned())
}

/// Like [`ensure`], for messages that are only formatted if the rule is broken.
fn ensure_else(holds: bool, field: &'static str, rule: impl FnOnce() -> String) -> Result<(), Invalid> {
    if holds {
        Ok(())
    } else {
        Err(Invalid::new(field, rule()))
    }
}

fn name(field: &'static str, value: &str) -> Result<(), Invalid> {
    ensure(!value.is_empty(), field, "is empty")?;
    text(field, value, NAME_BYTES_MAX)
}

fn text(field: &'static str, value: &str, bytes_max: usize) -> Result<(), Invalid> {
    ensure_else(value.len() <= bytes_max, field, || {
        format!("is longer than {bytes_max} bytes")
    })?;
    // Postgres cannot store it.
    ensure(!value.contains('\0'), field, "contains a NUL character")
}

fn time(field: &'static str, time: OffsetDateTime) -> Result<(), Invalid> {
    let seconds = time.unix_timestamp();
    ensure(
        (TIME_UNIX_SECONDS_MIN..TIME_UNIX_SECONDS_MAX).contains(&seconds),
        field,
        "lies before 2020 or after 2199",
    )
}

fn ordinal(field: &'static str, value: u32) -> Result<(), Invalid> {
    ensure(i32::try_from(value).is_ok(), field, "does not fit in 31 bits")
}
