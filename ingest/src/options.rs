//! What an operator sets of ingest, and the contradictions that are refused before anything starts.

use serde::{Deserialize, Serialize};

use crate::api::REQUEST_BYTES;
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
    /// Records written together at most, shared out among the writers. Default: 500.
    pub batch_records_max: usize,
    /// How long the first record of a batch waits for more, milliseconds. Default: 10.
    pub batch_wait_ms: u64,
    /// Transactions of a batch at once, the partitions divided among them; of each process. Default: 2.
    pub writers: usize,
    /// Go on although the log is not the one that the tables were filled from (another cluster, a recreated topic,
    /// records removed by retention before they were read). What the old log still held is lost. Default: false.
    pub accept_other_log: bool,
    /// Object store of payloads by reference, a `file://` or `s3://` URL. Default: `payloads` in the state folder.
    pub payload_store: Option<String>,
    /// How long a payload waits for an event that names it, hours; then it goes. Naming it later needs it to be put again. 0: for
    /// ever. Default: 168.
    pub payload_unnamed_hours: u32,
    /// How long generations are kept, with everything about them, days; whole weeks go. 0: for ever. Default: 365.
    pub retention_days: u32,
    /// Disk that ingest's tables may take, bytes. Beyond it the oldest weeks go; when none may, events get 507. 0: no bound.
    /// Default: 0.
    pub disk_bytes_max: u64,
    /// Largest body of an HTTP request, and what a compressed one may grow to, bytes. Default: 8 MiB.
    pub request_bytes_max: usize,
    /// How long a body may take to arrive, seconds. Default: 30.
    pub request_read_seconds_max: f64,
    /// Events of one batch. Default: 500.
    pub request_events_max: usize,
    /// Events of one batch that wait for the log's acknowledgement at once. Default: 256.
    pub request_sends_max: usize,
    /// Bytes of bodies, decompressed, that this process holds at once; a request beyond it gets 429. What their events take
    /// in memory is a small multiple. Default: 64 MiB.
    pub in_flight_bytes_max: usize,
    /// Largest share of it that one tenant may hold, alone; tenants that all want more get the same each, and one more
    /// always finds room. Default: 0.5.
    pub tenant_share_max: f64,
    /// Sends in a row that the log does not acknowledge before further ones are refused at once. Default: 5.
    pub log_failures_max: u32,
    /// While they are refused: how often one is let through to see whether the log is back, seconds. Default: 1.
    pub log_probe_seconds: f64,
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
            writers: 2,
            accept_other_log: false,
            payload_store: None,
            payload_unnamed_hours: 168,
            retention_days: 365,
            disk_bytes_max: 0,
            request_bytes_max: 8 * 1024 * 1024,
            request_read_seconds_max: 30.0,
            request_events_max: 500,
            request_sends_max: 256,
            in_flight_bytes_max: 64 * 1024 * 1024,
            tenant_share_max: 0.5,
            log_failures_max: 5,
            log_probe_seconds: 1.0,
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

    /// How `definition` would score in the place of the surface of its name. `metrics` take the place of those of their names.
    pub fn rule_of(&self, definition: Definition, metrics: &[Metric]) -> anyhow::Result<Rule> {
        let mut options = self.clone();
        options
            .metric
            .retain(|metric| !metrics.iter().any(|other| other.name == metric.name));
        options.metric.extend_from_slice(metrics);
        options.surface.retain(|surface| surface.name != definition.name);
        options.surface.push(definition.clone());
        options.check()?;
        Rule::new(definition, &options.metrics()?)
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
        ensure!(
            (1..=64).contains(&self.writers),
            "ingest.writers must be between 1 and 64"
        );
        ensure!(
            self.retention_days <= 36_500,
            "ingest.retention_days must be at most 36500; 0 keeps for ever"
        );
        ensure!(
            self.payload_unnamed_hours <= 876_000,
            "ingest.payload_unnamed_hours must be at most 876000; 0 keeps for ever"
        );
        self.check_requests()?;
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

    fn check_requests(&self) -> anyhow::Result<()> {
        use anyhow::ensure;
        ensure!(
            (1024..=1 << 30).contains(&self.request_bytes_max),
            "ingest.request_bytes_max must be between 1024 and 1073741824"
        );
        ensure!(
            self.request_read_seconds_max > 0.0 && self.request_read_seconds_max <= 3600.0,
            "ingest.request_read_seconds_max must be above 0 and at most 3600"
        );
        ensure!(
            (1..=10_000).contains(&self.request_events_max),
            "ingest.request_events_max must be between 1 and 10000"
        );
        ensure!(
            (1..=10_000).contains(&self.request_sends_max),
            "ingest.request_sends_max must be between 1 and 10000"
        );
        ensure!(
            self.tenant_share_max > 0.0 && self.tenant_share_max < 1.0,
            "ingest.tenant_share_max must be between 0 and 1, and neither"
        );
        ensure!(self.log_failures_max > 0, "ingest.log_failures_max must be at least 1");
        ensure!(
            self.log_probe_seconds > 0.0 && self.log_probe_seconds <= 3600.0,
            "ingest.log_probe_seconds must be above 0 and at most 3600"
        );
        // A request that can never be admitted would be told to come again for ever.
        let needed = (self.request_bytes_max + REQUEST_BYTES) as f64 / self.tenant_share_max;
        ensure!(
            self.in_flight_bytes_max as f64 >= needed.ceil(),
            "ingest.in_flight_bytes_max must be at least {needed:.0}: a request of request_bytes_max has to fit into one \
             tenant's share"
        );
        Ok(())
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
    fn the_largest_request_fits_into_one_tenants_share() {
        let exactly = Options {
            request_bytes_max: 1024 * 1024 - REQUEST_BYTES,
            in_flight_bytes_max: 4 * 1024 * 1024,
            tenant_share_max: 0.25,
            ..Options::default()
        };
        exactly.check().unwrap();
        let short = Options {
            in_flight_bytes_max: exactly.in_flight_bytes_max - 1,
            ..exactly
        };
        let error = short.check().unwrap_err().to_string();
        assert!(error.contains("in_flight_bytes_max"), "{error}");
        for share in [0.0, 1.0, f64::NAN] {
            let odd = Options {
                tenant_share_max: share,
                ..Options::default()
            };
            assert!(odd.check().is_err(), "{share}");
        }
    }

    #[test]
    fn a_definition_can_be_tried_in_the_place_of_its_surface() {
        let kept = Definition {
            reward: Some("kept".to_owned()),
            ..Definition::completion()
        };
        let options = Options::default();
        let error = options.rule_of(kept.clone(), &[]).unwrap_err();
        assert!(format!("{error:#}").contains("names \"kept\""), "{error:#}");
        let metric = Metric::new("kept", MetricType::Float);
        let rule = options.rule_of(kept.clone(), &[metric]).unwrap();
        assert_eq!(rule.definition, kept);
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
