//! Fields of a JSON object: what is a number, a flag, null or missing.

use super::Error;
use serde_json::Value;

/// A positive number.
pub(super) fn int(json: &Value, field: &'static str) -> Result<i64, Error> {
    match json[field].as_i64() {
        Some(n) if n > 0 => Ok(n),
        _ => Err(Error::Missing(field)),
    }
}

/// A field that transformers 4 and 5 spell differently.
pub(super) fn either(json: &Value, old: &'static str, new: &'static str) -> Result<i64, Error> {
    let renamed = json[old].is_null() && !json[new].is_null();
    int(json, if renamed { new } else { old })
}

/// A positive number. A missing field means `absent`.
pub(super) fn int_or(json: &Value, field: &'static str, absent: i64) -> Result<i64, Error> {
    match json.get(field) {
        None => Ok(absent),
        Some(_) => int(json, field),
    }
}

/// A number from 0. A missing field means `absent`.
pub(super) fn count_or(json: &Value, field: &'static str, absent: i64) -> Result<i64, Error> {
    match json.get(field) {
        None => Ok(absent),
        Some(value) => value.as_i64().filter(|&n| n >= 0).ok_or(Error::Missing(field)),
    }
}

/// A positive number or null. A missing field means `absent`.
pub(super) fn nullable(json: &Value, field: &'static str, absent: Option<i64>) -> Result<Option<i64>, Error> {
    match json.get(field) {
        None => Ok(absent),
        Some(Value::Null) => Ok(None),
        Some(_) => int(json, field).map(Some),
    }
}

/// A flag. A missing field means `absent`, and null means false as in Python.
pub(super) fn flag(json: &Value, field: &'static str, absent: bool) -> Result<bool, Error> {
    match json.get(field) {
        None => Ok(absent),
        Some(Value::Null) => Ok(false),
        Some(value) => value.as_bool().ok_or(Error::Missing(field)),
    }
}

/// Refuses a field with another value than the supported one. A missing or null field passes.
pub(super) fn refuse_unless(
    json: &Value,
    field: &'static str,
    supported: &'static str,
    ok: impl Fn(&Value) -> bool,
) -> Result<(), Error> {
    let value = &json[field];
    if value.is_null() || ok(value) {
        return Ok(());
    }
    Err(Error::Unsupported {
        field,
        value: value.to_string(),
        supported: supported.into(),
    })
}
