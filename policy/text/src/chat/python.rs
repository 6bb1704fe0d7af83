//! Python behavior that templates rely on: `tojson`, `strftime`, the format of floats, and string
//! methods that `minijinja_contrib` lacks.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use time::OffsetDateTime;
use time::format_description::parse_strftime_owned;

/// The message of `raise_exception`, as the source of the rendering error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The message of `raise_exception`, if it caused the error.
pub fn raised(error: &Error) -> Option<&str> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message);
        }
        next = error.source();
    }
    None
}

/// Makes the environment behave like that of `transformers`.
pub fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| match float(value) {
        Some(value) => out.write_str(&repr(value)).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| match float(value) {
        Some(value) => repr(value),
        None => value.to_string(),
    });
    // In Python, strings and dictionaries are sequences.
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined
        )
    });
    // templates get plain data, functions and macros
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment.add_filter("int", int);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = message.to_string();
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    environment.add_function("cycler", minijinja_contrib::globals::cycler);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
}

/// Formats `time`.
pub fn strftime(time: OffsetDateTime, format: &str) -> Result<String, Error> {
    let refuse = |error: String| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {error}"),
        )
    };
    let description = parse_strftime_owned(format).map_err(|error| refuse(error.to_string()))?;
    time.format(&description).map_err(|error| refuse(error.to_string()))
}

fn method(state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        if name == "index"
            && let (ValueKind::Seq, [wanted]) = (value.kind(), arguments)
        {
            let at = value.try_iter()?.position(|item| item == *wanted);
            return at
                .map(Value::from)
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "not in the list"));
        }
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments);
    };
    let one = || match arguments {
        [only] => only.as_str().ok_or_else(|| Error::from(ErrorKind::InvalidOperation)),
        [] => Err(Error::from(ErrorKind::MissingArgument)),
        _ => Err(Error::from(ErrorKind::TooManyArguments)),
    };
    let three = |a: &str, b: &str, c: &str| Value::from(Tuple::from([a, b, c].map(Value::from)));
    Ok(match name {
        "removeprefix" => Value::from(text.strip_prefix(one()?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(one()?).unwrap_or(text)),
        "partition" => match text.split_once(one()?) {
            Some((before, after)) => three(before, one()?, after),
            None => three(text, "", ""),
        },
        "rpartition" => match text.rsplit_once(one()?) {
            Some((before, after)) => three(before, one()?, after),
            None => three("", "", text),
        },
        "split" | "rsplit" if arguments.iter().any(Value::is_kwargs) => {
            let (separator, kwargs): (Option<Value>, Kwargs) = minijinja::value::from_args(arguments)?;
            let separator = separator.map_or_else(|| kwargs.get("sep"), Ok)?;
            let splits: Option<i64> = kwargs.get("maxsplit")?;
            kwargs.assert_all_used()?;
            return method(state, value, name, &[separator, splits.into()]);
        }
        "rsplit" if !arguments.is_empty() => {
            let (separator, splits): (&str, Option<i64>) = minijinja::value::from_args(arguments)?;
            let parts: Vec<&str> = match splits.and_then(|n| usize::try_from(n).ok()) {
                Some(n) => text.rsplitn(n.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.into_iter().rev().map(Value::from).collect()
        }
        "index" | "rindex" => {
            let find = name.replace("index", "find");
            let at = minijinja_contrib::pycompat::unknown_method_callback(state, value, &find, arguments)?;
            match i64::try_from(at.clone())? {
                ..0 => return Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
                _ => at,
            }
        }
        "ljust" | "rjust" | "center" | "zfill" => {
            let (width, fill): (usize, Option<char>) = minijinja::value::from_args(arguments)?;
            let missing = width.min(PADDED_MAX).saturating_sub(text.chars().count());
            let (fill, left) = match name {
                "ljust" => (fill.unwrap_or(' '), 0),
                "rjust" => (fill.unwrap_or(' '), missing),
                // Python puts the odd space to the left if the width is odd
                "center" => (fill.unwrap_or(' '), missing / 2 + (missing & width & 1)),
                _ => ('0', missing),
            };
            let pad = |n: usize| fill.to_string().repeat(n);
            let (sign, digits) = text.split_at(usize::from(name == "zfill" && text.starts_with(['-', '+'])));
            Value::from(format!("{sign}{}{digits}{}", pad(left), pad(missing - left)))
        }
        _ => return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    })
}

/// Longest padded text, in characters.
const PADDED_MAX: usize = 1 << 16;

/// Jinja's `int`: the default, usually 0, for what is no number.
fn int(value: &Value, default: Option<Value>) -> Value {
    let default = default.unwrap_or_else(|| Value::from(0));
    let float = match value.as_str() {
        Some(text) => match text.trim().parse::<i64>() {
            Ok(number) => return number.into(),
            Err(_) => text.trim().parse::<f64>().ok(),
        },
        None if value.kind() == ValueKind::Bool => return i64::from(value.is_true()).into(),
        None if value.is_integer() => return value.clone(),
        None => float(value),
    };
    let fits = float.filter(|float| float.abs() < 9e18);
    fits.map_or(default, |float| Value::from(float as i64))
}

/// `json.dumps` with the arguments that `transformers` supports.
#[expect(clippy::needless_pass_by_value, reason = "filters take their arguments by value")]
fn tojson(value: &Value, arguments: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let argument = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let given = match arguments.get(at) {
            Some(value) => Some(value.clone()),
            None => kwargs.get(name)?,
        };
        Ok(given.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match argument(1, "indent")? {
        Some(indent) if indent.as_str().is_some() => Some(indent.to_string()),
        Some(indent) => Some(" ".repeat(i64::try_from(indent)?.clamp(0, 64) as usize)),
        None => None,
    };
    let (item, key) = match argument(2, "separators")? {
        Some(pair) => {
            let at = |i: usize| pair.get_item(&Value::from(i)).map(|value| value.to_string());
            (at(0)?, at(1)?)
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let sort = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let mut writer = Json {
        out: String::new(),
        ascii,
        indent,
        item,
        key,
        sort,
    };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

/// The value as `tojson` writes it, or nothing if it cannot.
pub fn json(value: &Value) -> String {
    let mut writer = Json {
        out: String::new(),
        ascii: false,
        indent: None,
        item: ", ".into(),
        key: ": ".into(),
        sort: false,
    };
    match writer.value(value, 0) {
        Ok(()) => writer.out,
        Err(_) => String::new(),
    }
}

struct Json {
    out: String,
    ascii: bool,
    /// One level of indentation; none writes everything on one line.
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

/// Maximum nesting.
const DEPTH_MAX: usize = 128;

impl Json {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let refuse = |reason: String| Err(Error::new(ErrorKind::BadSerialization, reason));
        if depth > DEPTH_MAX {
            return refuse(format!("tojson: nested more than {DEPTH_MAX} levels deep"));
        }
        match value.kind() {
            ValueKind::None => self.out += "null",
            ValueKind::Bool => self.out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => match float(value) {
                Some(value) => self.out += &float_json(value),
                None => self.out += &value.to_string(),
            },
            ValueKind::String => self.text(&value.to_string()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(['[', ']'], items, depth, |writer, item| writer.value(&item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    items.push((key_text(&key)?, item));
                }
                if self.sort {
                    items.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.container(['{', '}'], items, depth, |writer, (key, item)| {
                    writer.text(&key);
                    writer.out += &writer.key.clone();
                    writer.value(&item, depth + 1)
                })?;
            }
            kind => return refuse(format!("tojson: {kind} cannot be written as JSON")),
        }
        Ok(())
    }

    fn container<T>(
        &mut self,
        [open, close]: [char; 2],
        items: Vec<T>,
        depth: usize,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let empty = items.is_empty();
        for (i, item) in items.into_iter().enumerate() {
            if i > 0 {
                self.out += &self.item.clone();
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out += &indent.repeat(depth);
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out += "\\\"",
                '\\' => self.out += "\\\\",
                '\n' => self.out += "\\n",
                '\r' => self.out += "\\r",
                '\t' => self.out += "\\t",
                '\u{8}' => self.out += "\\b",
                '\u{c}' => self.out += "\\f",
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}"); // Writing to a String cannot fail.
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A key of a JSON object. Python writes numbers, booleans and None as strings.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.to_string(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number => float(key).map_or_else(|| key.to_string(), float_json),
        kind => {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                format!("tojson: {kind} as a key"),
            ));
        }
    })
}

/// The value, if it is a float: 3.0 is one, 3 is not.
fn float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}

fn float_json(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => repr(value),
    }
}

/// Python's `repr` of a float: the shortest digits that parse to it, with an exponent below 1e-4
/// and from 1e16.
fn repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    let plain = format!("{value}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, expected) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1 + 0.2, "0.30000000000000004"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (9007199254740993.0, "9007199254740992.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.25e100, "-1.25e+100"),
            (5e-324, "5e-324"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(repr(value), expected);
        }
    }
}
