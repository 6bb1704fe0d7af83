//! `springtide run export-mlflow`: the steps of a run as a run of an MLflow server, over its REST API.

use super::super::control_client::ControlClient;
use super::curve;
use anyhow::{Context, bail};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
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
    let run: Value = client.get(&format!("/v1/runs/{id}"), &[]).await?;
    let points = curve::points(client, id).await?;
    let metrics = metrics(&points)?;
    let server = Mlflow {
        http: edge::tls::client()
            .timeout(TIMEOUT)
            .build()
            .context("set up HTTP client")?,
        url: url.trim_end_matches('/'),
    };
    let experiment = server.experiment(experiment).await?;
    let begun = run["started_at"].as_str().or(run["created_at"].as_str());
    let body = json!({
        "experiment_id": experiment,
        "run_name": run["line"],
        "start_time": milliseconds(begun)?,
        "tags": [{"key": "springtide.run", "value": id.to_string()}, {"key": "springtide.kind", "value": run["kind"]}],
    });
    let made = server.post("runs/create", &body).await?;
    let made = made["run"]["info"]["run_id"]
        .as_str()
        .context("MLflow's answer has no run_id")?
        .to_owned();
    for parameters in parameters(&run).chunks(PARAMETERS_MAX) {
        server
            .post("runs/log-batch", &json!({"run_id": made, "params": parameters}))
            .await?;
    }
    for metrics in metrics.chunks(METRICS_MAX) {
        server
            .post("runs/log-batch", &json!({"run_id": made, "metrics": metrics}))
            .await?;
    }
    let status = match run["status"].as_str() {
        Some("succeeded") => "FINISHED",
        Some("failed") => "FAILED",
        Some("cancelled") => "KILLED",
        _ => "RUNNING",
    };
    let mut update = json!({"run_id": made, "status": status});
    if let Some(finished) = run["finished_at"].as_str() {
        update["end_time"] = milliseconds(Some(finished))?.into();
    }
    server.post("runs/update", &update).await?;
    Ok(made)
}

fn metrics(points: &[Value]) -> anyhow::Result<Vec<Value>> {
    let mut metrics = Vec::new();
    for point in points {
        let at = milliseconds(point["committed_at"].as_str())?;
        let scalars = curve::scalars(point).into_iter();
        metrics.extend(
            scalars.map(|(key, value)| json!({"key": key, "value": value, "timestamp": at, "step": point["step"]})),
        );
    }
    Ok(metrics)
}

/// The run's configuration, and what it starts from.
fn parameters(run: &Value) -> Vec<Value> {
    let fields = run["config"].as_object().into_iter().flatten();
    let fields = fields.map(|(name, value)| (name.as_str(), value));
    let all = fields.chain([("base_version", &run["base_version"])]);
    all.map(|(name, value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let text: String = text.chars().take(PARAMETER_CHARS_MAX).collect();
        json!({"key": name, "value": text})
    })
    .collect()
}

fn milliseconds(at: Option<&str>) -> anyhow::Result<i64> {
    let text = at.context("a time is missing in the control API's answer")?;
    let at = OffsetDateTime::parse(text, &Rfc3339).with_context(|| format!("read the time {text}"))?;
    i64::try_from(at.unix_timestamp_nanos() / 1_000_000).context("a time out of range")
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
        let points = [json!({"step": 2, "loss": 0.5, "kl": 0.25, "committed_at": "2026-11-25T12:00:00.5Z"})];
        let expected = [("loss", 0.5), ("kl", 0.25)]
            .map(|(key, value)| json!({"key": key, "value": value, "timestamp": 1_795_608_000_500_i64, "step": 2}));
        assert_eq!(metrics(&points).unwrap(), expected);
    }

    #[test]
    fn the_configuration_is_the_parameters_as_text() {
        let run = json!({"config": {"dataset": "a@1", "steps": 3}, "base_version": 7});
        let expected = [("dataset", "a@1"), ("steps", "3"), ("base_version", "7")];
        assert_eq!(
            parameters(&run),
            expected.map(|(key, value)| json!({"key": key, "value": value}))
        );
    }
}
