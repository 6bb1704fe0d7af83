//! Carries W3C trace context (`traceparent`) across process boundaries.
//!
//! Configures no exporter. Without an OpenTelemetry layer nothing is injected.

use std::collections::HashMap;

use axum::http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The current span as headers (`traceparent`, `tracestate`). Empty if no trace is recorded.
pub fn inject() -> Vec<(String, String)> {
    let context = tracing::Span::current().context();
    if !context.span().span_context().is_valid() {
        return Vec::new();
    }
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(&context, &mut carrier);
    carrier.into_iter().filter(|(_, value)| !value.is_empty()).collect()
}

/// The remote span in a record's headers, or an empty context.
pub fn extract(headers: &[(String, String)]) -> Context {
    TraceContextPropagator::new().extract(&Pairs(headers))
}

/// The remote span in an HTTP request's headers, or an empty context.
pub fn extract_http(headers: &HeaderMap) -> Context {
    let pairs = ["traceparent", "tracestate"].into_iter().filter_map(|name| {
        let value = headers.get(name)?.to_str().ok()?;
        Some((name.to_owned(), value.to_owned()))
    });
    extract(&pairs.collect::<Vec<_>>())
}

/// Makes `parent` the parent of a span that was not entered yet. Does nothing if no trace is
/// recorded.
pub fn set_parent(span: &tracing::Span, parent: Context) {
    if parent.span().span_context().is_valid() {
        // Fails only for disabled spans.
        span.set_parent(parent).ok();
    }
}

struct Pairs<'a>(&'a [(String, String)]);

impl Extractor for Pairs<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let pair = self.0.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        pair.map(|(_, value)| value.as_str())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_from_record_headers() {
        let context = extract(&[("Traceparent".to_owned(), PARENT.to_owned())]);
        assert_eq!(
            context.span().span_context().trace_id().to_string(),
            "0af7651916cd43dd8448eb211c80319c"
        );
    }

    #[test]
    fn a_malformed_traceparent_is_ignored() {
        let context = extract(&[("traceparent".to_owned(), "00-nonsense".to_owned())]);
        assert!(!context.span().span_context().is_valid());
    }

    #[test]
    fn without_a_recorded_trace_nothing_is_injected() {
        assert!(inject().is_empty());
    }
}
