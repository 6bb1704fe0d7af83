//! A judge: a model behind an OpenAI-compatible endpoint that answers one question about a text,
//! such as whether the user who wrote it is dissatisfied.
//!
//! This module says what a judge is, asks it and reads its answer. It stores nothing:
//! [`crate::judging`] works through the queue, and the answer becomes a feedback event like any other.

mod ask;
mod verdict;

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use uuid::{Builder, Uuid};

use event_log::event::time_of;
use event_log::judge::{ApiKey, Endpoint, Question, VOTES_MAX, schema_text};

use crate::reward::{Metric, MetricType};
pub(crate) use verdict::Verdict;

/// First part of the source of every answer. No caller may use it.
pub(crate) const SOURCE_PREFIX: &str = "springtide/judge/";
const NAME_CHARACTERS_MAX: usize = 64;

edge::options! {
    /// `[[ingest.judge]]`: what it is asked, and where.
    pub struct Options {
        /// Letters, digits, `-`, `_` and `.`, at most 64.
        pub name: String,
        /// The boolean or float metric that it answers. Nobody else may give feedback of this metric.
        pub metric: String,
        /// The text metric that it reads.
        pub of: String,
        /// Base URL of the endpoint, before `/chat/completions`.
        pub url: String,
        /// The model, as the endpoint calls it.
        pub model: String,
        /// What to answer, in words. For a boolean: when the answer is true.
        pub rubric: String,
        /// How often each text is asked about, an odd number. The majority decides, or of a float metric
        /// the median.
        pub votes: u32 = 1,
        /// Default: the endpoint's own.
        pub temperature: Option<f64> = None,
        /// Smallest answer of a float metric. Default: 0.
        pub min: Option<f64> = None,
        /// Largest answer of a float metric. Default: 1.
        pub max: Option<f64> = None,
        /// Sent as `Authorization: Bearer`. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<ApiKey> = None,
        /// Timeout of one request, seconds.
        pub timeout_seconds: f64 = 30.0 => 0.1..=600.0,
        /// How long after its end a trajectory waits for missing answers, seconds. Then it is censored.
        pub patience_seconds: f64 = 60.0 => 0.0..=86_400.0,
        /// Requests at once, per process of ingest.
        pub concurrency: usize = 4 => 1..=256,
        /// After so many faulty answers a text is given up. An endpoint that does not answer is none.
        pub attempts_max: u32 = 8 => 1..=100,
        /// Only texts of these tenants are sent to the endpoint. Others have no answers, and do not wait
        /// for any. Default: all.
        pub tenants: Vec<String> = Vec::new(),
    }
}

/// A checked judge.
#[derive(Debug)]
pub struct Judge {
    options: Options,
    question: Question,
    /// Digest of everything that determines its answer.
    version: [u8; 32],
}

impl Judge {
    /// `metrics` are all metrics of the configuration. Refuses what contradicts them.
    fn new(options: Options, metrics: &[Metric]) -> anyhow::Result<Self> {
        let name = &options.name;
        let in_name = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
        ensure!(
            (1..=NAME_CHARACTERS_MAX).contains(&name.len()) && name.chars().all(in_name),
            "ingest.judge {name:?}: a name has 1 to {NAME_CHARACTERS_MAX} letters, digits, '-', '_' and '.'"
        );
        let metric = |metric: &str, field: &str| {
            let found = metrics.iter().find(|known| known.name == metric);
            found.ok_or_else(|| {
                anyhow::anyhow!("ingest.judge {name:?}: {field} is {metric:?}, which no [[ingest.metric]] declares")
            })
        };
        let (answers, of) = (metric(&options.metric, "metric")?, metric(&options.of, "of")?);
        let is_text = |metric: &Metric| matches!(metric.metric_type, MetricType::Comment | MetricType::Demonstration);
        ensure!(
            is_text(of),
            "ingest.judge {name:?}: of is {:?}, a {}; a judge reads a comment or a demonstration",
            of.name,
            of.metric_type.as_str()
        );
        let question = options.question(answers.metric_type)?;
        ensure!(
            answers.level.is_none() || answers.level == of.level,
            "ingest.judge {name:?}: the level of {:?} is not that of {:?}; an answer is about what its text is about",
            answers.name,
            of.name
        );
        options.check()?;
        let version = options.version(question);
        Ok(Self {
            options,
            question,
            version,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.options.name
    }

    pub(crate) fn metric(&self) -> &str {
        &self.options.metric
    }

    /// The text metric that it reads.
    pub(crate) fn of(&self) -> &str {
        &self.options.of
    }

    pub(crate) fn version(&self) -> &[u8; 32] {
        &self.version
    }

    pub(crate) fn patience(&self) -> time::Duration {
        time::Duration::seconds_f64(self.options.patience_seconds)
    }

    pub(crate) fn concurrency(&self) -> usize {
        self.options.concurrency
    }

    pub(crate) fn attempts_max(&self) -> i32 {
        i32::try_from(self.options.attempts_max).unwrap_or(i32::MAX)
    }

    /// The source of its answers.
    pub(crate) fn source(&self) -> String {
        format!("{SOURCE_PREFIX}{}", self.options.name)
    }

    pub(crate) fn reads_texts_of(&self, tenant: &str) -> bool {
        self.options.tenants.is_empty() || self.options.tenants.iter().any(|allowed| allowed == tenant)
    }

    /// The id of its answer to a text: always the same, so that a repetition is the same event. It has
    /// the time of the text's id.
    pub(crate) fn answer_id(&self, tenant: &str, feedback_id: Uuid) -> Uuid {
        let context = "springtide 2026-11 id of a judge's answer";
        let parts = [
            tenant.as_bytes(),
            self.name().as_bytes(),
            &self.version,
            feedback_id.as_bytes(),
        ];
        let digest = digest(context, &parts);
        let mut bits = [0; 10];
        bits.copy_from_slice(&digest[..10]);
        // Ids of stored feedback are UUIDv7.
        let milliseconds = time_of(feedback_id).map_or(0, |time| time.unix_timestamp_nanos() / 1_000_000);
        let milliseconds = u64::try_from(milliseconds).unwrap_or(0);
        Builder::from_unix_timestamp_millis(milliseconds, &bits).into_uuid()
    }
}

impl Options {
    fn question(&self, metric_type: MetricType) -> anyhow::Result<Question> {
        let name = &self.name;
        let (min, max) = (self.min, self.max);
        match metric_type {
            MetricType::Boolean => {
                ensure!(
                    (min, max) == (None, None),
                    "ingest.judge {name:?}: min and max are for float metrics, and {:?} is a boolean",
                    self.metric
                );
                Ok(Question::YesOrNo)
            }
            MetricType::Float => {
                let (min, max) = (min.unwrap_or(0.0), max.unwrap_or(1.0));
                ensure!(
                    min.is_finite() && max.is_finite() && min < max,
                    "ingest.judge {name:?}: min must be below max"
                );
                Ok(Question::Number { min, max })
            }
            MetricType::Comment | MetricType::Demonstration => anyhow::bail!(
                "ingest.judge {name:?}: metric is {:?}, a {}; a judge answers a boolean or a float metric",
                self.metric,
                metric_type.as_str()
            ),
        }
    }

    /// Refuses values that are out of range.
    fn check(&self) -> anyhow::Result<()> {
        let name = &self.name;
        ensure!(
            Endpoint::is_base_url(&self.url),
            "ingest.judge {name:?}: url is not a base URL such as https://models.example/v1; a key is api_key"
        );
        ensure!(
            !self.model.is_empty() && !self.rubric.trim().is_empty(),
            "ingest.judge {name:?}: model and rubric must not be empty"
        );
        ensure!(
            self.votes % 2 == 1 && self.votes <= VOTES_MAX,
            "ingest.judge {name:?}: votes must be odd, so that there is a majority, and at most {VOTES_MAX}"
        );
        self.check_ranges(&format!("ingest.judge {name:?}"))?;
        ensure!(
            (0.0..=2.0).contains(&self.temperature.unwrap_or(0.0)),
            "ingest.judge {name:?}: temperature must be from 0 to 2"
        );
        ensure!(
            self.api_key.as_ref().is_none_or(ApiKey::is_printable),
            "ingest.judge {name:?}: api_key must be printable ASCII; leave it out if the endpoint needs none"
        );
        ensure!(
            !self.tenants.iter().any(String::is_empty),
            "ingest.judge {name:?}: a tenant is empty"
        );
        Ok(())
    }

    /// Not of the URL, the key and the limits, which do not determine an answer.
    fn version(&self, question: Question) -> [u8; 32] {
        let votes = self.votes.to_string();
        let temperature = self.temperature.map_or_else(String::new, |value| value.to_string());
        let (schema, instructions) = (schema_text(question), ask::instructions(question, ""));
        let parts = [
            &self.name,
            &self.metric,
            &self.model,
            &self.rubric,
            &votes,
            &temperature,
            &schema,
            &instructions,
        ];
        digest(
            "springtide 2026-11 version of a judge",
            &parts.map(|part| part.as_bytes()),
        )
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_seconds)
    }
}

fn digest(context: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// All judges of the configuration. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Judges(Vec<Arc<Judge>>);

impl Judges {
    /// Refuses judges that contradict the metrics or each other.
    pub(crate) fn new(options: &[Options], metrics: &[Metric]) -> anyhow::Result<Self> {
        let mut judges: Vec<Arc<Judge>> = Vec::new();
        for options in options {
            let judge = Judge::new(options.clone(), metrics)?;
            for other in &judges {
                ensure!(
                    other.name() != judge.name(),
                    "ingest.judge {:?} is declared twice",
                    judge.name()
                );
                ensure!(
                    other.metric() != judge.metric(),
                    "ingest.judge: {:?} and {:?} both answer {:?}; give each a metric of its own",
                    other.name(),
                    judge.name(),
                    judge.metric()
                );
            }
            judges.push(Arc::new(judge));
        }
        Ok(Self(judges))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Judge>> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests;
