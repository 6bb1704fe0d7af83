//! A run's private state after a step: everything that its next step needs and no version contains.
//!
//! One safetensors object per step, under `run/<run>/<step>-<serial>.safetensors` in the store's
//! private part:
//! ```text
//! tensors   master.<name>, first.<name>, second.<name>: master weights and Adam's moments, f32.
//!           For an adapter: both factors of every adapted matrix (`MODULE.lora_A.weight`)
//! metadata  format = springtide.checkpoint.v1
//!           state  = JSON: the step's record, Adam's step count, random state, the adapter's base
//!           blake3 = hash of the state and of every tensor's name, shape and bytes
//! ```
//! It includes the step's record, so that a restart can commit exactly the step of a manifest that
//! was never committed. Does not need libtorch: tensors are bytes here.

use crate::advantage::Baseline;
use artifact::digest::Digest;
use artifact::tensor::TensorData;
use bytes::Bytes;
use model::lora::{self, Adapter};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use uuid::Uuid;

const FORMAT: &str = "springtide.checkpoint.v1";

/// Why bytes are not a run state.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read run state: {0}")]
    Container(#[from] safetensors::SafeTensorError),
    #[error("read the metadata of the run state: {0}")]
    State(#[from] serde_json::Error),
    #[error("the run state has format {0:?}; this program reads {FORMAT}")]
    Format(Option<String>),
    #[error("the run state does not match its BLAKE3 hash")]
    Digest,
    #[error("it is not the run state that its step saved: somebody else wrote to the store")]
    Replaced,
    #[error("run state tensor `{name}`: {why}")]
    Tensor { name: String, why: &'static str },
    #[error("the adapter of the run state: {0}")]
    Adapter(String),
}

/// A step as the commit writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    pub run: Uuid,
    /// 1, 2, …
    pub step: i64,
    /// Generations trained on, in ascending order.
    pub cohort: Vec<Uuid>,
    /// Generations that its trainer did not train on, by code.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped: BTreeMap<String, Vec<Uuid>>,
    /// Of the cohort those of which it learned what their users typed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub typed: BTreeMap<Uuid, Typed>,
    /// The lease that made it, of a step of a trainer outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Lease>,
    /// Baselines after this step.
    pub baselines: BTreeMap<String, Baseline>,
    /// Loss, gradient norm, KL, parity, mismatch, timings.
    pub metrics: serde_json::Value,
}

/// What its user typed in place of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Typed {
    /// Trained ones.
    pub tokens: i32,
    /// Sent it.
    pub key: Uuid,
}

/// A lease of a cohort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    pub cohort: Uuid,
    pub fence: i64,
}

impl StepRecord {
    /// BLAKE3 of the sorted generation ids, 16 bytes each.
    pub fn cohort_digest(&self) -> Digest {
        let mut ids = self.cohort.clone();
        ids.sort_unstable();
        let mut hasher = blake3::Hasher::new();
        for id in &ids {
            hasher.update(id.as_bytes());
        }
        Digest(*hasher.finalize().as_bytes())
    }
}

/// The adapter's base, and how its factors are added to it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// The version whose weights stay unchanged.
    pub base: i64,
    pub base_root: Digest,
    pub config: lora::Config,
}

/// The state after a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    pub record: StepRecord,
    /// `None`: all weights are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// Number of optimizer updates.
    #[serde(rename = "optimiser_step")]
    pub optimizer_step: i64,
    /// State of the random numbers that choose the next tasks.
    pub random: u64,
    #[serde(skip)]
    pub master: BTreeMap<String, TensorData>,
    #[serde(skip)]
    pub first: BTreeMap<String, TensorData>,
    #[serde(skip)]
    pub second: BTreeMap<String, TensorData>,
}

/// A run state as bytes, and the hash in its metadata, by which the database knows it.
#[derive(Debug, Clone)]
pub struct Encoded {
    pub bytes: Bytes,
    pub digest: Digest,
}

/// The key of a step's run state in the store's private part.
pub fn key(run: Uuid, step: i64, serial: i64) -> String {
    format!("run/{run}/{step:010}-{serial:010}.safetensors")
}

/// The run and the step in a [`key`].
pub(super) fn of_key(key: &str) -> Option<(Uuid, i64)> {
    let (run, file) = key.strip_prefix("run/")?.split_once('/')?;
    let (step, _) = file.split_once('-')?;
    Some((run.parse().ok()?, step.parse().ok()?))
}

/// The base version of the adapter, read from the JSON header of a run state alone. `None`: all
/// weights are trained.
pub fn base_in_header(header: &[u8]) -> Result<Option<i64>, Error> {
    let header: serde_json::Value = serde_json::from_slice(header)?;
    let state = header["__metadata__"]["state"].as_str().unwrap_or_default();
    let state: RunState = serde_json::from_str(state)?;
    Ok(state.lora.map(|lora| lora.base))
}

impl RunState {
    pub fn encode(&self) -> Result<Encoded, Error> {
        let state = serde_json::to_string(self)?;
        let tensors = self.named_tensors();
        let digest = digest(&state, &tensors);
        let metadata = HashMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("blake3".to_string(), digest.to_string()),
            ("state".to_string(), state),
        ]);
        let views = tensors
            .iter()
            .map(|(name, t)| Ok((name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        let bytes = safetensors::serialize(views, Some(metadata))?.into();
        Ok(Encoded { bytes, digest })
    }

    /// Reads what [`encode`](Self::encode) wrote. `expected`: the digest that the database has of
    /// it; another run state is refused, however well it is formed. `None`: the database has none.
    pub fn from_bytes(bytes: &Bytes, expected: Option<Digest>) -> Result<Self, Error> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let file = SafeTensors::deserialize(bytes)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        if metadata.get("format").map(String::as_str) != Some(FORMAT) {
            return Err(Error::Format(metadata.get("format").cloned()));
        }
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            if view.dtype() != Dtype::F32 {
                return Err(Error::Tensor {
                    name: name.into(),
                    why: "is not f32",
                });
            }
            let data = TensorData {
                dtype: Dtype::F32,
                shape: view.shape().to_vec(),
                bytes: bytes.slice_ref(view.data()).into(),
            };
            tensors.insert(name.to_string(), data);
        }
        let text = metadata.get("state").map(String::as_str).unwrap_or_default();
        let found = digest(text, &tensors);
        if metadata.get("blake3") != Some(&found.to_string()) {
            return Err(Error::Digest);
        }
        if expected.is_some_and(|expected| expected != found) {
            return Err(Error::Replaced);
        }
        let mut run_state: RunState = serde_json::from_str(text)?;
        for (name, data) in tensors {
            let (part, rest) = name.split_once('.').unwrap_or((&name, ""));
            let map = match part {
                "master" => &mut run_state.master,
                "first" => &mut run_state.first,
                "second" => &mut run_state.second,
                _ => {
                    return Err(Error::Tensor {
                        name,
                        why: "is neither master, first nor second",
                    });
                }
            };
            map.insert(rest.to_string(), data);
        }
        Ok(run_state)
    }

    /// The adapter after the step, if the run trains one.
    pub fn adapter(&self) -> Result<Option<Adapter>, Error> {
        let adapter = |lora: &Lora| Adapter::from_tensors(lora.config.clone(), &self.master).map_err(Error::Adapter);
        self.lora.as_ref().map(adapter).transpose()
    }

    fn named_tensors(&self) -> BTreeMap<String, &TensorData> {
        [
            ("master", &self.master),
            ("first", &self.first),
            ("second", &self.second),
        ]
        .into_iter()
        .flat_map(|(part, map)| map.iter().map(move |(name, t)| (format!("{part}.{name}"), t)))
        .collect()
    }
}

/// Each field with its length, so that no two run states have the same bytes hashed.
fn digest<T: std::borrow::Borrow<TensorData>>(state: &str, tensors: &BTreeMap<String, T>) -> Digest {
    let mut hasher = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(state.as_bytes());
    for (name, tensor) in tensors {
        let tensor = tensor.borrow();
        field(name.as_bytes());
        let shape: Vec<u8> = tensor.shape.iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
        field(&shape);
        field(&tensor.bytes);
    }
    Digest(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> TensorData {
        TensorData {
            dtype: Dtype::F32,
            shape: vec![values.len()],
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into(),
        }
    }

    fn run_state() -> RunState {
        let of = |v: f32| BTreeMap::from([("model.norm.weight".to_string(), tensor(&[v, f32::MIN_POSITIVE]))]);
        RunState {
            record: StepRecord {
                run: Uuid::now_v7(),
                step: 3,
                cohort: vec![Uuid::now_v7(), Uuid::now_v7()],
                dropped: BTreeMap::from([("too_long".into(), vec![Uuid::now_v7()])]),
                typed: BTreeMap::from([(
                    Uuid::now_v7(),
                    Typed {
                        tokens: 5,
                        key: Uuid::now_v7(),
                    },
                )]),
                lease: Some(Lease {
                    cohort: Uuid::now_v7(),
                    fence: 2,
                }),
                baselines: BTreeMap::from([(
                    "completion".into(),
                    Baseline {
                        value: 0.1 + 0.2,
                        weight: 64.0,
                    },
                )]),
                metrics: serde_json::json!({"loss": -0.25}),
            },
            lora: Some(Lora {
                base: 7,
                base_root: Digest::of(b"base"),
                config: lora::Config::default(),
            }),
            optimizer_step: 3,
            random: u64::MAX - 5,
            master: of(1.0),
            first: of(-0.1),
            second: of(1e-30),
        }
    }

    #[test]
    fn a_written_run_state_is_read_back_bit_by_bit() {
        let before = run_state();
        let Encoded { bytes, digest } = before.encode().unwrap();
        for expected in [None, Some(digest)] {
            assert_eq!(RunState::from_bytes(&bytes, expected).unwrap(), before);
        }
    }

    #[test]
    fn a_flipped_bit_is_refused() {
        let bytes = run_state().encode().unwrap().bytes;
        for at in [bytes.len() - 1, bytes.len() - 20] {
            let mut broken = bytes.to_vec();
            broken[at] ^= 1;
            assert!(matches!(RunState::from_bytes(&broken.into(), None), Err(Error::Digest)));
        }
        assert!(RunState::from_bytes(&bytes.slice(..bytes.len() / 2), None).is_err());
        assert!(RunState::from_bytes(&Bytes::new(), None).is_err());
    }

    #[test]
    fn a_run_state_with_a_correct_hash_is_refused_if_it_is_not_the_expected_one() {
        let expected = run_state().encode().unwrap().digest;
        let mut forged = run_state();
        forged.record = StepRecord {
            run: Uuid::nil(),
            ..forged.record
        };
        let moment = forged.first.values_mut().next().unwrap();
        *moment = tensor(&[1e6, 0.0]);
        let bytes = forged.encode().unwrap().bytes;
        assert!(RunState::from_bytes(&bytes, None).is_ok());
        let refused = RunState::from_bytes(&bytes, Some(expected));
        assert!(matches!(refused, Err(Error::Replaced)), "{refused:?}");
    }

    #[test]
    fn another_safetensors_file_is_not_a_run_state() {
        let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap();
        let other = safetensors::serialize([("w", view)], None).unwrap();
        assert!(matches!(
            RunState::from_bytes(&other.into(), None),
            Err(Error::Format(None))
        ));
    }

    #[test]
    fn the_cohort_digest_does_not_depend_on_order() {
        let mut record = run_state().record;
        let digest = record.cohort_digest();
        record.cohort.reverse();
        assert_eq!(record.cohort_digest(), digest);
        record.cohort.pop();
        assert_ne!(record.cohort_digest(), digest);
    }
}
