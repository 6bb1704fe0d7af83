//! CloudEvents 1.0 in its three HTTP forms: structured (one JSON object), batched (an array of
//! them) and binary (attributes as `ce-` headers, the body is the data).
//!
//! `data` is the canonical JSON of an event's body, and `type` names its kind. Other attributes are
//! extensions, which are ignored as the specification asks. This module knows neither HTTP nor the
//! log.
//!
//! Source: <https://github.com/cloudevents/spec>, `cloudevents/spec.md` and
//! `bindings/http-protocol-binding.md`, 1.0.2.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::value::{Error as KindError, StrDeserializer};
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use utoipa::ToSchema;

use event_log::event::{EpisodeEnd, FeedbackFields, Generation, Invalid, Retraction};

/// The kind of an event, as `type` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[schema(as = EventType)]
pub(crate) enum Kind {
    #[serde(rename = "springtide.generation.v1")]
    Generation,
    #[serde(rename = "springtide.feedback.v1")]
    Feedback,
    #[serde(rename = "springtide.retraction.v1")]
    Retraction,
    #[serde(rename = "springtide.episode_end.v1")]
    EpisodeEnd,
}

impl Kind {
    fn parse(text: &str) -> Result<Self, Invalid> {
        let kind = Self::deserialize(StrDeserializer::<KindError>::new(text));
        kind.map_err(|error| Invalid::new("type", error.to_string()))
    }
}

/// The data of a CloudEvent.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
pub(crate) enum Data {
    Generation(Box<Generation>),
    Feedback(FeedbackFields),
    Retraction(Retraction),
    EpisodeEnd(EpisodeEnd),
}

/// The checked attributes. The data is still JSON.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Envelope<'a> {
    pub kind: Kind,
    pub source: String,
    pub id: String,
    /// `None`: the time of arrival.
    pub time: Option<OffsetDateTime>,
    pub data: &'a [u8],
}

/// CloudEvents 1.0, JSON format. Other attributes are ignored.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = CloudEvent)]
pub(crate) struct Structured<'a> {
    #[schema(pattern = "^1[.]0$")]
    specversion: String,
    #[serde(rename = "type")]
    #[schema(value_type = Kind)]
    type_: String,
    #[schema(min_length = 1, max_length = 256)]
    source: String,
    /// Unique within the source.
    #[schema(min_length = 1, max_length = 256)]
    id: String,
    /// RFC 3339. Absent: now.
    #[schema(format = DateTime)]
    time: Option<String>,
    /// `application/json`, if present.
    datacontenttype: Option<String>,
    #[serde(borrow)]
    #[schema(value_type = Data, required = true)]
    data: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(ignore)]
    data_base64: Option<&'a RawValue>,
}

impl<'a> TryFrom<Structured<'a>> for Envelope<'a> {
    type Error = Invalid;

    fn try_from(event: Structured<'a>) -> Result<Self, Invalid> {
        version(&event.specversion)?;
        if event.data_base64.is_some() {
            return Err(Invalid::new("data_base64", "is not supported; send JSON as data"));
        }
        if let Some(media_type) = &event.datacontenttype {
            json(media_type)?;
        }
        let data = event.data.ok_or_else(|| Invalid::new("data", "is missing"))?;
        Ok(Self {
            kind: Kind::parse(&event.type_)?,
            source: event.source,
            id: event.id,
            time: event.time.as_deref().map(time).transpose()?,
            data: data.get().as_bytes(),
        })
    }
}

/// Reads binary mode. `header` returns a header's value by its name in lower case.
pub(crate) fn binary<'a, 'h>(
    header: impl Fn(&str) -> Option<&'h [u8]>,
    data: &'a [u8],
) -> Result<Envelope<'a>, Invalid> {
    let attribute = |name: &'static str| header(name).map(|value| decode(name, value)).transpose();
    let required = |name| attribute(name)?.ok_or_else(|| Invalid::new(name, "is missing"));
    version(&required("ce-specversion")?)?;
    json(&String::from_utf8_lossy(header("content-type").unwrap_or_default()))?;
    let time_text = attribute("ce-time")?;
    Ok(Envelope {
        kind: Kind::parse(&required("ce-type")?)?,
        source: required("ce-source")?,
        id: required("ce-id")?,
        time: time_text.as_deref().map(time).transpose()?,
        data,
    })
}

fn version(text: &str) -> Result<(), Invalid> {
    if text == "1.0" {
        return Ok(());
    }
    Err(Invalid::new("specversion", "is not 1.0"))
}

fn json(media_type: &str) -> Result<(), Invalid> {
    let media_type = media_type.split(';').next().unwrap_or_default().trim();
    if media_type.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Invalid::new("datacontenttype", "is not application/json"))
}

fn time(text: &str) -> Result<OffsetDateTime, Invalid> {
    OffsetDateTime::parse(text, &Rfc3339).map_err(|_| Invalid::new("time", "is not an RFC 3339 time"))
}

/// Decodes a header's value (section 3.1.3.2 of the HTTP binding): optional double quotes, and
/// percent-encoded UTF-8 for characters beyond printable ASCII.
fn decode(field: &'static str, value: &[u8]) -> Result<String, Invalid> {
    let value = match value {
        [b'"', inner @ .., b'"'] => Cow::Owned(unescape(inner)),
        bare => Cow::Borrowed(bare),
    };
    let decoded = percent_encoding::percent_decode(&value).decode_utf8();
    let decoded = decoded.map_err(|_| Invalid::new(field, "is not percent-encoded UTF-8"))?;
    Ok(decoded.into_owned())
}

fn unescape(quoted: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(quoted.len());
    let mut bytes = quoted.iter().copied();
    while let Some(byte) = bytes.next() {
        plain.extend(if byte == b'\\' { bytes.next() } else { Some(byte) });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use time::macros::datetime;

    const DATA: &[u8] = br#"{"metric_name": "accept"}"#;

    fn structured(event: &Value) -> Result<(Kind, String, String, Option<OffsetDateTime>, String), Invalid> {
        let text = event.to_string();
        let event: Structured<'_> = serde_json::from_str(&text).unwrap();
        let envelope = Envelope::try_from(event)?;
        let data = String::from_utf8(envelope.data.to_vec()).unwrap();
        Ok((envelope.kind, envelope.source, envelope.id, envelope.time, data))
    }

    fn event() -> Value {
        json!({
            "specversion": "1.0", "type": "springtide.feedback.v1", "source": "/app", "id": "1",
            "time": "2026-11-21T10:00:00+01:00", "datacontenttype": "application/json; charset=utf-8",
            "subject": "ignored", "myextension": 5, "data": {"metric_name": "accept"},
        })
    }

    #[test]
    fn a_structured_event_is_read_from_its_attributes_and_data() {
        let (kind, source, id, time, data) = structured(&event()).unwrap();
        assert_eq!((kind, &*source, &*id), (Kind::Feedback, "/app", "1"));
        assert_eq!(time, Some(datetime!(2026-11-21 09:00 UTC)));
        assert_eq!(data, r#"{"metric_name":"accept"}"#);
    }

    #[test]
    fn an_invalid_attribute_is_refused_by_its_name() {
        for (attribute, value, field) in [
            ("specversion", json!("0.3"), "specversion"),
            ("type", json!("com.example.other"), "type"),
            ("time", json!("yesterday"), "time"),
            ("datacontenttype", json!("text/xml"), "datacontenttype"),
            ("data_base64", json!("e30="), "data_base64"),
            ("data", Value::Null, "data"),
        ] {
            let mut changed = event();
            changed[attribute] = value;
            assert_eq!(structured(&changed).unwrap_err().field, field);
        }
    }

    fn from_headers(headers: &[(&str, &'static str)]) -> Result<Envelope<'static>, Invalid> {
        let header = |name: &str| {
            let found = headers.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.as_bytes())
        };
        binary(header, DATA)
    }

    const HEADERS: [(&str, &str); 6] = [
        ("content-type", "application/json"),
        ("ce-specversion", "1.0"),
        ("ce-type", "springtide.generation.v1"),
        ("ce-source", "/engines/1"),
        ("ce-id", "a"),
        ("ce-time", "2026-11-21T10:00:00Z"),
    ];

    #[test]
    fn a_binary_event_is_read_from_its_headers_and_body() {
        let envelope = from_headers(&HEADERS).unwrap();
        assert_eq!(envelope.kind, Kind::Generation);
        assert_eq!((&*envelope.source, &*envelope.id), ("/engines/1", "a"));
        assert_eq!(envelope.time, Some(datetime!(2026-11-21 10:00 UTC)));
        assert_eq!(envelope.data, DATA);
    }

    #[test]
    fn a_missing_header_is_refused_by_its_name() {
        for missing in ["ce-specversion", "ce-type", "ce-source", "ce-id"] {
            let left: Vec<_> = HEADERS.into_iter().filter(|(name, _)| *name != missing).collect();
            assert_eq!(from_headers(&left).unwrap_err().field, missing);
        }
        let left: Vec<_> = HEADERS.into_iter().filter(|(name, _)| *name != "ce-time").collect();
        assert_eq!(from_headers(&left).unwrap().time, None);
    }

    #[test]
    fn a_headers_value_may_be_quoted_and_percent_encoded() {
        assert_eq!(
            decode("ce-id", b"Euro%20%E2%82%AC%20%F0%9F%98%80").unwrap(),
            "Euro € 😀"
        );
        assert_eq!(decode("ce-id", br#""say \"a\\b\"""#).unwrap(), r#"say "a\b""#);
        assert_eq!(decode("ce-id", b"%FF").unwrap_err().field, "ce-id");
    }
}
