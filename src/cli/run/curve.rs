//! What the steps of a run measured, as the control API has it.

use super::super::control_client::ControlClient;
use super::super::output::{cell, table};
use serde_json::Value;
use uuid::Uuid;

/// Points that are asked for together.
const PAGE: &str = "1000";

/// All points of a run, the first step first.
pub(super) async fn points(client: &ControlClient, id: Uuid) -> anyhow::Result<Vec<Value>> {
    let mut points: Vec<Value> = Vec::new();
    loop {
        let after = points
            .last()
            .map_or(0, |point| point["step"].as_i64().unwrap_or(i64::MAX));
        let query = [("after", after.to_string()), ("limit", PAGE.to_owned())];
        let query = query.each_ref().map(|(name, value)| (*name, value.as_str()));
        let mut page: Value = client.get(&format!("/v1/runs/{id}/curve"), &query).await?;
        let Value::Array(more) = page["data"].take() else {
            return Ok(points);
        };
        let is_last = more.is_empty() || page["has_more"] != true;
        points.extend(more);
        if is_last {
            return Ok(points);
        }
    }
}

/// The numbers of a point with their names, such as `loss` and `reward/mean`.
pub(super) fn scalars(point: &Value) -> Vec<(String, f64)> {
    const PLAIN: [&str; 10] = [
        "version",
        "loss",
        "kl",
        "gradient_norm",
        "entropy",
        "trajectories",
        "sequences",
        "tokens",
        "sequences_per_second",
        "stale_share",
    ];
    let mut scalars: Vec<(String, &Value)> = PLAIN.iter().map(|name| ((*name).to_owned(), &point[name])).collect();
    scalars.extend([
        ("reward/mean".to_owned(), &point["reward_mean"]),
        ("reward/low".to_owned(), &point["reward_interval"][0]),
        ("reward/high".to_owned(), &point["reward_interval"][1]),
        ("waste/quarantined".to_owned(), &point["quarantined"]),
    ]);
    for (folder, field) in [("waste", "refused"), ("preference", "preference")] {
        let fields = point[field].as_object().into_iter().flatten();
        scalars.extend(fields.map(|(name, value)| (format!("{folder}/{name}"), value)));
    }
    scalars
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.as_f64()?)))
        .collect()
}

pub(super) fn text(points: &[Value]) -> String {
    let number = |value: &Value| value.as_f64().map_or_else(String::new, |value| format!("{value:.4}"));
    let row = |point: &Value| {
        let interval = &point["reward_interval"];
        let reward = match interval.is_array() {
            true => format!(
                "{} [{}, {}]",
                number(&point["reward_mean"]),
                number(&interval[0]),
                number(&interval[1])
            ),
            false => number(&point["reward_mean"]),
        };
        [
            cell(&point["step"]),
            cell(&point["version"]),
            number(&point["loss"]),
            number(&point["kl"]),
            reward,
            number(&point["sequences_per_second"]),
            number(&point["stale_share"]),
        ]
    };
    let header = [
        ">step",
        ">version",
        ">loss",
        ">KL",
        "reward [95%]",
        ">sequences/s",
        ">stale",
    ];
    match points {
        [] => "the run has made no step yet".to_owned(),
        points => table(header, points.iter().map(row)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_point_has_a_number_for_everything_that_was_measured() {
        let point = json!({
            "step": 1, "version": 4, "loss": 0.5, "kl": null, "reward_mean": 0.25, "reward_interval": [0.0, 0.5],
            "quarantined": 2, "refused": {"greedy": 3}, "preference": {"accuracy": 1.0}, "committed_at": "x",
        });
        let expected = [
            ("version", 4.0),
            ("loss", 0.5),
            ("reward/mean", 0.25),
            ("reward/low", 0.0),
            ("reward/high", 0.5),
            ("waste/quarantined", 2.0),
            ("waste/greedy", 3.0),
            ("preference/accuracy", 1.0),
        ];
        assert_eq!(scalars(&point), expected.map(|(name, value)| (name.to_owned(), value)));
    }
}
