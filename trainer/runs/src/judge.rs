//! Judges of offline runs: models behind OpenAI-compatible endpoints whose answer is a reward.
//!
//! This file has what `[[trainer.judge]]` says. `run.rs` asks the judges of one run, `stored.rs` keeps
//! their answers. A judge of what users write is asked in the same words: [`event_log::judge`].

mod question;
mod run;
mod stored;

use anyhow::ensure;
use event_log::judge::{ApiKey, Endpoint, VOTES_MAX};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::Semaphore;

pub use event_log::judge::Question;
pub use question::{Message, Role, Sampling};
pub use run::{Asked, Error, RunJudges};
pub use stored::sweep_expired;

const NAME_CHARACTERS_MAX: usize = 64;

edge::options! {
    /// `[[trainer.judge]]`: a model that graders ask, and where it is.
    pub struct Options {
        /// How graders call it: letters, digits, `-`, `_` and `.`, at most 64.
        pub name: String,
        /// Base URL of the endpoint, before `/chat/completions`.
        pub url: String,
        /// The model, as the endpoint calls it.
        pub model: String,
        /// How often each question is asked, an odd number. The majority decides, or of numbers the
        /// median. A grader may choose another number.
        pub votes: u32 = 1,
        /// A grader may choose another one. Default: the endpoint's own.
        pub temperature: Option<f64> = None,
        /// Sent as `Authorization: Bearer`. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<ApiKey> = None,
        /// Timeout of one request, seconds.
        pub timeout_seconds: f64 = 30.0 => 0.1..=600.0,
        /// Requests at once.
        pub concurrency: usize = 4 => 1..=256,
        /// Requests for one vote, if the endpoint fails or its answer is not what was asked for. Then the
        /// rollout has no grade.
        pub tries_max: u32 = 3 => 1..=20,
    }
}

impl Options {
    /// Refuses values that cannot work.
    fn check(&self) -> anyhow::Result<()> {
        let name = &self.name;
        let in_name = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
        ensure!(
            (1..=NAME_CHARACTERS_MAX).contains(&name.len()) && name.chars().all(in_name),
            "trainer.judge {name:?}: a name has 1 to {NAME_CHARACTERS_MAX} letters, digits, '-', '_' and '.'"
        );
        ensure!(
            Endpoint::is_base_url(&self.url),
            "trainer.judge {name:?}: url is not a base URL such as https://models.example/v1; a key is api_key"
        );
        ensure!(
            !self.model.is_empty(),
            "trainer.judge {name:?}: model must not be empty"
        );
        check_votes(self.votes).map_err(|why| anyhow::anyhow!("trainer.judge {name:?}: {why}"))?;
        self.check_ranges(&format!("trainer.judge {name:?}"))?;
        ensure!(
            (0.0..=2.0).contains(&self.temperature.unwrap_or(0.0)),
            "trainer.judge {name:?}: temperature must be from 0 to 2"
        );
        ensure!(
            self.api_key.as_ref().is_none_or(ApiKey::is_printable),
            "trainer.judge {name:?}: api_key must be printable ASCII; leave it out if the endpoint needs none"
        );
        Ok(())
    }
}

/// Refuses a number of votes without a majority.
pub fn check_votes(votes: u32) -> Result<(), String> {
    match votes % 2 == 1 && votes <= VOTES_MAX {
        true => Ok(()),
        false => Err(format!(
            "votes must be odd, so that there is a majority, and at most {VOTES_MAX}"
        )),
    }
}

/// Refuses judges that cannot work, and names that occur twice.
pub fn check(judges: &[Options]) -> anyhow::Result<()> {
    for (i, judge) in judges.iter().enumerate() {
        judge.check()?;
        ensure!(
            judges.iter().take(i).all(|other| other.name != judge.name),
            "trainer.judge {:?} is declared twice",
            judge.name
        );
    }
    Ok(())
}

/// A judge of the configuration. All runs share its limits.
#[derive(Debug)]
struct Judge {
    options: Options,
    endpoint: Endpoint,
    /// Requests in flight.
    requests: Semaphore,
}

/// All judges of the configuration.
#[derive(Debug, Default)]
pub struct Judges(BTreeMap<String, Judge>);

impl Judges {
    /// `options` have passed [`check`].
    pub fn new(options: &[Options]) -> anyhow::Result<Self> {
        let judges = options.iter().map(|options| {
            let timeout = Duration::from_secs_f64(options.timeout_seconds);
            let judge = Judge {
                endpoint: Endpoint::new(&options.name, &options.url, options.api_key.clone(), timeout)?,
                requests: Semaphore::new(options.concurrency),
                options: options.clone(),
            };
            Ok((options.name.clone(), judge))
        });
        judges.collect::<anyhow::Result<_>>().map(Self)
    }

    /// Whether there is a judge of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        serde_json::from_value(serde_json::json!({
            "name": "right", "url": "http://127.0.0.1:9/v1", "model": "small", "api_key": "sk-secret"}))
        .unwrap()
    }

    #[test]
    fn contradictions_are_refused_and_keys_never_printed() {
        check(&[options()]).unwrap();
        assert!(!format!("{:?}", options()).contains("sk-secret"));
        assert!(!serde_json::to_string(&options()).unwrap().contains("sk-secret"));
        type Change = fn(&mut Options);
        let cases: [(Change, &str); 7] = [
            (|options| options.name = "a b".into(), "a name has"),
            (
                |options| options.url = "https://sk-secret@models.example".into(),
                "url is not",
            ),
            (|options| options.model.clear(), "model must not"),
            (|options| options.votes = 2, "votes must be odd"),
            (|options| options.timeout_seconds = f64::NAN, "timeout_seconds"),
            (|options| options.tries_max = 0, "tries_max"),
            (|options| options.api_key = Some(ApiKey::new("a\nb")), "api_key"),
        ];
        for (change, why) in cases {
            let mut changed = options();
            change(&mut changed);
            let refusal = check(&[changed]).unwrap_err().to_string();
            assert!(refusal.contains(why) && !refusal.contains("sk-secret"), "{refusal}");
        }
        let twice = check(&[options(), options()]).unwrap_err().to_string();
        assert!(twice.contains("declared twice"), "{twice}");
    }
}
