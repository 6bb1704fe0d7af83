//! Fields of forms and addresses.

use std::str::FromStr;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Deserializer};

/// An empty field of a form is none.
pub fn filled<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(value: D) -> Result<Option<T>, D::Error> {
    let text = Option::<String>::deserialize(value)?.unwrap_or_default();
    match text.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(serde::de::Error::custom),
    }
}

/// For a part of an address.
pub fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}
