//! `GET /v1/runs/{id}/spec`: the request that makes the same run again. `POST /v1/runs/{id}/fork`: makes
//! it again from a version of its line, with some fields changed.

use super::create::{Request, Task};
use super::runs::{self, Run};
use super::{Shared, database};
use axum::extract::State;
use axum::http::StatusCode;
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use serde_json::{Map, Value, json};
use sqlx::PgPool;
use uuid::Uuid;

/// Fields of an export's configuration that its key decides, not its request.
const DECIDED_BY_KEY: [&str; 2] = ["tenant", "all_tenants"];

pub(super) async fn spec(State(shared): State<Shared>, Path(id): Path<Uuid>) -> Result<Json<Value>, Problem> {
    let run = runs::get(&shared.pool, &shared.policy, id).await?;
    Ok(Json(Value::Object(of(&shared.pool, &run).await?)))
}

/// Fields of the body replace those of the spec, as a whole each; `null` takes a field away.
pub(super) async fn fork(
    State(shared): State<Shared>,
    principal: Principal,
    Path(id): Path<Uuid>,
    Json(changes): Json<Map<String, Value>>,
) -> Result<(StatusCode, Json<Run>), Problem> {
    let run = runs::get(&shared.pool, &shared.policy, id).await?;
    let mut request = of(&shared.pool, &run).await?;
    if let Some(base) = request.get_mut("base_version") {
        *base = match changes.get("base_version") {
            None => json!(run.head.or(run.base_version)),
            Some(chosen) => json!(of_line(&shared, &run, chosen).await?),
        };
    }
    let changes = changes.into_iter().filter(|(field, _)| field != "base_version");
    change(&mut request, changes, &run.kind)?;
    let request: Request = serde_json::from_value(Value::Object(request))
        .map_err(|why| Problem::bad_request(format!("the fork of run {id} with these changes: {why}")))?;
    shared.create(request, &principal, Some(id)).await
}

fn change(
    request: &mut Map<String, Value>,
    changes: impl Iterator<Item = (String, Value)>,
    kind: &str,
) -> Result<(), Problem> {
    for (field, value) in changes {
        if field == "kind" && value != kind {
            let why = format!("kind: a fork of a run of kind {kind} has the same kind; create another run instead");
            return Err(Problem::bad_request(why));
        }
        if field == "tasks_jsonl" && !value.is_null() {
            request.remove("tasks"); // it gives the same in another form
        }
        match value {
            Value::Null => request.remove(&field),
            value => request.insert(field, value),
        };
    }
    Ok(())
}

/// The version that a fork is to start from: the run's base version, or one that it made.
async fn of_line(shared: &Shared, run: &Run, chosen: &Value) -> Result<i64, Problem> {
    let chosen = chosen
        .as_i64()
        .ok_or_else(|| Problem::bad_request("base_version must be the serial of a version"))?;
    if run.base_version == Some(chosen) {
        return Ok(chosen);
    }
    let made = sqlx::query_scalar!(
        r#"select exists (select from version where policy = $1 and serial = $2 and line = $3) as "made!""#,
        run.policy,
        chosen,
        run.line
    )
    .fetch_one(&shared.pool)
    .await
    .map_err(database)?;
    match made {
        true => Ok(chosen),
        false => Err(Problem::bad_request(format!(
            "base_version: run {} did not make version {chosen}; `springtide run checkpoints {}` lists those that it \
             made. To start elsewhere, send its spec with another base_version to POST /v1/runs",
            run.id, run.id
        ))),
    }
}

/// The body of `POST /v1/runs` that makes this run.
async fn of(pool: &PgPool, run: &Run) -> Result<Map<String, Value>, Problem> {
    if run.kind == "realtime" {
        let why = "the realtime run is made by the configuration ([trainer.realtime] in springtide.toml), not by a \
                   request";
        return Err(Problem::conflict(why));
    }
    let mut spec = without_tasks(run);
    if run.kind == "grpo" {
        let tasks = sqlx::query_as!(
            Task,
            "select id, prompt, answer from task where run_id = $1 order by id",
            run.id
        )
        .fetch_all(pool)
        .await
        .map_err(database)?;
        let tasks = tasks
            .into_iter()
            .map(|task| json!({"id": task.id, "prompt": task.prompt, "answer": task.answer}));
        spec.insert("tasks".into(), tasks.collect());
    }
    Ok(spec)
}

fn without_tasks(run: &Run) -> Map<String, Value> {
    let mut spec = run.config.as_object().cloned().unwrap_or_default();
    if run.kind == "export" {
        for field in DECIDED_BY_KEY {
            spec.remove(field);
        }
    }
    spec.insert("kind".into(), json!(run.kind));
    spec.insert("policy".into(), json!(run.policy));
    if let Some(base) = run.base_version {
        spec.insert("base_version".into(), json!(base));
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: &Value) -> Result<Value, Problem> {
        let mut request = json!({"kind": "sft", "steps": 3, "schedule": {"priority": 1}, "tasks": []});
        let map = request.as_object_mut().unwrap();
        let changes = changes.as_object().unwrap().clone();
        change(map, changes.into_iter(), "sft").map(|()| request)
    }

    #[test]
    fn a_fork_has_the_fields_of_its_body_instead_of_those_of_the_run() {
        let forked = changed(&json!({"steps": 5, "schedule": null, "seed": 1, "kind": "sft"})).unwrap();
        assert_eq!(forked, json!({"kind": "sft", "steps": 5, "seed": 1, "tasks": []}));
        let other_tasks = changed(&json!({"tasks_jsonl": "{}"})).unwrap();
        assert!(other_tasks.get("tasks").is_none());
        assert!(changed(&json!({"kind": "dpo"})).is_err());
    }
}
