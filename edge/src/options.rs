//! A section of the configuration file, declared once: its keys with their meaning, default and range.

use std::error::Error;
use std::fmt::{self, Display};
use std::ops::{Bound, RangeBounds};

/// Declares a section: a struct that serde reads without unknown keys, its [`Default`], and
/// `check_ranges`, which refuses the first value out of its range.
///
/// ```text
/// edge::options! {
///     /// `[queue]`
///     pub struct Options {
///         /// Requests that may wait.
///         pub length_max: usize = 16 => 1..=256,
///         /// Where they are kept. Default: in memory.
///         pub folder: Option<String> = None,
///     }
/// }
/// ```
#[macro_export]
macro_rules! options {
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
    (
        $(#[doc = $about:literal])*
        $(#[derive($($derive:ident),+)])?
        $(#[serde($($container:tt)+)])?
        pub struct $name:ident {
            $(
                $(#[doc = $doc:literal])*
                $(#[serde($($serde:tt)+)])?
                pub $field:ident: $type:ty $(= $default:expr)? $(=> $range:expr)?,
            )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq, ::serde::Serialize, ::serde::Deserialize $(, $($derive),+)?)]
        #[serde(default, deny_unknown_fields $(, $($container)+)?)]
        pub struct $name {
            $($(#[doc = $doc])* $(#[serde($($serde)+)])? pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $crate::options!(@default $($default)?),)* }
            }
        }

        impl $name {
            /// What each key means.
            pub const KEYS: &[$crate::options::Key] = &[$($crate::options::Key {
                name: stringify!($field),
                about: &[$($doc),*],
                serde: stringify!($($($serde)+)?),
            },)*];

            /// Refuses the first value that is out of its range. `section`: as the file spells it, or
            /// empty for names of keys alone.
            pub fn check_ranges(&self, section: &str) -> Result<(), $crate::options::OutOfRange> {
                $($($crate::options::check(section, stringify!($field), &self.$field, $range)?;)?)*
                let _ = section;
                Ok(())
            }
        }
    };
}

/// A key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub name: &'static str,
    /// Its comment, line by line.
    pub about: &'static [&'static str],
    /// What serde is told about it.
    pub serde: &'static str,
}

/// A value that a key may not have. The text names the key, and says what it may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfRange(String);

impl Display for OutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for OutOfRange {}

impl From<OutOfRange> for String {
    fn from(error: OutOfRange) -> Self {
        error.0
    }
}

/// Refuses a value out of its range, also one that is no number.
pub fn check<T: PartialOrd + Display>(
    section: &str,
    key: &str,
    value: &T,
    range: impl RangeBounds<T>,
) -> Result<(), OutOfRange> {
    if range.contains(value) {
        return Ok(());
    }
    let least = match range.start_bound() {
        Bound::Included(least) => least.to_string(),
        Bound::Excluded(least) => format!("more than {least}"),
        Bound::Unbounded => String::new(),
    };
    let most = match range.end_bound() {
        Bound::Included(most) => format!("to {most}"),
        Bound::Excluded(end) => format!("to below {end}"),
        Bound::Unbounded => "or more".to_owned(),
    };
    let dot = if section.is_empty() { "" } else { "." };
    Err(OutOfRange(format!(
        "{section}{dot}{key} is {value}: give {least} {most}"
    )))
}

/// Finite numbers above this.
pub fn above<T: From<f32>>(least: T) -> (Bound<T>, Bound<T>) {
    (Bound::Excluded(least), Bound::Excluded(f32::INFINITY.into()))
}

/// Numbers above the first, up to the second.
pub fn above_to<T>(least: T, most: T) -> (Bound<T>, Bound<T>) {
    (Bound::Excluded(least), Bound::Included(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::options! {
        /// `[queue]`
        pub struct Queue {
            /// Requests that may wait.
            pub length_max: usize = 16 => 1..=256,
            pub share: f64 = 0.5 => above_to(0.0, 1.0),
            pub rate: f32 = 1.0 => above(0.0),
            pub threads: u16 = 1 => 1..,
            #[serde(rename = "dir")]
            pub folder: Option<String>,
        }
    }

    #[test]
    fn a_section_has_its_defaults_ranges_and_comments() {
        let queue: Queue = serde_json::from_str(r#"{"dir": "/srv"}"#).unwrap();
        assert_eq!((queue.length_max, queue.folder.as_deref()), (16, Some("/srv")));
        queue.check_ranges("queue").unwrap();
        assert_eq!(Queue::KEYS[0].about, [" Requests that may wait."]);
        assert_eq!(Queue::KEYS[4].serde, "rename = \"dir\"");
        assert!(serde_json::from_str::<Queue>(r#"{"folder": "/srv"}"#).is_err());
    }

    #[test]
    fn a_refusal_names_the_key_and_what_it_may_be() {
        let refusal = |change: fn(&mut Queue)| {
            let mut queue = Queue::default();
            change(&mut queue);
            queue.check_ranges("queue").unwrap_err().to_string()
        };
        assert_eq!(
            refusal(|queue| queue.length_max = 0),
            "queue.length_max is 0: give 1 to 256"
        );
        assert_eq!(
            refusal(|queue| queue.share = 0.0),
            "queue.share is 0: give more than 0 to 1"
        );
        assert_eq!(
            refusal(|queue| queue.share = f64::NAN),
            "queue.share is NaN: give more than 0 to 1"
        );
        assert_eq!(
            refusal(|queue| queue.rate = f32::INFINITY),
            "queue.rate is inf: give more than 0 to below inf"
        );
        assert_eq!(refusal(|queue| queue.threads = 0), "queue.threads is 0: give 1 or more");
    }
}
