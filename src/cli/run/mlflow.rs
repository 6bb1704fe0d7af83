//! `springtide run export-mlflow`: the steps of a run as a run of an MLflow server, over its REST API.

use super::super::control_client::ControlClient;
use super::curve;
use anyhow::{Context, bail};
use reqwest::StatusCode;
use runs::api::curve::Point;
use runs::api::runs::Run;
use serde_json::{Value, json};
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

const TIMEOUT: Duration = Duration::from_secs(60);
/// What one request of MLflow takes.
const METRICS_MAX: usize = 1_000;
const PARAMETERS_MAX: usize = 100;
const PARAMETER_CHARS_MAX: usize = 6_000;

/// An MLflow server.
struct Mlflow<'a> {
    http: reqwest::Client,
    url: &'a str,
}

/// Makes a run of the experiment. Returns its id.
pub(super) async fn export(client: &ControlClient, id: Uuid, url: &str, experiment: &str) -> anyhow::Result<String> {
    let run: Run = client.get(&format!("/v1/runs/{id}"), &[]).await?;
    let points = curve::points(client, id).await?;
    let metrics = metrics(&points);
    let server = Mlflow {
        http: edge::tls::client()
            .timeout(TIMEOUT)
            .build()
            .context("set up HTTP client")?,
        url: url.trim_end_matches('/'),
    };
    let experiment = server.experiment(experiment).await?;
    let body = json!({
        "experiment_id": experiment,
        "run_name": run.line,
        "start_time": milliseconds(run.started_at.unwrap_or(run.created_at)),
        "tags": [{"key": "springtide.run", "value": id.to_string()}, {"key": "springtide.kind", "value": run.kind}],
    });
    let made = server.post("runs/create", &body).await?;
    let made = made["run"]["info"]["run_id"]
        .as_str()
        .context("MLflow's answer has no run_id")?
        .to_owned();
    for parameters in parameters(&run.config, run.base_version).chunks(PARAMETERS_MAX) {
        server
            .post("runs/log-batch", &json!({"run_id": made, "params": parameters}))
            .await?;
    }
    for metrics in metrics.chunks(METRICS_MAX) {
        server
            .post("runs/log-batch", &json!({"run_id": made, "metrics": metrics}))
            .await?;
    }
    let status = match run.status.as_str() {
        "succeeded" => "FINISHED",
        "failed" => "FAILED",
        "cancelled" => "KILLED",
        _ => "RUNNING",
    };
    let mut update = json!({"run_id": made, "status": status});
    if let Some(finished) = run.finished_at {
        update["end_time"] = milliseconds(finished).into();
    }
    server.post("runs/update", &update).await?;
    Ok(made)
}

fn metrics(points: &[Point]) -> Vec<Value> {
    let of = |point: &Point| {
        let (at, step) = (milliseconds(point.committed_at), point.step);
        let scalars = curve::scalars(point).into_iter();
        scalars.map(move |(key, value)| json!({"key": key, "value": value, "timestamp": at, "step": step}))
    };
    points.iter().flat_map(of).collect()
}

/// The run's configuration, and what it starts from.
fn parameters(config: &Value, base_version: Option<i64>) -> Vec<Value> {
    let base = json!(base_version);
    let fields = config.as_object().into_iter().flatten();
    let fields = fields.map(|(name, value)| (name.as_str(), value));
    let all = fields.chain([("base_version", &base)]);
    all.map(|(name, value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let text: String = text.chars().take(PARAMETER_CHARS_MAX).collect();
        json!({"key": name, "value": text})
    })
    .collect()
}

fn milliseconds(at: OffsetDateTime) -> i64 {
    (at.unix_timestamp_nanos() / 1_000_000) as i64
}

impl Mlflow<'_> {
    /// The id of the experiment of this name, which is made if there is none.
    async fn experiment(&self, name: &str) -> anyhow::Result<String> {
        let url = format!("{}/api/2.0/mlflow/experiments/get-by-name", self.url);
        let request = self.http.get(url).query(&[("experiment_name", name)]);
        let (status, found) = self.send(request).await?;
        let id = match status {
            StatusCode::NOT_FOUND => {
                let made = self.post("experiments/create", &json!({"name": name})).await?;
                made["experiment_id"].as_str().map(str::to_owned)
            }
            status if status.is_success() => found["experiment"]["experiment_id"].as_str().map(str::to_owned),
            status => bail!("MLflow at {} answered {status}: {}", self.url, found["message"]),
        };
        id.context("MLflow's answer has no experiment_id")
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let request = self.http.post(format!("{}/api/2.0/mlflow/{path}", self.url)).json(body);
        match self.send(request).await? {
            (status, answer) if status.is_success() => Ok(answer),
            (status, answer) => bail!(
                "MLflow at {} refused {path} with {status}: {}",
                self.url,
                answer["message"]
            ),
        }
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> anyhow::Result<(StatusCode, Value)> {
        let unreachable = || format!("reach MLflow at {}; is it running?", self.url);
        let response = request.send().await.with_context(unreachable)?;
        let status = response.status();
        let body = response.bytes().await.context("read MLflow's answer")?;
        // an error need not be JSON; its status is enough
        Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_a_point_is_a_metric_of_its_step() {
        let point =
            json!({"step": 2, "version": 3, "loss": 0.5, "refused": {}, "committed_at": "2026-11-25T12:00:00.5Z"});
        let points = [serde_json::from_value(point).unwrap()];
        let expected = [("version", 3.0), ("loss", 0.5)]
            .map(|(key, value)| json!({"key": key, "value": value, "timestamp": 1_795_608_000_500_i64, "step": 2}));
        assert_eq!(metrics(&points), expected);
    }

    #[test]
    fn the_configuration_is_the_parameters_as_text() {
        let config = json!({"dataset": "a@1", "steps": 3});
        let expected = [("dataset", "a@1"), ("steps", "3"), ("base_version", "7")];
        assert_eq!(
            parameters(&config, Some(7)),
            expected.map(|(key, value)| json!({"key": key, "value": value}))
        );
    }
}
