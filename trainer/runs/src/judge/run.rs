//! The judges of one run: asks them, and looks first whether the answer is stored.
//!
//! The model that answers must not change during a run, because rewards of two models cannot be
//! compared. The first answer of a run says which model it is (`run_judge`); an answer of another one
//! is an error that ends the run. Endpoints with many servers have several fingerprints at once, so
//! a new fingerprint is only a warning among the run's events.

use super::question::Vote;
use super::stored::{Answer, Answers, Version};
use super::{Judge, Judges, Message, Question, Sampling};
use crate::claim;
use event_log::judge::{Fault, Reply, median};
use futures::future::try_join_all;
use serde_json::json;
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Pause before the second try; the next ones are twice as long each.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Characters of what an endpoint calls its model or its fingerprint.
const VERSION_CHARACTERS_MAX: usize = 200;

/// What a judge is asked.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Name of the judge.
    pub judge: &'a str,
    /// The rollout that is graded. Answers are stored as long as it is.
    pub rollout: Uuid,
    pub question: Question,
    pub messages: &'a [Message],
    pub sampling: &'a Sampling,
    /// An odd number. Default: the judge's.
    pub votes: Option<u32>,
}

/// Why a judge gave no score.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no [[trainer.judge]] {0:?}")]
    Unknown(String),
    #[error("judge {judge:?}: {}: {}", fault.code, fault.reason)]
    Fault { judge: String, fault: Fault },
    #[error("judge {judge:?}: the answer is not stored, and this run replays stored answers only")]
    NotStored { judge: String },
    #[error(
        "judge {judge:?} answers as model {now:?}, and was {was:?} when the run began: rewards of two models cannot \
         be compared. Start a new run"
    )]
    Changed { judge: String, was: String, now: String },
    #[error("stored answers of judges: {0}")]
    Database(#[from] sqlx::Error),
}

/// The judges that one run may ask.
#[derive(Debug)]
pub struct RunJudges {
    judges: Arc<Judges>,
    answers: Answers,
    run: Uuid,
    /// Stored answers only.
    replay: bool,
    versions: Mutex<BTreeMap<String, Versions>>,
    /// Votes that are being looked up or asked for: rollouts of a group are often equal.
    turns: Mutex<BTreeMap<[u8; 32], Weak<tokio::sync::Mutex<()>>>>,
}

/// Who has answered in this run.
#[derive(Debug)]
struct Versions {
    model: String,
    fingerprints: BTreeSet<Option<String>>,
}

impl RunJudges {
    /// `replay`: no judge is asked, and an answer that is not stored is an error.
    pub async fn open(
        judges: Arc<Judges>,
        pool: PgPool,
        policy: &str,
        run: Uuid,
        replay: bool,
    ) -> Result<Self, sqlx::Error> {
        let policy = policy.to_owned();
        let answers = Answers { pool, policy };
        let began = answers.versions(run).await?;
        let versions = began.into_iter().map(|(judge, version)| {
            let fingerprints = BTreeSet::from([version.fingerprint]);
            let model = version.model;
            (judge, Versions { model, fingerprints })
        });
        Ok(Self {
            judges,
            run,
            replay,
            versions: Mutex::new(versions.collect()),
            turns: Mutex::default(),
            answers,
        })
    }

    /// The majority of the votes: 1 for yes, 0 for no; or their median. Fails if one of them does.
    pub async fn score(&self, asked: Asked<'_>) -> Result<f64, Error> {
        let judge = self.judges.0.get(asked.judge);
        let judge = judge.ok_or_else(|| Error::Unknown(asked.judge.to_owned()))?;
        let mut sampling = asked.sampling.clone();
        sampling.temperature = sampling.temperature.or(judge.options.temperature);
        let votes = (0..asked.votes.unwrap_or(judge.options.votes)).map(|index| {
            let vote = Vote {
                judge: &judge.options.name,
                model: &judge.options.model,
                question: asked.question,
                messages: asked.messages,
                sampling: &sampling,
                index,
            };
            self.vote(judge, vote, asked.rollout)
        });
        let votes = try_join_all(votes).await?;
        let none = || Fault::new("malformed", "there are no votes");
        median(&votes).ok_or_else(|| judge.error(none()))
    }

    async fn vote(&self, judge: &Judge, vote: Vote<'_>, rollout: Uuid) -> Result<f64, Error> {
        let digest = vote.digest();
        let turn = self.turn(digest);
        let _turn = turn.lock().await;
        let name = &judge.options.name;
        let model = self.versions().get(name).map(|known| known.model.clone());
        // The first answer of a run comes from the endpoint, which says who answers now.
        if self.replay || model.is_some() {
            let stored = self.answers.find(&digest, model.as_deref(), rollout).await?;
            if let Some(answer) = stored {
                self.check_version(name, &answer.version).await?;
                count(name, "stored");
                return Ok(answer.score);
            }
        }
        if self.replay {
            return Err(Error::NotStored { judge: name.clone() });
        }
        let reply = judge.ask(&vote).await?;
        let short = |text: String| text.chars().take(VERSION_CHARACTERS_MAX).collect::<String>();
        let answer = Answer {
            version: Version {
                model: short(reply.model.unwrap_or_else(|| judge.options.model.clone())),
                fingerprint: reply.fingerprint.map(short),
            },
            score: reply.answer,
        };
        self.check_version(name, &answer.version).await?;
        self.answers.insert(&digest, &answer, rollout).await?;
        count(name, "endpoint");
        Ok(answer.score)
    }

    /// Refuses an answer of another model than the first answer's.
    async fn check_version(&self, judge: &str, version: &Version) -> Result<(), Error> {
        let (is_first, is_new) = {
            let mut versions = self.versions();
            let is_first = !versions.contains_key(judge);
            let known = versions.entry(judge.to_owned()).or_insert_with(|| Versions {
                model: version.model.clone(),
                fingerprints: BTreeSet::new(),
            });
            if known.model != version.model {
                return Err(Error::Changed {
                    judge: judge.to_owned(),
                    was: known.model.clone(),
                    now: version.model.clone(),
                });
            }
            (is_first, known.fingerprints.insert(version.fingerprint.clone()))
        };
        if is_first && let Err(error) = self.answers.begin(self.run, judge, version).await {
            // the next answer tries again
            self.versions().remove(judge);
            return Err(error.into());
        }
        if is_new {
            let fingerprint = version.fingerprint.as_deref().unwrap_or("none");
            let (level, message) = match is_first {
                true => (
                    "info",
                    format!(
                        "judge {judge} answers as model {:?}, fingerprint {fingerprint}",
                        version.model
                    ),
                ),
                false => (
                    "warn",
                    format!("judge {judge} answers with another fingerprint now, {fingerprint}; its model is the same"),
                ),
            };
            let data = json!({"judge": judge, "model": version.model, "fingerprint": version.fingerprint});
            let mut connection = self.answers.pool.acquire().await?;
            claim::append_event(&mut connection, self.run, level, &message, &data).await?;
        }
        Ok(())
    }

    fn versions(&self) -> MutexGuard<'_, BTreeMap<String, Versions>> {
        self.versions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lock that votes with the same name share.
    fn turn(&self, digest: [u8; 32]) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = turns.get(&digest).and_then(Weak::upgrade).unwrap_or_default();
        turns.insert(digest, Arc::downgrade(&turn));
        turn
    }
}

impl Judge {
    fn error(&self, fault: Fault) -> Error {
        let judge = self.options.name.clone();
        Error::Fault { judge, fault }
    }

    /// Asks until there is an answer, at most `tries_max` times.
    async fn ask(&self, vote: &Vote<'_>) -> Result<Reply, Error> {
        let request = vote.request();
        let mut pause = PAUSE;
        let mut tries = 0;
        loop {
            tries += 1;
            let fault = match self.ask_once(&request, vote.question).await {
                Ok(reply) => return Ok(reply),
                Err(fault) => fault,
            };
            let name = self.options.name.clone();
            metrics::counter!("springtide_train_judge_faults_total", "judge" => name, "code" => fault.code)
                .increment(1);
            // A wrong key or model, and what the endpoint refuses, stay so.
            if tries >= self.options.tries_max || fault.code == "http_error" {
                return Err(self.error(fault));
            }
            // A faulty answer says nothing about the next one.
            if fault.is_of_endpoint {
                tokio::time::sleep(fault.retry_after.unwrap_or(pause).min(PAUSE_MAX)).await;
                pause *= 2;
            }
        }
    }

    async fn ask_once(&self, request: &serde_json::Value, question: Question) -> Result<Reply, Fault> {
        let closed = |_| Fault::new("unavailable", "the judge is closed");
        let _permit = self.requests.acquire().await.map_err(closed)?;
        let started = Instant::now();
        let body = self.endpoint.complete(request).await?;
        let name = self.options.name.clone();
        metrics::histogram!("springtide_train_judge_seconds", "judge" => name).record(started.elapsed().as_secs_f64());
        Reply::read(question, &body)
    }
}

fn count(judge: &str, source: &'static str) {
    let judge = judge.to_owned();
    metrics::counter!("springtide_train_judge_answers_total", "judge" => judge, "source" => source).increment(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grader;
    use crate::judge::Options;
    use axum::routing::post;
    use axum::{Json, Router, http::StatusCode, response::IntoResponse};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// An endpoint that answers by the content of the last message, and counts requests.
    async fn endpoint(requests: Arc<AtomicU32>) -> String {
        let answer = move |Json(body): Json<serde_json::Value>| async move {
            let nth = requests.fetch_add(1, Ordering::SeqCst);
            let completion = |content: &str| {
                let message = json!({"role": "assistant", "content": content});
                Json(json!({"model": "large-2026", "system_fingerprint": "fp_1",
                    "choices": [{"message": message, "finish_reason": "stop"}]}))
                .into_response()
            };
            let last = body["messages"].as_array().and_then(|messages| messages.last());
            match last.and_then(|message| message["content"].as_str()).unwrap_or_default() {
                "answer" => completion(r#"{"answer": 0.75}"#),
                "garbage first" if nth == 0 => completion("0.75"),
                "garbage first" => completion(r#"{"answer": 0.5}"#),
                "garbage" => completion("seven of ten"),
                "too much" => completion(r#"{"answer": 7}"#),
                "refuse" => StatusCode::UNAUTHORIZED.into_response(),
                "break" => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                _ => std::future::pending().await,
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/v1/chat/completions", post(answer));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        format!("http://{address}/v1")
    }

    /// What the judge answers, or the code of the rollout's disposition, and how many requests there were.
    async fn ask(content: &str) -> (Result<f64, &'static str>, u32) {
        let requests = Arc::new(AtomicU32::new(0));
        let options: Options = serde_json::from_value(json!({
            "name": "large", "url": endpoint(requests.clone()).await, "model": "large", "tries_max": 2,
            "timeout_seconds": 0.5}))
        .unwrap();
        let judges = Judges::new(&[options]).unwrap();
        let judge = &judges.0["large"];
        let messages = [Message {
            role: crate::judge::Role::User,
            content: content.to_owned(),
        }];
        let vote = Vote {
            judge: "large",
            model: "large",
            question: Question::Number { min: 0.0, max: 1.0 },
            messages: &messages,
            sampling: &Sampling::default(),
            index: 0,
        };
        let reply = judge.ask(&vote).await;
        let reply = reply.map(|reply| {
            assert_eq!(reply.model.as_deref(), Some("large-2026"));
            assert_eq!(reply.fingerprint.as_deref(), Some("fp_1"));
            reply.answer
        });
        let code = reply.map_err(|error| grader::Error::from(error).cause.code());
        (code, requests.load(Ordering::SeqCst))
    }

    #[tokio::test]
    async fn each_failure_of_a_judge_has_its_code_and_is_no_reward() {
        assert_eq!(ask("answer").await, (Ok(0.75), 1));
        assert_eq!(ask("garbage first").await, (Ok(0.5), 2));
        assert_eq!(ask("garbage").await, (Err("grade_invalid"), 2));
        assert_eq!(ask("too much").await, (Err("grade_invalid"), 2));
        assert_eq!(ask("refuse").await, (Err("grade_failed"), 1), "a wrong key stays wrong");
        assert_eq!(ask("break").await, (Err("grade_failed"), 2));
        assert_eq!(ask("hang").await, (Err("grade_timeout"), 2));
    }
}
