//! Rotary positions: the frequency of each pair of values, and the scalings for longer contexts.

use super::Error;
use super::field::flag;
use serde_json::Value;

/// Rotary position embedding (Su et al. 2021).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: Scaling,
    /// Input pairs are adjacent, (0, 1), (2, 3), …, instead of half a head apart (DeepSeek).
    /// Outputs are half a head apart in both layouts.
    pub interleaved: bool,
}

impl Default for Rope {
    fn default() -> Self {
        Rope {
            theta: 10_000.0,
            scaling: Scaling::None,
            interleaved: false,
        }
    }
}

/// The rotation of every pair of values at any position.
///
/// A pass computes the rotations of its own rows. A table of every position would grow with
/// `max_position_embeddings`, to half a gigabyte for a context of a million tokens.
#[derive(Debug, Clone)]
pub struct Rotations {
    /// Radians per position, `[width/2]`.
    frequencies: Vec<f32>,
    /// Factor of cos and sin.
    factor: f32,
}

impl Rotations {
    /// Pairs of a head that are rotated.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// cos and sin at each of `positions`, `[positions, width/2]` each.
    ///
    /// Angles are f32 products of f32 values, because models were trained with those.
    pub fn at(&self, positions: impl Iterator<Item = usize> + Clone) -> (Vec<f32>, Vec<f32>) {
        let (count, end) = positions
            .clone()
            .fold((0, 0), |(count, end), position| (count + 1, end.max(position + 1)));
        if end >= count {
            return self.each(positions);
        }
        // Several sequences share positions.
        let (cos, sin) = self.each(0..end);
        let pairs = self.pairs();
        let rows = |each: &[f32]| {
            let row = |position: usize| &each[position * pairs..][..pairs];
            positions.clone().flat_map(row).copied().collect()
        };
        (rows(&cos), rows(&sin))
    }

    fn each(&self, positions: impl Iterator<Item = usize>) -> (Vec<f32>, Vec<f32>) {
        let angles = positions.flat_map(|position| self.frequencies.iter().map(move |freq| position as f32 * freq));
        angles
            .map(|angle| {
                let (sin, cos) = f64::from(angle).sin_cos();
                (cos as f32 * self.factor, sin as f32 * self.factor)
            })
            .unzip()
    }
}

/// `rope_type`.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// `default`.
    None,
    /// `linear`: positions are divided by a factor (Chen et al. 2023).
    Linear { factor: f64 },
    /// `llama3`: low frequencies are divided by a factor, high ones stay, and those between are
    /// blended (Llama 3.1).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: f64,
    },
    /// `yarn` (Peng et al. 2023).
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_context: f64,
        /// Round the ends of the blended range outwards to whole pairs.
        truncate: bool,
        /// Factor of cos and sin.
        attention_factor: f64,
        /// Factor of the attention scores in DeepSeek models.
        score_scale: f64,
    },
}

impl Rope {
    pub(super) fn from_json(json: &Value, interleaved: bool, context: i64) -> Result<Self, Error> {
        // transformers 5 moved theta and the scaling into one object. If a file has both spellings,
        // it uses the old one.
        let empty = |value: &Value| value.is_null() || value.as_object().is_some_and(|object| object.is_empty());
        let (prefix, object) = match (&json["rope_parameters"], &json["rope_scaling"]) {
            (new, old) if empty(old) => ("rope_parameters", new),
            (_, old) => ("rope_scaling", old),
        };
        // An object in the object is a scaling for some layers only.
        let nested = object.as_object().map(|object| object.values().any(Value::is_object));
        if !object.is_null() && nested != Some(false) {
            return Err(unsupported(prefix, object));
        }
        let theta = match (&object["rope_theta"], &json["rope_theta"]) {
            (Value::Null, Value::Null) => 10_000.0,
            (Value::Null, theta) | (theta, _) => theta.as_f64().ok_or(Error::Missing("rope_theta"))?,
        };
        let partial = [&object["partial_rotary_factor"], &json["partial_rotary_factor"]];
        if let Some(value) = partial.into_iter().find(|v| !v.is_null() && v.as_f64() != Some(1.0)) {
            return Err(Error::Unsupported {
                field: "partial_rotary_factor",
                value: value.to_string(),
                supported: "1.0".into(),
            });
        }
        let kinds = [&object["rope_type"], &object["type"]];
        let kind = kinds
            .into_iter()
            .find(|kind| !kind.is_null())
            .cloned()
            .unwrap_or_default();
        let number = |field: &'static str| object[field].as_f64().ok_or(Error::Missing(field));
        // The context before scaling is beside the object in some files, and otherwise inside it.
        let original = || {
            let field = "original_max_position_embeddings";
            match json.get(field).or(object.get(field)) {
                None => Ok(context as f64),
                Some(value) => value.as_f64().ok_or(Error::Missing(field)),
            }
        };
        let scaling = match kind.as_str() {
            None if kind.is_null() => Scaling::None,
            Some("default") => Scaling::None,
            Some("linear") => Scaling::Linear {
                factor: number("factor")?,
            },
            Some("llama3") => Scaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_context: original()?,
            },
            Some("yarn") => yarn(object, context as f64, original()?)?,
            _ => return Err(unsupported(prefix, &kind)),
        };
        Ok(Rope {
            theta,
            scaling,
            interleaved: interleaved && flag(json, "rope_interleave", true)?,
        })
    }

    /// The longest context of a model with `context` positions, as vLLM takes it: yarn and linear
    /// stretch what the model was trained on. The positions of the other kinds are stretched already.
    pub(super) fn context(&self, context: i64) -> i64 {
        let stretched = match self.scaling {
            Scaling::None | Scaling::Llama3 { .. } => return context,
            Scaling::Linear { factor } => context as f64 * factor,
            Scaling::Yarn {
                factor,
                original_context,
                ..
            } => original_context * factor,
        };
        (stretched as i64).max(1)
    }

    /// The rotations of heads of which `width` values carry a position.
    pub fn rotations(&self, width: i64) -> Rotations {
        Rotations {
            frequencies: self.inv_freq(width),
            factor: match self.scaling {
                Scaling::Yarn { attention_factor, .. } => attention_factor as f32,
                _ => 1.0,
            },
        }
    }

    /// Factor of the attention scores in DeepSeek models; 1 without yarn.
    pub fn score_scale(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { score_scale, .. } => score_scale,
            _ => 1.0,
        }
    }

    /// Radians per position of each pair, `[width/2]`.
    fn inv_freq(&self, width: i64) -> Vec<f32> {
        let pairs = 0..width / 2;
        let period = |pair: i64| self.theta.powf(f64::from(2.0 * pair as f32 / width as f32)) as f32;
        let plain = |pair: i64| 1.0 / period(pair);
        match self.scaling {
            Scaling::None => pairs.map(plain).collect(),
            Scaling::Linear { factor } => pairs.map(|pair| plain(pair) / factor as f32).collect(),
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => pairs
                .map(|pair| {
                    let freq = f64::from(plain(pair));
                    let turns = original_context * freq / std::f64::consts::TAU;
                    let unscaled = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    ((1.0 - unscaled) * freq / factor + unscaled * freq) as f32
                })
                .collect(),
            Scaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context,
                truncate,
                ..
            } => {
                // The pair that makes this many turns over the original context.
                let pair_of = |turns: f64| {
                    width as f64 * (original_context / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(width as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                pairs
                    .map(|pair| {
                        let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                        let slow = 1.0 / (factor as f32 * period(pair));
                        slow * divided + plain(pair) * (1.0 - divided)
                    })
                    .collect()
            }
        }
    }
}

fn yarn(object: &Value, context: f64, original_context: f64) -> Result<Scaling, Error> {
    let number = |field: &'static str| match &object[field] {
        Value::Null => Ok(None),
        value => value.as_f64().map(Some).ok_or(Error::Missing(field)),
    };
    let factor = number("factor")?.unwrap_or(context / original_context);
    let mscale_of = |scale: f64| match factor <= 1.0 {
        true => 1.0,
        false => 0.1 * scale * factor.ln() + 1.0,
    };
    // 0 counts as absent.
    let scale = |field: &'static str| Ok::<_, Error>(number(field)?.filter(|&scale| scale != 0.0));
    let (mscale, all_dim) = (scale("mscale")?, scale("mscale_all_dim")?);
    let attention_factor = match (number("attention_factor")?, mscale, all_dim) {
        (Some(factor), _, _) => factor,
        (None, Some(mscale), Some(all_dim)) => mscale_of(mscale) / mscale_of(all_dim),
        _ => mscale_of(1.0),
    };
    Ok(Scaling::Yarn {
        factor,
        beta_fast: scale("beta_fast")?.unwrap_or(32.0),
        beta_slow: scale("beta_slow")?.unwrap_or(1.0),
        original_context,
        truncate: flag(object, "truncate", true)?,
        attention_factor,
        score_scale: all_dim.map_or(1.0, |all_dim| mscale_of(all_dim).powi(2)),
    })
}

fn unsupported(field: &'static str, value: &Value) -> Error {
    Error::Unsupported {
        field,
        value: value.to_string(),
        supported: "an object whose rope_type is default, linear, llama3 or yarn".into(),
    }
}
