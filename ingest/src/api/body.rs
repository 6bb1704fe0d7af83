//! From bytes of JSON to canonical bodies, in memory proportional to the bytes. Types that serde reads by buffering (an
//! untagged value, a flattened field) and maps take many times the memory of their text, so they only ever see short texts.

use std::marker::PhantomData;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use edge::problem::Problem;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};

/// The longest text of a feedback: its largest comment with every byte escaped, and its largest tags.
pub(super) const FEEDBACK_BYTES_MAX: usize = 512 * 1024;

/// A body that says it is JSON.
pub(super) struct JsonText(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonText {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        // `application/cloudevents+json` and its like are JSON with a meaning that this is not.
        if media_type(request.headers()).as_deref() != Some("application/json") {
            return Err(Problem::unsupported_media_type(
                "send JSON as content-type: application/json",
            ));
        }
        let bytes = Bytes::from_request(request, state).await;
        bytes.map(Self).map_err(Problem::bad_request)
    }
}

/// The media type in lower case, without its parameters: a charset says nothing that JSON leaves open.
pub(super) fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let media_type = value.split(';').next().unwrap_or_default();
    Some(media_type.trim().to_ascii_lowercase())
}

/// Reads JSON; the problem says where it is wrong.
pub(super) fn read<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(text).map_err(Problem::bad_request)
}

/// Reads the JSON of a feedback, or of a dialect's.
pub(super) fn read_feedback<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Problem> {
    if text.len() > FEEDBACK_BYTES_MAX {
        return Err(Problem::too_large(format!(
            "{} bytes are more than the {FEEDBACK_BYTES_MAX} of the longest feedback",
            text.len()
        )));
    }
    read(text)
}

/// The items of a JSON array, `count_max` at most; as `&RawValue` each as it was written.
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
            "{count} events are more than {count_max}: send them in several requests"
        ))
    })
}

/// Reads all items and keeps none beyond the limit; then tells how many there were.
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
    fn items_come_as_they_were_written_and_no_more_than_allowed() {
        let items: Vec<&RawValue> = read_items(br#" [ {"a": 1}, null ,[2] ] "#, 3).unwrap();
        let texts: Vec<_> = items.iter().map(|item| item.get()).collect();
        assert_eq!(texts, [r#"{"a": 1}"#, "null", "[2]"]);
        assert!(read_items::<&RawValue>(b"[]", 3).unwrap().is_empty());
        let refused = read_items::<&RawValue>(b"[1,2,3,4,5]", 3).unwrap_err();
        assert_eq!(refused.status.as_u16(), 413);
        assert!(refused.detail.unwrap().starts_with("5 events"));
    }

    #[test]
    fn a_number_is_read_as_the_double_that_is_nearest_to_it() {
        // Without serde_json's `float_roundtrip` one in five doubles comes out as its neighbour: another value than was sent, and
        // at the end of a collector's way another digest.
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
    fn what_is_no_array_is_refused_with_the_place() {
        for text in ["{}", "[1", "[1] 2", ""] {
            let refused = read_items::<&RawValue>(text.as_bytes(), 3).unwrap_err();
            assert_eq!(refused.status.as_u16(), 400, "{text}");
            assert!(refused.detail.unwrap().contains("line 1"), "{text}");
        }
    }

    #[test]
    fn json_may_be_a_hundred_deep_and_not_a_thousand() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(read::<serde_json::Value>(nested(100).as_bytes()).is_ok());
        let refused = read::<serde_json::Value>(nested(1_000).as_bytes()).unwrap_err();
        assert!(refused.detail.unwrap().contains("recursion limit"));
        // Items are cut out without recursion, however deep they are; reading one has the limit again.
        let deep = nested(1_000_000);
        let items: Vec<&RawValue> = read_items(deep.as_bytes(), 1).unwrap();
        assert!(read::<serde_json::Value>(items[0].get().as_bytes()).is_err());
    }

    #[test]
    fn a_text_longer_than_any_feedback_is_not_even_read() {
        let long = format!("[{}1]", "1,".repeat(FEEDBACK_BYTES_MAX));
        let refused = read_feedback::<serde_json::Value>(long.as_bytes()).unwrap_err();
        assert_eq!(refused.status.as_u16(), 413);
    }
}
