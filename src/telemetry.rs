//! Logs on standard error, Prometheus metrics at `/metrics`, and traces over OTLP where an endpoint
//! is set. Callers must not log prompt text, tokens or secrets.

use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::config::{self, LogFormat};
use crate::console;

/// Bucket bounds of every `_seconds` histogram: 100 µs to a minute.
const SECONDS: [f64; 18] = [
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];
/// How often the exporter moves new samples into its histograms.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// For modules that log every connection or rebalance at info.
const QUIET: &str = "sqlx=warn,librdkafka=warn,hyper=warn,h2=warn";

/// Keep it until the process ends: dropping it sends the remaining traces.
pub struct Telemetry {
    metrics: PrometheusHandle,
    traces: Option<SdkTracerProvider>,
}

/// Sets up logging, metrics and traces. Call it once, outside of a tokio runtime, because the
/// exporter blocks.
pub fn init(role: &'static str, options: &config::Telemetry) -> anyhow::Result<Telemetry> {
    let filter = EnvFilter::try_new(format!("{QUIET},{}", options.filter))
        .with_context(|| format!("parse telemetry.filter {:?}", options.filter))?;
    let traces = options
        .otlp_endpoint
        .as_deref()
        .map(|endpoint| exporter(role, endpoint))
        .transpose()?;
    let spans = traces
        .as_ref()
        .map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer("springtide")));
    tracing_subscriber::registry()
        .with(filter)
        .with(spans)
        .with(log_lines(options.format))
        .try_init()
        .context("set up logging")?;
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .context("set histogram bounds")?
        .add_global_label("role", role)
        .install_recorder()
        .context("set up metrics")?;
    upkeep(metrics.clone())?;
    Ok(Telemetry { metrics, traces })
}

/// For commands that are not roles: logs warnings, no metrics.
pub fn init_warnings() -> anyhow::Result<()> {
    tracing_subscriber::registry()
        .with(EnvFilter::new("warn,librdkafka=off"))
        .with(log_lines(LogFormat::Human))
        .try_init()
        .context("set up logging")
}

impl Telemetry {
    /// `GET /metrics`.
    pub fn router(&self) -> Router {
        let metrics = self.metrics.clone();
        let render = move || std::future::ready(metrics.render());
        Router::new().route("/metrics", get(render))
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(traces) = &self.traces
            && let Err(error) = traces.shutdown()
        {
            eprintln!("could not send the last traces: {error}");
        }
    }
}

fn log_lines<S>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    let lines = fmt::layer().with_writer(|| console::Writer);
    match format {
        LogFormat::Human => {
            let color = std::io::IsTerminal::is_terminal(&std::io::stderr());
            lines.with_ansi(color).boxed()
        }
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

fn exporter(role: &'static str, endpoint: &str) -> anyhow::Result<SdkTracerProvider> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_endpoint(endpoint)
        .build()
        .with_context(|| format!("set up traces to {endpoint}"))?;
    let resource = Resource::builder()
        .with_service_name(format!("springtide-{role}"))
        .build();
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource)
        .build())
}

fn upkeep(metrics: PrometheusHandle) -> anyhow::Result<()> {
    let work = move || {
        loop {
            std::thread::sleep(UPKEEP_EVERY);
            metrics.run_upkeep();
        }
    };
    std::thread::Builder::new()
        .name("metrics-upkeep".to_owned())
        .spawn(work)
        .context("start the metrics thread")?;
    Ok(())
}
