//! `POST /v1/runs`: creates a queued run, with its tasks if it has any. Everything is checked before
//! a row is written.

use super::grpo::Config;
use super::offline::{Evaluation, Export, ExportFor, Supervised};
use super::preference::{Dpo, Kto};
use super::runs::{self, Run};
use super::{Shared, audited, database, visible_tenant};
use crate::claim;
use crate::run::Kind;
use crate::schedule::Schedule;
use axum::extract::State;
use axum::http::StatusCode;
use edge::auth::Principal;
use edge::json::Json;
use edge::problem::Problem;
use event_log::event::NAME_BYTES_MAX;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use std::collections::BTreeSet;
use uuid::Uuid;

const TASKS_MAX: usize = 10_000;
const TASK_BYTES_MAX: usize = 256 << 10;

/// One task: a prompt, and the answer that the grader compares completions with.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Unique in the run. Default: its index in the list.
    pub id: Option<String>,
    pub prompt: String,
    pub answer: String,
}

/// The body of the request, by its `kind`.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Request {
    Grpo(Box<Grpo>),
    Sft(OnDataset<Supervised>),
    Dpo(OnDataset<Dpo>),
    Kto(OnDataset<Kto>),
    Evaluate(OnDataset<Evaluation>),
    Export(OnDataset<Export>),
}

/// A GRPO run.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grpo {
    pub policy: Option<String>,
    /// Default: the version that `champion` serves, else the head of `realtime`.
    pub base_version: Option<i64>,
    pub tasks: Option<Vec<Task>>,
    /// The same as JSON lines.
    pub tasks_jsonl: Option<String>,
    /// When it may work. Default: at once.
    pub schedule: Option<Schedule>,
    #[serde(flatten)]
    pub config: Config,
}

/// A run over a dataset.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnDataset<C> {
    pub policy: Option<String>,
    /// Where training starts, or what is measured. Default: the version that `champion` serves, else
    /// the head of `realtime`.
    pub base_version: Option<i64>,
    /// When it may work. An evaluation or an export goes on when its window closes. Default: at once.
    pub schedule: Option<Schedule>,
    #[serde(flatten)]
    pub config: C,
}

/// The tasks of a request, given as a list or as JSON lines. Every task gets a unique id.
pub fn tasks(list: Option<Vec<Task>>, jsonl: Option<&str>) -> Result<Vec<Task>, String> {
    let mut tasks = match (list, jsonl) {
        (Some(list), None) => list,
        (None, Some(lines)) => lines
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(i, line)| serde_json::from_str(line).map_err(|e| format!("tasks_jsonl line {}: {e}", i + 1)))
            .collect::<Result<_, _>>()?,
        _ => return Err("give the tasks as either `tasks` or `tasks_jsonl`".into()),
    };
    if tasks.is_empty() || tasks.len() > TASKS_MAX {
        return Err(format!("{} tasks; the number must be in 1..={TASKS_MAX}", tasks.len()));
    }
    let mut seen = BTreeSet::new();
    for (i, task) in tasks.iter_mut().enumerate() {
        let id = task.id.get_or_insert_with(|| i.to_string()).clone();
        if task.prompt.is_empty() || task.prompt.len() + task.answer.len() > TASK_BYTES_MAX {
            return Err(format!(
                "task `{id}`: the prompt is empty, or prompt and answer exceed {TASK_BYTES_MAX} bytes"
            ));
        }
        if id.is_empty() || id.len() > NAME_BYTES_MAX || id.contains('\0') {
            return Err(format!(
                "task {i}: an id has 1 to {NAME_BYTES_MAX} bytes, none of them NUL"
            ));
        }
        if !seen.insert(id.clone()) {
            return Err(format!("task id `{id}` occurs twice"));
        }
    }
    Ok(tasks)
}

pub(super) async fn create(
    State(shared): State<Shared>,
    principal: Principal,
    Json(request): Json<Request>,
) -> Result<(StatusCode, Json<Run>), Problem> {
    shared.create(request, &principal, None).await
}

/// A run that has been checked.
struct NewRun {
    kind: Kind,
    base: Option<i64>,
    schedule: Option<Schedule>,
    config: serde_json::Value,
    steps: i64,
    tasks: Vec<Task>,
    /// For people.
    about: String,
}

impl NewRun {
    fn of(
        kind: Kind,
        base: Option<i64>,
        schedule: Option<Schedule>,
        about: String,
        config: &impl Serialize,
        steps: i64,
    ) -> Result<Self, Problem> {
        let config = serde_json::to_value(config).map_err(Problem::internal)?;
        let tasks = vec![];
        Ok(NewRun {
            kind,
            base,
            schedule,
            config,
            steps,
            tasks,
            about,
        })
    }
}

impl Shared {
    /// Checks and stores a run. `forked_from`: the run that it is a fork of.
    pub(super) async fn create(
        &self,
        request: Request,
        principal: &Principal,
        forked_from: Option<Uuid>,
    ) -> Result<(StatusCode, Json<Run>), Problem> {
        let mut new = match request {
            Request::Grpo(grpo) => self.grpo(*grpo).await?,
            Request::Sft(sft) => self.supervised(sft, principal).await?,
            Request::Dpo(dpo) => self.dpo(dpo, principal).await?,
            Request::Kto(kto) => self.kto(kto, principal).await?,
            Request::Evaluate(evaluation) => self.evaluation(evaluation, principal).await?,
            Request::Export(export) => self.export(export, principal).await?,
        };
        if let Some(schedule) = &new.schedule {
            schedule.check().map_err(Problem::bad_request)?;
            schedule.put_into(&mut new.config).map_err(Problem::internal)?;
        }
        let mut data = serde_json::json!({});
        if let Some(run) = forked_from {
            new.about = format!("{}, a fork of run {run}", new.about);
            data = serde_json::json!({"forked_from": run});
        }
        let id = insert(&self.pool, &self.policy, &new, principal, &data)
            .await
            .map_err(database)?;
        let run = runs::get(&self.pool, &self.policy, id).await?;
        Ok((StatusCode::CREATED, Json(run)))
    }

    async fn grpo(&self, request: Grpo) -> Result<NewRun, Problem> {
        self.check_policy(request.policy.as_deref())?;
        request.config.check().map_err(Problem::bad_request)?;
        let tasks = tasks(request.tasks, request.tasks_jsonl.as_deref()).map_err(Problem::bad_request)?;
        let base = base_version(&self.pool, &self.policy, request.base_version).await?;
        let about = format!("{} tasks, from version {base}", tasks.len());
        let (config, steps) = (&request.config, request.config.steps);
        let new = NewRun::of(Kind::Grpo, Some(base), request.schedule, about, config, steps)?;
        Ok(NewRun { tasks, ..new })
    }

    async fn supervised(&self, request: OnDataset<Supervised>, principal: &Principal) -> Result<NewRun, Problem> {
        self.check_policy(request.policy.as_deref())?;
        let mut config = request.config;
        config.check().map_err(Problem::bad_request)?;
        let dataset = self.dataset(&config.dataset, principal).await?;
        let base = base_version(&self.pool, &self.policy, request.base_version).await?;
        let steps = match (config.steps, config.tokens_per_step) {
            (Some(steps), _) => steps,
            (None, None) => steps_of_a_pass(dataset.trajectories, config.batch_size()),
            (None, Some(_)) => {
                let why = "steps is missing: with tokens_per_step, how many read the dataset once is known only when \
                           the run reads it";
                return Err(Problem::bad_request(why));
            }
        };
        config.steps = Some(steps);
        if config.tokens_per_step.is_none() {
            config.batch_size = Some(config.batch_size());
        }
        let about = format!("dataset {}, from version {base}", config.dataset);
        NewRun::of(Kind::Sft, Some(base), request.schedule, about, &config, steps)
    }

    async fn dpo(&self, request: OnDataset<Dpo>, principal: &Principal) -> Result<NewRun, Problem> {
        self.check_policy(request.policy.as_deref())?;
        let config = request.config;
        config.check().map_err(Problem::bad_request)?;
        self.dataset(&config.dataset, principal).await?;
        let base = base_version(&self.pool, &self.policy, request.base_version).await?;
        let about = format!("dataset {}, from version {base}", config.dataset);
        NewRun::of(Kind::Dpo, Some(base), request.schedule, about, &config, config.steps)
    }

    async fn kto(&self, request: OnDataset<Kto>, principal: &Principal) -> Result<NewRun, Problem> {
        self.check_policy(request.policy.as_deref())?;
        let mut config = request.config;
        config.check().map_err(Problem::bad_request)?;
        let dataset = self.dataset(&config.dataset, principal).await?;
        let base = base_version(&self.pool, &self.policy, request.base_version).await?;
        let once = steps_of_a_pass(dataset.trajectories, config.batch_size);
        let steps = *config.steps.get_or_insert(once);
        let about = format!("dataset {}, from version {base}", config.dataset);
        NewRun::of(Kind::Kto, Some(base), request.schedule, about, &config, steps)
    }

    async fn evaluation(&self, request: OnDataset<Evaluation>, principal: &Principal) -> Result<NewRun, Problem> {
        self.check_policy(request.policy.as_deref())?;
        let config = request.config;
        config.check().map_err(Problem::bad_request)?;
        self.dataset(&config.dataset, principal).await?;
        let (base, of) = match &config.base {
            None => {
                let base = base_version(&self.pool, &self.policy, request.base_version).await?;
                (Some(base), format!("version {base}"))
            }
            Some(_) if request.base_version.is_some() => {
                let why = "base and base_version exclude each other: give one of them";
                return Err(Problem::bad_request(why));
            }
            Some(name) => {
                let found = version_of(&self.pool, &self.policy, name).await.map_err(database)?;
                if found.is_none() {
                    let why = format!("base: policy `{}` has no alias and no line `{name}`", self.policy);
                    return Err(Problem::not_found(why));
                }
                (None, format!("what `{name}` is when the run starts"))
            }
        };
        let about = format!("{of} on dataset {}", config.dataset);
        NewRun::of(Kind::Evaluate, base, request.schedule, about, &config, 1)
    }

    async fn export(&self, request: OnDataset<Export>, principal: &Principal) -> Result<NewRun, Problem> {
        self.check_policy(request.policy.as_deref())?;
        if request.base_version.is_some() {
            return Err(Problem::bad_request("base_version: an export has none"));
        }
        let export = request.config;
        self.dataset(&export.dataset, principal).await?;
        let about = format!("dataset {} as {}", export.dataset, export.format.as_str());
        let config = ExportFor {
            export,
            tenant: principal.tenant.clone(),
            all_tenants: visible_tenant(principal).is_none(),
        };
        NewRun::of(Kind::Export, None, request.schedule, about, &config, 1)
    }

    fn check_policy(&self, requested: Option<&str>) -> Result<(), Problem> {
        match requested {
            Some(other) if other != &*self.policy => Err(Problem::not_found(format!(
                "policy `{other}` is not trained here; `{}` is",
                self.policy
            ))),
            _ => Ok(()),
        }
    }
}

/// Queues a run that evaluates `version` on a dataset such as `held-out@1`; for callers in this process.
///
/// # Errors
/// What `POST /v1/runs` would answer.
pub async fn evaluate_version(
    pool: &PgPool,
    policy: &str,
    version: i64,
    dataset: &str,
    principal: &Principal,
) -> Result<Uuid, Problem> {
    let shared = Shared::in_process(pool, policy);
    let config = serde_json::from_value(serde_json::json!({"dataset": dataset}));
    let request = OnDataset {
        policy: None,
        base_version: Some(version),
        schedule: None,
        config: config.map_err(|error| Problem::bad_request(format!("dataset: {error}")))?,
    };
    let new = shared.evaluation(request, principal).await?;
    insert(pool, policy, &new, principal, &serde_json::json!({}))
        .await
        .map_err(database)
}

/// The version of an alias, else the head of a line, by its name.
pub async fn version_of(pool: &PgPool, policy: &str, name: &str) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar!(
        r#"
        select coalesce(
            (select version from alias where policy = $1 and alias = $2 and not withdrawn),
            (select head from line where policy = $1 and line = $2))
        "#,
        policy,
        name
    )
    .fetch_one(pool)
    .await
}

/// How many steps read so many trajectories once.
fn steps_of_a_pass(trajectories: i64, batch_size: u32) -> i64 {
    let steps = trajectories.unsigned_abs().div_ceil(batch_size.into());
    i64::try_from(steps).unwrap_or(i64::MAX)
}

async fn base_version(pool: &PgPool, policy: &str, requested: Option<i64>) -> Result<i64, Problem> {
    let found = sqlx::query_scalar!(
        r#"
        select coalesce(
            (select serial from version where policy = $1 and serial = $2),
            (select version from alias where policy = $1 and alias = 'champion' and not withdrawn and $2::bigint is null),
            (select head from line where policy = $1 and line = 'realtime' and $2::bigint is null))
        "#,
        policy,
        requested
    )
    .fetch_one(pool)
    .await
    .map_err(database)?;
    found.ok_or_else(|| match requested {
        Some(serial) => Problem::not_found(format!("policy `{policy}` has no version {serial}")),
        None => Problem::conflict(format!("policy `{policy}` has no version to start from yet")),
    })
}

/// `data`: of its first event.
async fn insert(
    pool: &PgPool,
    policy: &str,
    new: &NewRun,
    principal: &Principal,
    data: &serde_json::Value,
) -> Result<Uuid, sqlx::Error> {
    let id = Uuid::now_v7();
    let mut transaction = edge::database::begin(pool).await?;
    sqlx::query!(
        r#"
        insert into run (id, kind, policy, line, status, config, base_version, steps_total)
        values ($1, $2, $3, $4, 'queued', $5, $6, $7)
        "#,
        id,
        new.kind as Kind,
        policy,
        line_of(id),
        new.config,
        new.base,
        new.steps
    )
    .execute(&mut *transaction)
    .await?;
    if !new.tasks.is_empty() {
        insert_tasks(&mut transaction, id, &new.tasks).await?;
    }
    let message = format!("requested by {}: {}", principal.label, new.about);
    claim::append_event(&mut transaction, id, "info", &message, data).await?;
    let about = format!("{}, {}", new.kind, new.about);
    audited::append(&mut transaction, principal.actor(), id, "run.create", &about).await?;
    transaction.commit().await?;
    Ok(id)
}

async fn insert_tasks(connection: &mut PgConnection, run: Uuid, tasks: &[Task]) -> Result<(), sqlx::Error> {
    let ids: Vec<String> = tasks.iter().map(|t| t.id.clone().unwrap_or_default()).collect();
    let prompts: Vec<String> = tasks.iter().map(|t| t.prompt.clone()).collect();
    let answers: Vec<String> = tasks.iter().map(|t| t.answer.clone()).collect();
    sqlx::query!(
        "insert into task (run_id, id, prompt, answer) select $1, * from unnest($2::text[], $3::text[], $4::text[])",
        run,
        &ids,
        &prompts,
        &answers
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The line of an offline run: `run-` and the last 8 hex digits of its id. The first digits of a
/// UUIDv7 are its time, so runs of the same minute share them.
pub fn line_of(run: Uuid) -> String {
    let hex = run.simple().to_string();
    format!("run-{}", &hex[24..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_come_as_a_list_or_as_lines_with_an_id_each() {
        let lines = "{\"prompt\": \"a\", \"answer\": \"b\"}\n\n{\"id\": \"x\", \"prompt\": \"c\", \"answer\": \"\"}\n";
        let tasks = tasks(None, Some(lines)).unwrap();
        let ids: Vec<_> = tasks.iter().filter_map(|t| t.id.as_deref()).collect();
        assert_eq!(ids, ["0", "x"]);
    }

    #[test]
    fn tasks_that_cannot_be_used_are_refused_with_the_reason() {
        let refused = |list: Option<Vec<Task>>, lines: Option<&str>| tasks(list, lines).unwrap_err();
        let task = |id: &str, prompt: &str| Task {
            id: Some(id.into()),
            prompt: prompt.into(),
            answer: "a".into(),
        };
        assert!(refused(None, None).contains("either"));
        assert!(refused(None, Some("{\"prompt\": 1}")).contains("line 1"));
        assert!(refused(Some(vec![]), None).contains("0 tasks"));
        assert!(refused(Some(vec![task("x", "p"), task("x", "q")]), None).contains("twice"));
        assert!(refused(Some(vec![task("x", "")]), None).contains("empty"));
    }

    #[test]
    fn runs_of_the_same_second_have_lines_of_their_own() {
        let (a, b) = (Uuid::now_v7(), Uuid::now_v7());
        assert_ne!(line_of(a), line_of(b));
        assert_eq!(line_of(a).len(), 12);
    }

    #[test]
    fn a_request_is_read_by_its_kind() {
        let read = |json: &str| serde_json::from_str::<Request>(json);
        let sft = read(r#"{"kind": "sft", "dataset": "a@1", "base_version": 3}"#).unwrap();
        let Request::Sft(sft) = sft else { panic!("{sft:?}") };
        assert_eq!((sft.base_version, sft.config.dataset.version), (Some(3), 1));
        assert!(matches!(
            read(r#"{"kind": "dpo", "dataset": "a@1", "steps": 3}"#),
            Ok(Request::Dpo(_))
        ));
        assert!(matches!(
            read(r#"{"kind": "kto", "dataset": "a@1", "threshold": 0}"#),
            Ok(Request::Kto(_))
        ));
        assert!(matches!(
            read(r#"{"kind": "evaluate", "dataset": "a@1"}"#),
            Ok(Request::Evaluate(_))
        ));
        assert!(matches!(
            read(r#"{"kind": "export", "dataset": "a@1"}"#),
            Ok(Request::Export(_))
        ));
        for wrong in [
            r#"{"kind": "dpo", "dataset": "a@1"}"#,
            r#"{"kind": "dpo", "dataset": "a@1", "steps": 1, "threshold": 0.5}"#,
            r#"{"kind": "kto", "dataset": "a@1"}"#,
            r#"{"kind": "ppo", "dataset": "a@1"}"#,
            r#"{"kind": "grpo", "grop_size": 4}"#,
            r#"{"kind": "sft", "dataset": "a@1", "batch": 4}"#,
            r#"{"kind": "evaluate", "dataset": "a@1", "steps": 4}"#,
            r#"{"kind": "export", "dataset": "a@1", "form": "jsonl"}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
