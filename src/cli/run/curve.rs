//! What the steps of a run measured, as the control API has it.

use super::super::control_client::ControlClient;
use super::super::output::table;
use runs::api::curve::{Curve, Point};
use uuid::Uuid;

/// Points that are asked for together.
const PAGE: &str = "1000";

/// All points of a run, the first step first.
pub(super) async fn points(client: &ControlClient, id: Uuid) -> anyhow::Result<Vec<Point>> {
    let mut points: Vec<Point> = Vec::new();
    loop {
        let after = points.last().map_or(0, |point| point.step).to_string();
        let query = [("after", after.as_str()), ("limit", PAGE)];
        let page: Curve = client.get(&format!("/v1/runs/{id}/curve"), &query).await?;
        let more = page.points;
        let is_last = more.data.is_empty() || !more.has_more;
        points.extend(more.data);
        if is_last {
            return Ok(points);
        }
    }
}

/// The numbers of a point with their names, such as `loss` and `reward/mean`.
pub(super) fn scalars(point: &Point) -> Vec<(String, f64)> {
    let count = |count: Option<u64>| count.map(|count| count as f64);
    let [low, high] = point.reward_interval.map_or([None; 2], |ends| ends.map(Some));
    let plain = [
        ("version", Some(point.version as f64)),
        ("loss", point.loss),
        ("kl", point.kl),
        ("gradient_norm", point.gradient_norm),
        ("entropy", point.entropy),
        ("trajectories", count(point.trajectories)),
        ("sequences", count(point.sequences)),
        ("tokens", count(point.tokens)),
        ("sequences_per_second", point.sequences_per_second),
        ("stale_share", point.stale_share),
        ("reward/mean", point.reward_mean),
        ("reward/low", low),
        ("reward/high", high),
        ("waste/quarantined", count(point.quarantined)),
    ];
    let plain = plain.into_iter().map(|(name, value)| (name.to_owned(), value));
    let refused = point.refused.iter();
    let refused = refused.map(|(code, number)| (format!("waste/{code}"), Some(*number as f64)));
    let preference = point
        .preference
        .iter()
        .filter_map(|measured| measured.as_object())
        .flatten();
    let preference = preference.map(|(name, value)| (format!("preference/{name}"), value.as_f64()));
    let all = plain.chain(refused).chain(preference);
    all.filter_map(|(name, value)| Some((name, value?))).collect()
}

pub(super) fn text(points: &[Point]) -> String {
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.4}"));
    let row = |point: &Point| {
        let interval = point
            .reward_interval
            .map(|[low, high]| format!(" [{low:.4}, {high:.4}]"));
        [
            point.step.to_string(),
            point.version.to_string(),
            number(point.loss),
            number(point.kl),
            number(point.reward_mean) + &interval.unwrap_or_default(),
            number(point.sequences_per_second),
            number(point.stale_share),
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
            "quarantined": 2, "refused": {"greedy": 3}, "preference": {"accuracy": 1.0},
            "committed_at": "2026-11-25T12:00:00Z",
        });
        let point: Point = serde_json::from_value(point).unwrap();
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
