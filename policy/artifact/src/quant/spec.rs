//! The specs by name. A spec never changes: another arithmetic gets another name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Spec {
    /// `fp8-e4m3-b128.1`: E4M3 with an f32 scale for every 128 × 128 weights, as DeepSeek-V3 is
    /// stored.
    Fp8,
    /// `int4-sym-g32.1`: 4-bit integers with a bf16 scale for every 32 weights of a row, as
    /// compressed-tensors packs them.
    Int4,
    /// `nvfp4-e4m3-g16.1`: E2M1 with an E4M3 scale for every 16 weights of a row and an f32 scale for the matrices that
    /// engines join, as compressed-tensors packs them.
    Nvfp4,
}

/// There is no spec of that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown quantization spec `{0}`; known are {known}", known = Spec::ALL.map(Spec::name).join(", "))]
pub struct Unknown(String);

impl Spec {
    /// Every spec.
    pub const ALL: [Spec; 3] = [Spec::Fp8, Spec::Int4, Spec::Nvfp4];

    /// The name in manifests and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Spec::Fp8 => "fp8-e4m3-b128.1",
            Spec::Int4 => "int4-sym-g32.1",
            Spec::Nvfp4 => "nvfp4-e4m3-g16.1",
        }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Spec {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        let known = Spec::ALL.into_iter().find(|spec| spec.name() == name);
        known.ok_or_else(|| Unknown(name.into()))
    }
}

impl TryFrom<String> for Spec {
    type Error = Unknown;

    fn try_from(name: String) -> Result<Self, Unknown> {
        name.parse()
    }
}

impl From<Spec> for String {
    fn from(spec: Spec) -> String {
        spec.name().into()
    }
}
