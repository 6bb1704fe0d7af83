//! What an operator sets of ingest, and the contradictions that are refused before anything starts.

use serde::{Deserialize, Serialize};

use crate::reward::{Definition, Metric, MetricType, Rule};

/// `[ingest]` of the configuration file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// `[[ingest.surface]]`: how each surface turns signals into rewards. Default: `completion`. The surface `rollout`,
    /// whose reward is the float that a grader gives, always exists; one of that name here replaces it.
    pub surface: Vec<Definition>,
    /// `[[ingest.metric]]`: what feedback can be about beside the metrics that surfaces name, `comment` and
    /// `demonstration`. Default: none.
    pub metric: Vec<Metric>,
    /// Partitions of the event topics where they are made. Default: 4.
    pub partitions: i32,
    /// How long feedback may wait for its generation before a copy goes to the dead letters, seconds. Default: 600.
    pub orphan_ttl_seconds: f64,
    /// How long after a horizon feedback may still be on its way to the log, seconds. Default: 0.25.
    pub close_grace_seconds: f64,
    /// Share of a surface's latest trajectories that may close without a usable signal before an alarm. Default: 0.9.
    pub unscored_share_max: f64,
    /// How far ahead of this machine's clock an event may claim to have happened, seconds. Default: 300.
    pub clock_skew_seconds_max: f64,
    /// Records written in one transaction at most. Default: 500.
    pub batch_records_max: usize,
    /// How long the first record of a batch waits for more, milliseconds. Default: 10.
    pub batch_wait_ms: u64,
    /// Go on although the log is not the one that the tables were filled from (another cluster, a recreated topic,
    /// records removed by retention before they were read). What the old log still held is lost. Default: false.
    pub accept_other_log: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            surface: vec![Definition::completion()],
            metric: Vec::new(),
            partitions: 4,
            orphan_ttl_seconds: 600.0,
            close_grace_seconds: 0.25,
            unscored_share_max: 0.9,
            clock_skew_seconds_max: 300.0,
            batch_records_max: 500,
            batch_wait_ms: 10,
            accept_other_log: false,
        }
    }
}

impl Options {
    /// Every surface in force, the built-in one included.
    pub fn surfaces(&self) -> Vec<Definition> {
        let mut surfaces = self.surface.clone();
        if !surfaces.iter().any(|surface| surface.name == "rollout") {
            surfaces.push(Definition::rollout());
        }
        surfaces
    }

    /// Every metric in force: those declared, those that surfaces name, and the two that always exist.
    pub fn metrics(&self) -> anyhow::Result<Vec<Metric>> {
        let mut metrics = self.metric.clone();
        for (index, metric) in metrics.iter().enumerate() {
            let name = &metric.name;
            anyhow::ensure!(!name.is_empty(), "ingest.metric: a name is empty");
            let twice = metrics[..index].iter().any(|other| other.name == *name);
            anyhow::ensure!(!twice, "ingest.metric {name:?} is there twice");
        }
        let surfaces = self.surfaces();
        let named = surfaces
            .iter()
            .map(|surface| (surface.metric.as_str(), surface.metric_type));
        let always = [
            ("comment", MetricType::Comment),
            ("demonstration", MetricType::Demonstration),
        ];
        for (name, metric_type) in named.chain(always) {
            match metrics.iter().find(|metric| metric.name == name) {
                Some(metric) => anyhow::ensure!(
                    metric.metric_type == metric_type,
                    "metric {name:?} is a {} in one place of [ingest] and a {} in another",
                    metric.metric_type.as_str(),
                    metric_type.as_str()
                ),
                None => metrics.push(Metric::new(name, metric_type)),
            }
        }
        Ok(metrics)
    }

    /// How each surface scores. Refuses a reward expression that cannot be computed.
    pub fn rules(&self) -> anyhow::Result<Vec<Rule>> {
        let metrics = self.metrics()?;
        let surfaces = self.surfaces().into_iter();
        surfaces.map(|surface| Rule::new(surface, &metrics)).collect()
    }

    /// Refuses values out of range and surfaces that contradict each other.
    pub fn check(&self) -> anyhow::Result<()> {
        use anyhow::ensure;
        let positive = |value: f64| value.is_finite() && value > 0.0;
        ensure!(self.partitions > 0, "ingest.partitions must be at least 1");
        ensure!(
            positive(self.orphan_ttl_seconds),
            "ingest.orphan_ttl_seconds must be positive"
        );
        ensure!(
            self.close_grace_seconds.is_finite() && self.close_grace_seconds >= 0.0,
            "ingest.close_grace_seconds must not be negative"
        );
        ensure!(
            (0.0..=1.0).contains(&self.unscored_share_max),
            "ingest.unscored_share_max must be from 0 to 1"
        );
        ensure!(
            positive(self.clock_skew_seconds_max),
            "ingest.clock_skew_seconds_max must be positive"
        );
        ensure!(
            (1..=10_000).contains(&self.batch_records_max),
            "ingest.batch_records_max must be between 1 and 10000"
        );
        ensure!(self.batch_wait_ms <= 1_000, "ingest.batch_wait_ms must be at most 1000");
        let surfaces = self.surfaces();
        for (index, surface) in surfaces.iter().enumerate() {
            surface.check()?;
            ensure!(
                !surfaces[..index].iter().any(|other| other.name == surface.name),
                "ingest.surface {:?} is there twice",
                surface.name
            );
        }
        self.rules().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_in_order() {
        Options::default().check().unwrap();
        let names: Vec<_> = Options::default()
            .surfaces()
            .into_iter()
            .map(|surface| surface.name)
            .collect();
        assert_eq!(names, ["completion", "rollout"]);
    }

    #[test]
    fn a_metric_has_one_type_everywhere() {
        let mut options = Options::default();
        options.surface.push(Definition {
            name: "chat".to_owned(),
            metric_type: MetricType::Float,
            ..Definition::completion()
        });
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("in another"), "{error}");
    }

    #[test]
    fn a_surface_is_defined_once() {
        let options = Options {
            surface: vec![Definition::completion(), Definition::completion()],
            ..Options::default()
        };
        assert!(options.check().is_err());
    }
}
