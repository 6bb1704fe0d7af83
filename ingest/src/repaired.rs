//! An event that somebody has repaired, before it replaces a record of the dead-letter queue.

use event_log::event::Event;
use time::OffsetDateTime;

use crate::options::Options;
use crate::validator::Validator;

/// Reads a repaired event from canonical JSON, with the checks of the sink.
pub fn repaired(options: &Options, json: &[u8], now: OffsetDateTime) -> anyhow::Result<Event> {
    let event = Event::decode_json(json)?;
    let skew = time::Duration::seconds_f64(options.clock_skew_seconds_max);
    let validator = Validator::new(options.metrics()?, skew).with_judges(&options.judges()?);
    validator.check(&event, now)?;
    Ok(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repaired_event_must_satisfy_the_configuration_too() {
        let now = event_log::event::now();
        let json = |value: &str| {
            let id = uuid::Uuid::now_v7();
            format!(
                "{{\"tenant\": \"default\", \"source\": \"s\", \"id\": \"{id}\", \"time\": \"2026-11-21T03:00:00Z\", \
                 \"feedback\": {{\"feedback_id\": \"{id}\", \"generation_id\": \"{id}\", \"metric_name\": \"accept\", \
                 \"value\": {value}}}}}"
            )
        };
        let read = |value| repaired(&Options::default(), json(value).as_bytes(), now);
        assert!(read("true").is_ok());
        let error = read("3").unwrap_err().to_string();
        assert!(error.contains("takes a boolean"), "{error}");
        assert!(read("").is_err());
    }
}
