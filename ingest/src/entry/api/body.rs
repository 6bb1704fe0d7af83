//! Reads JSON request bodies in memory proportional to their length.
//!
//! Serde buffers untagged values, and maps take many times the memory of their text. Such types
//! only read short texts.

use std::marker::PhantomData;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use edge::problem::Problem;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};

/// The longest valid text of a feedback event: its largest comment with every byte escaped, and its
/// largest tags.
pub(super) const FEEDBACK_BYTES_MAX: usize = 512 * 1024;

/// A body whose content type is JSON.
pub(super) struct JsonText(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonText {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        // `application/cloudevents+json` and the like have another meaning.
        if media_type(request.headers()).as_deref() != Some("application/json") {
            let detail = "send JSON as content-type: application/json";
            return Err(Problem::unsupported_media_type(detail));
        }
        let bytes = Bytes::from_request(request, state).await;
        bytes.map(Self).map_err(Problem::bad_request)
    }
}

/// The media type in lower case, without parameters. JSON needs no charset.
pub(super) fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let media_type = value.split(';').next().unwrap_or_default();
    Some(media_type.trim().to_ascii_lowercase())
}

/// Reads JSON. The problem says where it is wrong.
pub(super) fn read<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(text).map_err(Problem::bad_request)
}

/// Reads the JSON of an event other than a generation.
pub(super) fn read_short<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Problem> {
    check_short(text.len())?;
    read(text)
}

/// Refuses texts that are too long for an event other than a generation.
pub(super) fn check_short(length: usize) -> Result<(), Problem> {
    if length <= FEEDBACK_BYTES_MAX {
        return Ok(());
    }
    Err(Problem::too_large(format!(
        "{length} bytes are more than {FEEDBACK_BYTES_MAX}, the limit for events other than generations"
    )))
}

/// Reads the items of a JSON array. With `T = &RawValue`, items are only split.
pub(super) fn read_items<'a, T: Deserialize<'a>>(text: &'a [u8], count_max: usize) -> Result<Vec<T>, Problem> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let items = Items {
        count_max,
        item: PhantomData,
    };
    let items = items.deserialize(&mut reader);
    let items = items.and_then(|items| reader.end().map(|()| items));
    items.map_err(Problem::bad_request)?.map_err(|count| {
        Problem::too_large(format!(
            "{count} events are more than {count_max}; send them in several requests"
        ))
    })
}

/// Reads at most `count_max` items. If there are more, it only counts them.
struct Items<T> {
    count_max: usize,
    item: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Items<T> {
    type Value = Result<Vec<T>, usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
    type Value = Result<Vec<T>, usize>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while items.len() < self.count_max {
            match sequence.next_element()? {
                Some(item) => items.push(item),
                None => return Ok(Ok(items)),
            }
        }
        let mut count = items.len();
        while sequence.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(if count > items.len() { Err(count) } else { Ok(items) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::value::RawValue;

    #[test]
    fn items_are_split_as_they_were_written_and_limited_in_number() {
        let items: Vec<&RawValue> = read_items(br#" [ {"a": 1}, null ,[2] ] "#, 3).unwrap();
        let texts: Vec<_> = items.iter().map(|item| item.get()).collect();
        assert_eq!(texts, [r#"{"a": 1}"#, "null", "[2]"]);
        assert!(read_items::<&RawValue>(b"[]", 3).unwrap().is_empty());
        let refused = read_items::<&RawValue>(b"[1,2,3,4,5]", 3).unwrap_err();
        assert_eq!(refused.status.as_u16(), 413);
        assert!(refused.detail.unwrap().starts_with("5 events"));
    }

    #[test]
    fn a_number_is_read_as_its_nearest_double() {
        // Without serde_json's `float_roundtrip`, one in five doubles is read as its neighbor.
        // Forwarding through a collector would then change the event's digest.
        for value in [
            3.6967297937384553e115,
            -5.988180159386011e243,
            7.370437700706684e208,
            5e-324,
        ] {
            let written = serde_json::to_vec(&value).unwrap();
            assert_eq!(read::<f64>(&written).unwrap(), value);
        }
    }

    #[test]
    fn text_that_is_not_an_array_is_refused_with_its_position() {
        for text in ["{}", "[1", "[1] 2", ""] {
            let refused = read_items::<&RawValue>(text.as_bytes(), 3).unwrap_err();
            assert_eq!(refused.status.as_u16(), 400, "{text}");
            assert!(refused.detail.unwrap().contains("line 1"), "{text}");
        }
    }

    #[test]
    fn json_may_be_nested_a_hundred_deep_but_not_a_thousand() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(read::<serde_json::Value>(nested(100).as_bytes()).is_ok());
        let refused = read::<serde_json::Value>(nested(1_000).as_bytes()).unwrap_err();
        assert!(refused.detail.unwrap().contains("recursion limit"));
        // Splitting items needs no recursion at any depth. Reading one of them has the limit again.
        let deep = nested(1_000_000);
        let items: Vec<&RawValue> = read_items(deep.as_bytes(), 1).unwrap();
        assert!(read::<serde_json::Value>(items[0].get().as_bytes()).is_err());
    }

    #[test]
    fn a_text_longer_than_any_feedback_event_is_refused_unread() {
        let long = format!("[{}1]", "1,".repeat(FEEDBACK_BYTES_MAX));
        let refused = read_short::<serde_json::Value>(long.as_bytes()).unwrap_err();
        assert_eq!(refused.status.as_u16(), 413);
    }
}
